"""Words, numbers and codes for keys and values.

    "words"     gentle-harbour        an adjective and a noun, 6 million of them
    "numbers"   4837261               seven digits
    "uuids"     9b2f6c1e-...          version 4

`invented_word` gives words beyond all lists, as many as are needed.

The lists of words are those of the library wonderwords, as in RULER, without the entries that are
not plain lower-case words.
"""

from __future__ import annotations

import random
import uuid
from functools import lru_cache
from importlib import import_module
from typing import Literal

from memagent.errors import ConfigError

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
