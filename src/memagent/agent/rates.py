"""How long calls take: measured in runs, remembered for each model, used for estimates before the next run.

    times = CallTimes()
    times.add(prompt_tokens=5200, completion_tokens=300, limit=1024, seconds=4.1)
    rate = times.rate(wall_seconds=60.0)
    Work(num_calls=40, prompt_tokens=210_000, max_completion_tokens=41_000).seconds(rate)

A call is taken to last a constant, a time for each prompt token and a time for each token of its reply; the three
are fitted to the calls of a run and are never negative. What runs measured lies in a file of the user's state
folder: model, address, figures, no text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_state_path

from memagent.documents.tokenizers import Tokenizer
from memagent.engines.base import BaseEngine
from memagent.errors import MemagentError
from memagent.files import write_atomically
from memagent.types import Engine, Prices, Sampling

LEAST_CALLS = 2
"""A run with fewer calls measures nothing."""
MAX_KNOWN = 500
PROBE_PROMPT = 512
"""Most tokens of the prompt that measures a model in this process."""
PROBE_REPLY = 24
"""Most tokens of its reply."""
WORDS = "the clerk wrote down what the miller had sold that winter and what was left in the barn "
TOLERANCE = 1.02
"""A simpler fit is taken where its squared error is at most this many times that of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRate:
    """How long calls to a model take."""

    per_call: float
    """Seconds of every call."""
    per_prompt_token: float
    per_reply_token: float
    reply_share: float | None
    """Tokens of replies as a share of their limits; None where it is not known."""
    parallel: float
    """Calls in flight on average while it was measured."""
    num_calls: int
    measured: str
    """Date."""

    def call_seconds(
        self, *, num_calls: float, prompt_tokens: float, completion_tokens: float
    ) -> float:
        """The time of calls one after the other."""
        tokens = self.per_prompt_token * prompt_tokens + self.per_reply_token * completion_tokens
        return self.per_call * num_calls + tokens


class TimeEstimate(NamedTuple):
    """Seconds that calls will take, from all replies empty to all at their limit; equal where it is known."""

    low: float
    high: float


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

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost: all replies empty, all at their limit."""
        low = prices.cost(prompt_tokens=round(self.prompt_tokens), completion_tokens=0)
        high = prices.cost(
            prompt_tokens=round(self.prompt_tokens + self.max_memory_tokens),
            completion_tokens=round(self.max_completion_tokens),
        )
        return low, high

    def seconds(self, rate: CallRate, *, lanes: float | None = None) -> TimeEstimate:
        """How long it takes, `lanes` calls at once; None: as many as when the rate was measured."""
        shares = (0.0, 1.0) if rate.reply_share is None else (rate.reply_share,) * 2
        low, high = (
            rate.call_seconds(
                num_calls=self.num_calls,
                prompt_tokens=self.prompt_tokens + share * self.max_memory_tokens,
                completion_tokens=share * self.max_completion_tokens,
            )
            / max(1.0, lanes or rate.parallel)
            for share in shares
        )
        return TimeEstimate(low, high)


# --- measuring ------------------------------------------------------------------------------------


class CallTimes:
    """The calls of a run, as the sums that a fit needs."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0
        """All calls one after the other."""
        self._limits = self._replies = 0
        self._products = [[0.0] * 3 for _ in range(3)]
        self._results = [0.0] * 3
        self._squares = 0.0

    def add(
        self, *, prompt_tokens: int, completion_tokens: int, limit: int, seconds: float
    ) -> None:
        """Count a call; `limit` is the most tokens its reply could have had."""
        row = (1.0, float(prompt_tokens), float(completion_tokens))
        for one in range(3):
            for other in range(3):
                self._products[one][other] += row[one] * row[other]
            self._results[one] += row[one] * seconds
        self._squares += seconds * seconds
        self.num_calls += 1
        self.seconds += seconds
        self._limits += limit
        self._replies += completion_tokens

    def merge(self, other: CallTimes) -> None:
        """Count the calls of another one too."""
        for one in range(3):
            for place in range(3):
                self._products[one][place] += other._products[one][place]
            self._results[one] += other._results[one]
        self._squares += other._squares
        self.num_calls += other.num_calls
        self.seconds += other.seconds
        self._limits += other._limits
        self._replies += other._replies

    def rate(self, *, wall_seconds: float) -> CallRate | None:
        """The rate, where there are enough calls. `wall_seconds` is how long all of them took together."""
        if self.num_calls < LEAST_CALLS or self.seconds <= 0 or wall_seconds <= 0:
            return None
        constant, prompt, reply = self._fit()
        return CallRate(
            per_call=constant,
            per_prompt_token=prompt,
            per_reply_token=reply,
            reply_share=min(1.0, self._replies / self._limits) if self._limits else None,
            parallel=max(1.0, self.seconds / wall_seconds),
            num_calls=self.num_calls,
            measured=date.today().isoformat(),
        )

    def _fit(self) -> tuple[float, float, float]:
        """Least squares without negative values; the sum of all calls is met exactly.

        Of fits that are about as good, one by tokens is preferred to one by calls: it holds for other sizes.
        """
        fits: list[tuple[float, list[float]]] = []
        for used in ((1, 2), (1,), (2,), (0, 1, 2), (0, 1), (0, 2), (0,)):
            solved = _solve(
                [[self._products[one][other] for other in used] for one in used],
                [self._results[one] for one in used],
            )
            if solved is None or min(solved) < 0:
                continue
            values = [0.0] * 3
            for place, value in zip(used, solved, strict=True):
                values[place] = value
            explained = sum(a * b for a, b in zip(values, self._results, strict=True))
            fits.append((max(0.0, self._squares - explained), values))
        assert fits, "the mean is always a fit"
        best = min(error for error, _ in fits)
        floor = 1e-9 * self._squares
        values = next(values for error, values in fits if error <= best * TOLERANCE + floor)
        total = sum(a * b for a, b in zip(values, self._products[0], strict=True))
        scale = self.seconds / total if total > 0 else 1.0
        return values[0] * scale, values[1] * scale, values[2] * scale


