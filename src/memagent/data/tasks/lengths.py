"""Texts of a requested length: how many units to put in, found with few counts.

    fitted = fit(lambda n: "tick tock " * n, 4096, tokenizer)
    fitted.num_units, fitted.num_tokens, fitted.text          # at most 4096 tokens, at least 98 %

A unit is whatever a text grows by: a sentence, a paragraph, a word, a character. Counting millions
of tokens takes seconds, so the cost of a unit is measured on short texts first, and the whole text is
counted once or twice:

    tokens
    target ┤- - - - - - - - - - - - ●  counted: accepted
           │                  ·
           │            ·   extrapolated
           │      ●  3 % of the target
           └─●──────────────────────── units
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from memagent.config import LONGEST
from memagent.engines import store
from memagent.errors import ConfigError
from memagent.tokens.tokenizers import HuggingFaceTokenizer, Tokenizer, open_tokenizer

LEAST_SHARE = 0.98
"""A text of a requested length has at least this share of it."""
AIMED_SHARE = 0.995
NOMINAL_TOKENS_PER_DOCUMENT = 7 * 1024 / 50
"""A length in documents counts as so many tokens each: the published series calls 50 documents 7K."""
PROBE_TOKENS = 512
PROBE_SHARE = 0.03
"""Length of the second probe: cheap to count, long enough to be typical."""
LATE_TRIES = 6

_length = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_length(value: Any) -> int:
    """A length in tokens: 8192, or 8k for 8 * 1,024; m is 1,024 * 1,024."""
    match = _length.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a length; write it as 8192 or 8k")
    return round(float(match[1]) * _FACTORS[match[2].lower()])


def nominal_tokens(num_documents: int) -> int:
    """The length that a number of documents is reported as: 50 documents are 7K, 100 are 14K."""
    return round(num_documents * NOMINAL_TOKENS_PER_DOCUMENT)


Length = Annotated[int, BeforeValidator(parse_length), Field(ge=64, le=LONGEST)]
"""A length in settings."""


class Fitted(NamedTuple):
    """A text of the requested length."""

    num_units: int
    text: str
    num_tokens: int


class _Probe(NamedTuple):
    num_units: int
    num_tokens: int


def fit(
    make: Callable[[int], str],
    target_tokens: int,
    tokenizer: Tokenizer,
    *,
    least_units: int = 0,
    is_coarse: bool = False,
    what: str = "the text",
) -> Fitted:
    """The text `make(num_units)` that has at most `target_tokens` and at least 98 % of them.

    `make` has to grow with its number, evenly or not. Raises ConfigError where `least_units` are too long, or
    where one unit more is too much and one less too little; with `is_coarse` the shorter text is returned
    then. `what` names the text in errors.
    """
    floor = target_tokens * LEAST_SHARE
    least, text = _count(make, least_units, tokenizer)
    if least.num_tokens > target_tokens:
        raise ConfigError(
            f"tokens={target_tokens} is too short: {what} has {least.num_tokens} at least; raise `tokens`"
        )
    low, high, num_tries = least, None, 0
    cost = _cost_of_a_unit(make, least, target_tokens, tokenizer)
    while low.num_tokens < floor and (high is None or high.num_units - low.num_units > 1):
        num_units = _next(low, high, cost, target_tokens, is_late=num_tries >= LATE_TRIES)
        probe, made = _count(make, num_units, tokenizer)
        num_tries += 1
        cost = _slope(least, probe) or cost
        if probe.num_tokens > target_tokens:
            high = probe
        else:
            low, text = probe, made
    if low.num_tokens < floor and not is_coarse:
        assert high is not None
        raise ConfigError(
            f"tokens={target_tokens} is too short to be met within 2 %: {what} has "
            f"{low.num_tokens} or {high.num_tokens}; raise `tokens`"
        )
    return Fitted(low.num_units, text, low.num_tokens)


@lru_cache(maxsize=8)
def length_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a task's setting `tokenizer` means; kept open in this process."""
    path = store.find(name)
    if path is None:
        if name in store.KNOWN:
            raise ConfigError(
                f"the tokenizer {name} is not on this machine; run `memagent models pull {name}` "
                "or name another `tokenizer`"
            )
        return open_tokenizer(name)
    from memagent.engines.local.gguf_files import open_header  # brings the tokenizers library

    folder = path if path.is_dir() else open_header(path).folder
    return HuggingFaceTokenizer.from_path(folder, name)


