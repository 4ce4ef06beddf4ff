"""Errors a user can act on. Each message is one line that says what to change.

Anything else that escapes is a bug in memagent and keeps its traceback.

    MemagentError
    ├── UserError            bad input: exit code 2
    │   ├── ConfigError      a setting is wrong or settings contradict each other
    │   ├── BudgetError      the parts of a prompt do not fit the window
    │   ├── DocumentError    a text cannot be read
    │   ├── RunError         a run directory cannot be used
    │   │   └── RunNotWritable   a full disk, or a folder that became read-only
    │   └── DataError        a dataset or one of its sources is invalid
    ├── EngineError          the endpoint failed after retries: exit code 3
    │   ├── EmptyAnswer      the model gave an empty answer
    │   └── MachineError     the machine that computes failed, whatever it was asked: out of memory, a lost GPU
    │       ├── ClusterError     a Ray cluster is out of reach, too small, or lost a part for too long
    │       └── PromptCut        the server cut a prompt and said nothing
    └── LimitReached         a limit on calls or cost stopped the run: exit code 4
"""

from __future__ import annotations

from typing import Any

MAX_REASON = 200
"""Characters of what others say inside a message."""


class MemagentError(Exception):
    """Base of every error meant for the user."""

    exit_code = 1


class UserError(MemagentError):
    """The input, not the software or the endpoint, has to change."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is wrong, or settings contradict each other."""


class BudgetError(ConfigError):
    """Question, section, memory, reply and template do not fit the window together."""


class DocumentError(UserError):
    """A text cannot be read."""


class RunError(UserError):
    """A run directory cannot be created, continued or read."""


class RunNotWritable(RunError):
    """Files of a run cannot be used now: a full disk, or another process. What they hold is kept."""


class DataError(UserError):
    """A dataset or one of its sources cannot be read, or lacks what was requested."""


class EngineRefused(UserError):
    """The endpoint refuses the request as it stands (key, model, size): repeating will not help."""


class PromptTooLong(EngineRefused):
    """The prompt, with room for the reply, does not fit the window of the model."""


class EngineError(MemagentError):
    """The endpoint failed for longer than `patience`. What was read so far is kept."""

    exit_code = 3


class EmptyAnswer(EngineError):
    """The model gave an empty answer, or reasoning only."""

    def __init__(self, message: str, step: Any = None) -> None:
        super().__init__(message)
        self.step = step
        """The Step of the answer, with what it used."""


class MachineError(EngineError):
    """The machine that computes failed, whatever it was asked: out of memory, a lost GPU, an engine that ended."""


class ClusterError(MachineError):
    """A Ray cluster cannot be reached, is too small, or lost a part for too long. Finished work is kept."""


class PromptCut(MachineError):
    """The server cut a prompt to its window and said nothing; what it replies is worth nothing."""


class LimitReached(MemagentError):
    """A limit the user set (calls, cost) stops the run before it is passed."""

    exit_code = 4


def one_line(error: BaseException | str, max_chars: int = MAX_REASON) -> str:
    """What an error says, as one short line without control characters."""
    return plain(str(error), max_chars) or type(error).__name__


def plain(text: str, max_chars: int = MAX_REASON) -> str:
    """A text of a stranger inside a message: one short line without control characters."""
    words = " ".join(text.split())[:max_chars]
    return "".join(char if char.isprintable() else "\ufffd" for char in words)