async def measure(engine: Engine, tokenizer: Tokenizer, *, prompt_tokens: int) -> CallRate | None:
    """The rate of a model in this process, by two short calls; None where they fail."""
    wanted = max(16, min(PROBE_PROMPT, prompt_tokens))
    text = WORDS * (wanted // 16 + 1)
    num_chars = max(1, int(len(text) * wanted / max(1, tokenizer.count(text))))
    seconds: list[float] = []
    used: list[tuple[int, int]] = []
    for number, limit in enumerate((1, PROBE_REPLY)):
        content = f"{number} {text[:num_chars]}"
        clock = time.perf_counter()
        try:
            completion = await engine.complete(
                [{"role": "user", "content": content}],
                Sampling(max_tokens=limit, temperature=0.0, seed=0),
            )
        except MemagentError:
            return None
        seconds.append(max(1e-6, time.perf_counter() - clock))
        usage = completion.usage
        reply = usage.completion_tokens if usage else tokenizer.count(completion.text)
        used.append((usage.prompt_tokens if usage else tokenizer.count(content), max(1, reply)))
    per_prompt = seconds[0] / max(1, used[0][0])
    per_reply = (seconds[1] - per_prompt * used[1][0]) / used[1][1]
    return CallRate(
        per_call=0.0,
        per_prompt_token=per_prompt,
        per_reply_token=max(per_prompt, per_reply),
        reply_share=None,
        parallel=1.0,
        num_calls=2,
        measured=date.today().isoformat(),
    )


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """The solution of linear equations; None where there is not exactly one."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    scales = [max(abs(value) for value in line[:size]) for line in rows]
    for place in range(size):
        pivot = max(range(place, size), key=lambda number: abs(rows[number][place]))
        if abs(rows[pivot][place]) <= 1e-9 * max(scales[pivot], 1e-300):
            return None
        rows[place], rows[pivot] = rows[pivot], rows[place]
        scales[place], scales[pivot] = scales[pivot], scales[place]
        for number in range(size):
            if number != place:
                factor = rows[number][place] / rows[place][place]
                rows[number] = [
                    a - factor * b for a, b in zip(rows[number], rows[place], strict=True)
                ]
    return [rows[place][size] / rows[place][place] for place in range(size)]


# --- what was measured before ---------------------------------------------------------------------


def remember(engine: Engine, rate: CallRate | None) -> None:
    """Keep a rate for the next estimate. A state folder that cannot be written is no error."""
    if rate is None:
        return
    known = {name: values for name, values in _known().items() if name != _key(engine)}
    known = dict(list(known.items())[-MAX_KNOWN + 1 :])
    data = json.dumps({**known, _key(engine): asdict(rate)}, indent=1).encode()
    try:
        _record().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_record(), data)
    except OSError:
        return


def recall(engine: Engine) -> CallRate | None:
    """What the last run with this model measured."""
    values = _known().get(_key(engine))
    try:
        rate = CallRate(**values) if isinstance(values, dict) else None
        if rate is not None:
            Work(num_calls=1, prompt_tokens=1, max_completion_tokens=1).seconds(rate)
    except (TypeError, ValueError):  # a file of another version
        return None
    return rate


def _key(engine: Engine) -> str:
    address = engine.kept_address if isinstance(engine, BaseEngine) else None
    return f"{address or type(engine).__name__} {engine.model}"


def _known() -> dict[str, object]:
    try:
        found = json.loads(_record().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record() -> Path:
    return user_state_path("memagent", appauthor=False) / "rates.json"
