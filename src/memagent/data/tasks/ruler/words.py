"""Words that occur most often: in a numbered list (cwe), and in a text in code (fwe).

    cwe   1. harbour 2. oak 3. harbour 4. lend ...      ten words occur 30 times, all others 3 times,
                                                        in texts of any length

A long cwe list needs more words than the dictionary has: pairs of words while none of their words gets as
common as the answers, else invented words.

    fwe   ... qhwzpk ... ... tbivox qhwzpk ...          how often falls as rank to the power of -2

The answer is spread over the whole text, so these examples have no evidence.

    open_task("ruler/cwe", {"tokens": 16384}), open_task("ruler/fwe", {"tokens": 16384})
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections import Counter
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from memagent.config import MOST
from memagent.data.example import Passage
from memagent.data.tasks.lengths import Fitted, fit
from memagent.data.tasks.registry import Draft, GeneratedTask, TaskSettings
from memagent.errors import ConfigError

# --- words and values that are drawn --------------------------------------------------------------

ValueKind = Literal["words", "numbers", "uuids"]

NOUN_OF_KIND: dict[ValueKind, str] = {"words": "word", "numbers": "number", "uuids": "code"}
NUMBER_DIGITS = 7
ONSETS, VOWELS, ENDINGS = "bdfghjklmnprstvz", "aeiou", "klmnrst"
WORDS_PER_SYLLABLES = 1_000_000
"""Invented words get a syllable more after so many: three syllables give 3.5 million words."""


def draw_one(kind: ValueKind, source: random.Random) -> str:
    """A key or value of a kind."""
    if kind == "numbers":
        return str(source.randrange(10 ** (NUMBER_DIGITS - 1), 10**NUMBER_DIGITS))
    if kind == "uuids":
        return str(uuid.UUID(int=source.getrandbits(128), version=4))
    return f"{source.choice(words_of('adjectives'))}-{source.choice(words_of('nouns'))}"


def draw_new(kind: ValueKind, source: random.Random, taken: set[str]) -> str:
    """One that is not in `taken`; it is put there."""
    while (drawn := draw_one(kind, source)) in taken:
        pass
    taken.add(drawn)
    return drawn


def invented_word(source: random.Random, taken: set[str]) -> str:
    """A word that is in no list and not in `taken`, such as `bakolunem`; it is put there."""
    known = _known_words()
    while True:
        num_syllables = 3 + len(taken) // WORDS_PER_SYLLABLES
        syllables = [source.choice(ONSETS) + source.choice(VOWELS) for _ in range(num_syllables)]
        word = "".join(syllables) + source.choice(ENDINGS)
        if word not in known and word not in taken:
            taken.add(word)
            return word


@lru_cache(maxsize=1)
def _known_words() -> frozenset[str]:
    return frozenset(single_words())


@lru_cache(maxsize=1)
def single_words() -> tuple[str, ...]:
    """All nouns, adjectives and verbs, in alphabetical order."""
    lists = (words_of("nouns"), words_of("adjectives"), words_of("verbs"))
    return tuple(sorted({word for words in lists for word in words}))


@lru_cache(maxsize=3)
def words_of(part_of_speech: Literal["nouns", "adjectives", "verbs"]) -> tuple[str, ...]:
    """The plain words of a list, in alphabetical order."""
    try:
        library = import_module("wonderwords")
    except ModuleNotFoundError:
        raise ConfigError(
            'the words of RULER come from the library wonderwords: pip install "memagent[data]"'
        ) from None
    words: list[str] = library.RandomWord().parts_of_speech[part_of_speech]
    clean = {word for word in library.filter_profanity(words) if _is_plain(word)}
    return tuple(sorted(clean))


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _is_plain(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower() and len(word) > 1


SHORT_TOKENS = 4096
SHORT_FREQUENCIES = (6, 1)
"""Below `SHORT_TOKENS` RULER counts 6 and 1, since ten words 30 times would not fit."""
FREQUENCIES = (30, 3)

DOTS = "..."
"""The commonest word of a coded text: noise that is not to be counted."""
CODED_LETTERS = 6
NUM_ASKED = 3
TOKENS_PER_CODED_WORD = 50


# --- common words ---------------------------------------------------------------------------------


class CommonSettings(TaskSettings):
    """How often words occur."""

    num_common: int = Field(default=10, ge=1, le=MOST)
    """Words that occur often: the answer."""
    freq_common: int | None = Field(default=None, ge=2, le=MOST)
    """How often each of them occurs; 30, or 6 below 4,096 tokens, when not given."""
    freq_uncommon: int | None = Field(default=None, ge=1, le=MOST)
    """How often each other word occurs; 3, or 1 below 4,096 tokens, when not given."""

    def frequencies(self, tokens: int) -> tuple[int, int]:
        """How often the words of the answer and all others occur."""
        common, uncommon = SHORT_FREQUENCIES if tokens < SHORT_TOKENS else FREQUENCIES
        return self.freq_common or common, self.freq_uncommon or uncommon


def open_common(name: str, settings: dict[str, Any]) -> CommonTask:
    """The task cwe."""
    return CommonTask(name, CommonSettings.parse(settings))


class CommonTask(GeneratedTask[CommonSettings]):
    """Generates numbered lists in which some words occur more often than others."""

    def __init__(self, name: str, settings: CommonSettings) -> None:
        super().__init__(name, settings)
        self._common, self._uncommon = settings.frequencies(self.tokens)
        if self._common <= self._uncommon:
            raise ConfigError(
                f"freq_common={self._common} must be above freq_uncommon={self._uncommon}"
            )

    def draft(self, index: int) -> Draft:
        drawn, fitted = self._fitted(index, has_pairs=True)
        if drawn.num_uses(fitted.num_units) * self._uncommon >= self._common:
            drawn, fitted = self._fitted(index, has_pairs=False)
        return Draft(
            question=(
                "The text is a numbered list of words. Which "
                f"{self.settings.num_common} words occur most often in it?"
            ),
            answers=tuple(drawn.common),
            documents=(Passage(text=fitted.text),),
            num_tokens=fitted.num_tokens,
            metadata={
                "freq_common": self._common,
                "freq_uncommon": self._uncommon,
                "num_uncommon": fitted.num_units,
            },
        )

    def _fitted(self, index: int, *, has_pairs: bool) -> tuple[_Words, Fitted]:
        drawn = _Words(self.rng(index, "words"), self.settings.num_common, has_pairs=has_pairs)

        def text(num_uncommon: int) -> str:
            words = drawn.common * self._common + drawn.uncommon(num_uncommon) * self._uncommon
            self.rng(index, "order").shuffle(words)
            return " ".join([f"{number}. {word}" for number, word in enumerate(words, start=1)])

        what = f"{self.name} with {self.settings.num_common} words {self._common} times"
        return drawn, fit(text, self.tokens, self.tokenizer, least_units=1, what=what)


class _Words:
    """The common words of an example, and as many others as requested."""

    def __init__(self, source: random.Random, num_common: int, *, has_pairs: bool) -> None:
        """Beyond single words there are pairs of them, or invented words."""
        self._source = source
        self._has_pairs = has_pairs
        singles = list(single_words())
        source.shuffle(singles)
        self.common = _apart(singles, num_common)
        self._taken = set(self.common)
        self._others = [word for word in singles if word not in self._taken]
        self._taken.update(self._others)

    def uncommon(self, count: int) -> list[str]:
        """Single words while there are any, then further ones."""
        while len(self._others) < count:
            further = (
                draw_new("words", self._source, self._taken)
                if self._has_pairs
                else invented_word(self._source, self._taken)
            )
            self._others.append(further)
        return self._others[:count]

    def num_uses(self, count: int) -> int:
        """How many of so many others contain the word used most; words of the answer do not count."""
        uses = Counter(part for word in self._others[:count] for part in word.split("-"))
        return max((num for word, num in uses.items() if word not in self.common), default=0)


def _apart(words: list[str], count: int) -> list[str]:
    """The first words of which none is part of another, so that each is found by itself."""
    chosen: list[str] = []
    for word in words:
        if not any(word in other or other in word for other in chosen):
            chosen.append(word)
        if len(chosen) == count:
            return chosen
    raise ConfigError(f"num_common={count} is more than there are words; lower `num_common`")


# --- frequent words in code -----------------------------------------------------------------------


class FrequentSettings(TaskSettings):
    """How quickly words get rarer."""

    alpha: float = Field(default=2.0, gt=1)
    """How often a word occurs is its rank to the power of -alpha."""


def open_frequent(name: str, settings: dict[str, Any]) -> FrequentTask:
    """The task fwe."""
    return FrequentTask(name, FrequentSettings.parse(settings))


class FrequentTask(GeneratedTask[FrequentSettings]):
    """Generates texts of coded words whose frequencies follow Zipf's law."""

    def draft(self, index: int) -> Draft:
        alpha = self.settings.alpha
        num_coded = max(self.tokens // TOKENS_PER_CODED_WORD, NUM_ASKED + 2)
        words = [DOTS, *coded_words(self.rng(index, "words"), num_coded - 1)]

        def text(num_words: int) -> str:
            counts = zipf_counts(num_words, len(words), alpha)
            drawn = [word for word, count in zip(words, counts, strict=False) for _ in range(count)]
            self.rng(index, "order").shuffle(drawn)
            return " ".join(drawn)

        least = least_words(NUM_ASKED + 1, alpha)
        fitted = fit(text, self.tokens, self.tokenizer, least_units=least, what=self.name)
        return Draft(
            question=(
                f"The text consists of words in code. Leave out the dots {DOTS!r}. Which three "
                "coded words occur most often in it?"
            ),
            answers=tuple(words[1 : NUM_ASKED + 1]),
            documents=(Passage(text=fitted.text),),
            num_tokens=fitted.num_tokens,
            metadata={
                "alpha": alpha,
                "vocabulary": num_coded,
                "counts": zipf_counts(fitted.num_units, len(words), alpha)[: NUM_ASKED + 2],
            },
        )


def coded_words(source: random.Random, count: int) -> list[str]:
    """Different words of six random letters; more of them begin with the same ones."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(source.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
    return list(words)


def zipf_counts(num_words: int, num_ranks: int, alpha: float) -> list[int]:
    """How often the word of each rank occurs, rounded down; ranks that never occur are left out."""
    scale = num_words / zeta(alpha)
    most = min(num_ranks, int(scale ** (1 / alpha)) + 1)
    counts = [int(scale * math.pow(rank, -alpha)) for rank in range(1, most + 1)]
    return [count for count in counts if count]


def least_words(rank: int, alpha: float) -> int:
    """From so many words on, the word of a rank occurs more often than the next."""
    return math.ceil(zeta(alpha) / (math.pow(rank, -alpha) - math.pow(rank + 1, -alpha)))


@lru_cache(maxsize=8)
def zeta(alpha: float, terms: int = 1000) -> float:
    """Riemann's zeta function above 1: a sum, and the integral of what is left of it."""
    power = partial(math.pow, terms)
    rest = power(1 - alpha) / (alpha - 1) - power(-alpha) / 2 + alpha * power(-alpha - 1) / 12
    return math.fsum(math.pow(rank, -alpha) for rank in range(1, terms + 1)) + rest
