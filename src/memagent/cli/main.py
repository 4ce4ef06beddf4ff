"""The `memagent` command. Commands are loaded when called, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import os
import re
import sys

import click

from memagent._version import __version__
from memagent.cli.shared.console import (
    INTERRUPTED,
    OutputLost,
    escaped_for,
    protect_output,
    with_options,
)
from memagent.cli.shared.lazy import LazyGroup
from memagent.errors import MemagentError

COMMANDS: dict[str, str] = {
    "ask": "Ask questions of texts of any length.",
    "data": "Build, inspect and convert datasets with known answers and evidence.",
    "demo": "Read a text that comes with memagent, and see the memory change.",
    "doctor": "Show what works on this machine, and what to run for what does not.",
    "eval": "Ask many questions with several methods and score the answers.",
    "mcp": "Offer documents to an assistant, over the Model Context Protocol.",
    "models": "List, download and delete models for the local engine.",
    "plan": "Plan a training run: memory, time and cost on GPUs of your choice.",
    "report": "Report evaluations: tables, a page and plots.",
    "runs": "List, show and delete runs on this machine.",
    "serve": "Serve a local model over an OpenAI-compatible HTTP API.",
    "train": "Train a model for an agent with reinforcement learning.",
    "view": "Show runs in a browser: readings, evaluations, training.",
}
"""Name to one-line help; `NAME` lives in `memagent.cli.NAME` as `command`."""
_suggestion = re.compile(r"\. \(?Did you mean(?: one of:)? (.*)\?\)?$")
"""How click words what may have been meant."""


app = LazyGroup(
    "memagent.cli",
    "Read text of any length with a language model whose window is small and fixed.",
    COMMANDS,
    places={"plan": "train.plan"},
)
click.version_option(__version__, prog_name="memagent")(app)


def main() -> None:
    """Entry point: runs a command and turns errors into one line and an exit code."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the program runs
    if sys.stdout is None:  # before hours of work whose result nobody would get
        sys.exit(_fail("standard output is closed; redirect it, to /dev/null if need be", 2))
    protect_output()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command; the exit code."""
    stdout = sys.stdout
    try:
        exit_code = _run(arguments)
        sys.stdout.flush()  # a closed pipe shows here, not when Python has shut down
        return exit_code
    except BrokenPipeError:  # its reader has ended, as in `memagent ask ... | head -1`
        return _without_output(0)
    except SystemExit:
        if sys.stdout is not stdout:  # click replaces it when a pipe is closed
            return _without_output(0)
        raise
    except OutputLost as error:
        return _without_output(_fail(str(error), 1))


def _run(arguments: list[str]) -> int:
    commands: list[click.Command] = [app]
    try:
        result = app.main(arguments, prog_name="memagent", standalone_mode=False, obj=commands)
    except MemagentError as error:
        return _fail(with_options(str(error), commands[-1]), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        return _fail(_usage_message(error), 2)
    except (KeyboardInterrupt, click.Abort, asyncio.CancelledError):  # again, while it shuts down
        return _fail("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _without_output(exit_code: int) -> int:
    """Let Python discard what is left of the output when it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def _usage_message(error: click.ClickException) -> str:
    message = _suggestion.sub(r"; did you mean \1?", error.format_message().rstrip("."))
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    see = " See" if message.endswith("?") else "; see"
    return f"{message}{see} `{context.command_path} --help`"


def _fail(message: str, exit_code: int) -> int:
    line = f"memagent: {' '.join(message.split())}"
    print(escaped_for(sys.stderr, line), file=sys.stderr)
    return exit_code
