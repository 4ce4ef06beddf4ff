"""The calls and tokens that are planned, what they cost, and how long they take.

    Work(num_calls=40, prompt_tokens=210_000, max_completion_tokens=41_000).cost(prices)
    speed = recall(engine)                                   # as the last run with the model was
    work.seconds(speed, lanes=16)

A run keeps how long its prompt tokens took in a file of the user's state folder: model, address, figures, no text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_state_path

from memagent.engines.base import facts_of
from memagent.files import write_atomically
from memagent.types import Engine, Prices

MAX_KNOWN = 500
"""Models whose speed is kept."""


class Speed(NamedTuple):
    """Seconds for each prompt token of a run, replies included."""

    of_calls: float
    """All calls one after the other."""
    of_run: float
    """From its start to its end: less where calls were in flight together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Calls and tokens that are planned."""

    num_calls: float = 0.0
    prompt_tokens: float = 0.0
    """Instructions, questions and texts."""
    max_memory_tokens: float = 0.0
    """What memories, drafts and notes can add to the prompts at most."""
    max_completion_tokens: float = 0.0
    """Every reply at its limit."""

    def __add__(self, other: Work) -> Work:
        return Work(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)}
        )

    def __mul__(self, times: int) -> Work:
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(Work)})

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost: all replies empty, all at their limit."""
        low = prices.cost(prompt_tokens=round(self.prompt_tokens), completion_tokens=0)
        high = prices.cost(
            prompt_tokens=round(self.prompt_tokens + self.max_memory_tokens),
            completion_tokens=round(self.max_completion_tokens),
        )
        return low, high

    def seconds(self, speed: Speed, *, lanes: float | None = None) -> float:
        """About how long it takes, `lanes` calls at once; None: as many as in the run that was measured."""
        per_token = speed.of_run if lanes is None else speed.of_calls / max(1.0, lanes)
        return self.prompt_tokens * per_token


def remember(engine: Engine, *, prompt_tokens: int, call_seconds: float, seconds: float) -> None:
    """Keep the speed of a run for the next estimate. A state folder that cannot be written is no error."""
    if prompt_tokens <= 0 or call_seconds <= 0:
        return
    known = {name: values for name, values in _known().items() if name != _key(engine)}
    known = dict(list(known.items())[-MAX_KNOWN + 1 :])
    speed = Speed(call_seconds / prompt_tokens, seconds / prompt_tokens)
    try:
        _record().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_record(), json.dumps({**known, _key(engine): speed}, indent=1).encode())
    except OSError:
        return


def recall(engine: Engine) -> Speed | None:
    """The speed of the last run with this model."""
    values = _known().get(_key(engine))
    if not isinstance(values, list) or len(values) != 2:
        return None
    if not all(isinstance(value, float) for value in values):
        return None
    return Speed(*values)


def _key(engine: Engine) -> str:
    return f"{facts_of(engine).kept_address or type(engine).__name__} {engine.model}"


def _known() -> dict[str, object]:
    try:
        found = json.loads(_record().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record() -> Path:
    return user_state_path("memagent", appauthor=False) / "rates.json"