def _cost_of_a_unit(
    make: Callable[[int], str], least: _Probe, target_tokens: int, tokenizer: Tokenizer
) -> float:
    """Tokens per unit, from a short text and then from one of 3 % of the length."""
    num_units, probe = 1, least
    enough = least.num_tokens + min(PROBE_TOKENS, target_tokens * PROBE_SHARE)
    while probe.num_tokens < min(enough, target_tokens + 1):
        assert num_units < 1 << 40, "the text does not grow with its units"
        probe, _ = _count(make, least.num_units + num_units, tokenizer)
        num_units *= 4
    cost = _slope(least, probe)
    typical = least.num_units + round(target_tokens * PROBE_SHARE / cost)
    if typical > 4 * probe.num_units:
        probe, _ = _count(make, typical, tokenizer)
        cost = _slope(least, probe)
    return cost


def _next(
    low: _Probe, high: _Probe | None, cost: float, target_tokens: int, *, is_late: bool
) -> int:
    """The number of units to try: where the line through what is known meets the target."""
    if high is not None and is_late:  # a curve, which lines approach slowly: halve what is left
        return (low.num_units + high.num_units) // 2
    missing = target_tokens * AIMED_SHARE - low.num_tokens
    if high is None:
        return low.num_units + max(1, round(missing / cost))
    guess = low.num_units + round(missing / _slope(low, high))
    return min(max(guess, low.num_units + 1), high.num_units - 1)


def _slope(first: _Probe, second: _Probe) -> float:
    return (second.num_tokens - first.num_tokens) / (second.num_units - first.num_units)


def _count(make: Callable[[int], str], num_units: int, tokenizer: Tokenizer) -> tuple[_Probe, str]:
    text = make(num_units)
    return _Probe(num_units, tokenizer.count(text)), text


# --- where evidence lies --------------------------------------------------------------------------

NUM_TENTHS = 10


def bucket_of(depth: float, *, num_buckets: int) -> int:
    """The bucket that a depth from 0 to 1 falls into; 1 itself belongs to the last."""
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"a depth lies between 0 and 1, not at {depth}")
    return min(int(depth * num_buckets), num_buckets - 1)


def bucket_counts(depths: Sequence[float], *, num_buckets: int) -> list[int]:
    """How many depths fall into each bucket."""
    counts = [0] * num_buckets
    for depth in depths:
        counts[bucket_of(depth, num_buckets=num_buckets)] += 1
    return counts


def uniformity_p(counts: Sequence[int]) -> float:
    """Chance of counts at least this uneven if every bucket is equally likely (chi-square test).

    Sound from about five expected counts per bucket. 1.0 where there is nothing to compare.
    """
    if any(count < 0 for count in counts):
        raise ValueError("a count cannot be negative")
    total = sum(counts)
    if len(counts) < 2 or total == 0:
        return 1.0
    expected = total / len(counts)
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return chi_square_p(statistic, degrees=len(counts) - 1)


def chi_square_p(statistic: float, *, degrees: int) -> float:
    """Chance that a chi-square value of so many degrees of freedom is at least `statistic`."""
    half = statistic / 2
    if half == 0:
        return 1.0
    # two degrees more add one term; the sums begin with one degree and with two
    p = math.erfc(math.sqrt(half)) if degrees % 2 else math.exp(-half)
    for term in range(2 - degrees % 2, degrees, 2):
        p += math.exp(term / 2 * math.log(half) - half - math.lgamma(term / 2 + 1))
    return p
