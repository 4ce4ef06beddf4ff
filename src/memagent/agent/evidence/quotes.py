"""Quotes: spans that a model copied from a section, found again in the text.

    section ── model ──▶ "the house is  RED" ── locate ──▶ Quote(text="The house is red", start=812, end=828)

A quote is searched word for word, then without regard to case, white space and typography: composed accents, forms of
quotation marks and dashes, invisible characters, and the vowel marks that Arabic and Hebrew may leave out. What was found
is what the text has, never what the model wrote; what was not found has no place, and is never shown as a source.

    >>> locate("the house  is RED", "Once. The house is red.")
    (6, 22)
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memagent.documents.document import Document, Place

MARKS = " \t\r\n\"'\u201c\u201d\u2018\u2019\u00ab\u00bb"
"""Blanks and quotation marks that models put around a quote."""
MIN_WORDS = 4
"""Fewer words of a memory that a section has too are no quote."""
MIN_SHARE, MIN_CONTENT_WORDS, MAX_SENTENCE_CHARS = 0.6, 3, 600
"""A note rewords a sentence that has this share of its content words, of at least so many; longer sentences are no quote."""

Span = tuple[int, int]
"""Where a quote begins and ends, in characters."""

_sentence_end = re.compile(r"(?<=[.!?])\s+")
_sentence = re.compile(r"\S.*?(?:[.!?](?=\s)|(?=\n\s*\n)|\Z)", re.DOTALL)
_FUNCTION = """a an and are as at be been but by for from had has have he her his in into is it its no not of on or she so
than that the their them there they this to was were which who will with"""
_function_words = frozenset(_FUNCTION.split())

_typography = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4\u0060", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        "\u2026": "...",
    }
)
_optional = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u0652\u0656-\u065f\u0670\u06d6-\u06ed\u034f\ufe00-\ufe0f]"
)
"""Hebrew points, Arabic vowel marks, the line that stretches Arabic words, and marks that choose a glyph."""
_no_blanks = re.compile(
    "[\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u1aaf\u1b00-\u1b7f\u2e80-\ua4cf\ua960-\ua9ff\uaa60-\uaadf\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdf\U00020000-\U0003ffff]"
)
"""Scripts without blanks between words: Thai, Lao, Tibetan, Burmese, Khmer, Chinese, Japanese; and Korean, whose particles
follow a noun without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A span that the model copied from a section, or claimed to have copied.

    Example: Quote(text="The house is red.", start=812, end=829, places=(Place(...),))
    """

    text: str
    """As the text has it; as the model wrote it where the text does not have it."""
    start: int | None = None
    """Character offset into the document's text; None for what is not in the section."""
    end: int | None = None
    places: tuple[Place, ...] = ()
    """File with page or line; empty for what is not in the section."""
    item: str | None = None
    """What it is about, where items are listed."""
    value: str | None = None
    """The item's value; None without one."""
    is_inferred: bool = False
    """True for what the model did not mark as a quote, but wrote into its memory, in the same or in other words."""

    @property
    def is_found(self) -> bool:
        """Whether the text has it."""
        return None not in (self.start, self.end)

    @property
    def span(self) -> tuple[int, int]:
        """Its character offsets; only for what was found."""
        assert self.start is not None, "the text does not have this quote"
        assert self.end is not None, "the text does not have this quote"
        return self.start, self.end


def words(text: str) -> list[str]:
    """Its words, with the marks that belong to their letters."""
    if text.isascii():
        return re.findall(r"\w+", text)
    return "".join(
        one if one.isalnum() or one == "_" or _is_mark(one) else " " for one in text
    ).split()


def folded(text: str) -> str:
    """A text for comparison: case, white space and typography do not count."""
    return _folded(text)[0]


def item_key(text: str | None) -> str:
    """A name or value for comparison: case, punctuation and a leading article do not count."""
    found = words(folded(text or ""))
    return " ".join(found[1:] if len(found) > 1 and found[0] in ("the", "a", "an") else found)


def place_quotes(
    said: Sequence[Quote], document: Document, *, start: int, section: str
) -> tuple[Quote, ...]:
    """Quotes of one reply with their places in the document; without one where the section does not have it.

    What is said again, and stands in the section again, is at its next place: two equal lines of a log are two items.
    `section` may differ from the document in single characters, as prompts show it; `start` is its offset.
    """
    taken: dict[tuple[str, str], set[Span]] = {}
    found: list[Quote] = []
    for quote in said:
        span = locate(quote.text, section)
        used = taken.setdefault((item_key(quote.item), item_key(quote.value)), set())
        if span in used:
            others = (one for one in _whole_places(quote.text, section) if one not in used)
            span = next(others, span)
        if span is not None:
            used.add(span)
        found.append(_placed(quote, span, document, start))
    return tuple(found)


def _placed(said: Quote, span: Span | None, document: Document, start: int) -> Quote:
    if span is None:
        return said
    low, high = start + span[0], start + span[1]
    return replace(
        said, text=document.text[low:high], start=low, end=high, places=document.places(low, high)
    )


def place_copies(memory: str, document: Document, *, start: int, section: str) -> tuple[Quote, ...]:
    """What a memory has from a section, as quotes: for a model that marks none.

    Whole lines are searched word for word first, then what follows a colon, then sentences; a few words are no quote. For a
    line of which nothing is found, the quote is the sentence that it says in other words, if there is one.
    """
    found: list[Quote] = []
    for line in memory.splitlines():
        for parts in (line,), (line.partition(": ")[2],), _sentence_end.split(line):
            spans = [
                span
                for part in parts
                if len(words(part)) >= MIN_WORDS and (span := locate(part, section))
            ]
            if spans:
                break
        else:
            spans = [span for span in (_reworded(line, section),) if span]
        found += [
            _placed(Quote(text=line, is_inferred=True), span, document, start) for span in spans
        ]
    return tuple(dict.fromkeys(found))


def _reworded(note: str, section: str) -> Span | None:
    """Where the sentence stands that a note says in other words: the one with most of its words."""
    spans = [match.span() for match in _sentence.finditer(section)]
    shares = [(_shared_words(note, section[start:end]), -start, end) for start, end in spans]
    share, negative, end = max(shares, default=(0.0, 0, 0))
    return (-negative, end) if share else None


def rewords(note: str, sentence: str) -> bool:
    """Whether a note says a sentence in other words: with all of its names and numbers, and most of its other words.

    >>> rewords(
    ...     "The mayor of Norgate is Ann Lee.", "In Norgate, the post of mayor is held by Ann Lee."
    ... )
    True
    """
    return _shared_words(note, sentence) > 0


def _shared_words(note: str, sentence: str) -> float:
    """The share of a note's content words that a sentence has; 0 where it is too small, or a name or number is missing."""
    content = [word for word in words(note) if word.casefold() not in _function_words]
    if len(content) < MIN_CONTENT_WORDS or len(sentence) > MAX_SENTENCE_CHARS:
        return 0.0
    there = set(words(folded(sentence)))
    # the first word has a capital wherever it begins a sentence
    telling = [word for word in content[1:] if word[0].isupper()]
    telling += [word for word in content if any(map(str.isdigit, word))]
    if not telling or any(folded(word) not in there for word in telling):
        return 0.0
    share = sum(folded(word) in there for word in content) / len(content)
    return share if share >= MIN_SHARE else 0.0


def locate(said: str, section: str) -> Span | None:
    """Where a section has what was said: word for word, else without regard to case, white space and typography.

    Of several places the first counts. A quote has whole words: what is only a part of a word is nowhere, and one of
    several words that breaks off inside of one, as a reply does at its limit, is continued to its end. Where a script has no
    blanks between words, only the marks of a letter cannot be cut off. What holds no word is nowhere.
    """
    wanted = said.strip(MARKS).strip()
    places = list(_whole_places(said, section))
    exact = (span for span in places if section[slice(*span)] == wanted)
    if places:
        return next(exact, places[0])
    return _completed(said, section) if len(words(wanted)) >= MIN_WORDS else None


def _whole_places(said: str, section: str) -> Iterator[Span]:
    """Where a section has what was said, in whole words."""
    text, origins = _folded(section)
    for start, end in _matches(said, text):
        if not (_is_inside_word(text, start) or _is_inside_word(text, end)):
            yield origins[start][0], origins[end - 1][1]


def _completed(said: str, section: str) -> Span | None:
    """The first place of what was said, with the rest of the words that it begins and ends with."""
    text, origins = _folded(section)
    start, end = next(_matches(said, text), (0, 0))
    if start == end:
        return None
    while _is_inside_word(text, start):
        start -= 1
    while _is_inside_word(text, end):
        end += 1
    return origins[start][0], origins[end - 1][1]


def _matches(said: str, text: str) -> Iterator[Span]:
    """Where a folded text has what was said, in whole words or not."""
    key = folded(said.strip(MARKS)).strip()
    start = text.find(key) if any(map(str.isalnum, key)) else -1
    while start >= 0:
        yield start, start + len(key)
        start = text.find(key, start + 1)


def _is_inside_word(text: str, position: int) -> bool:
    """Whether a folded text is cut before a mark of a letter, or between letters or digits of a script with blanks."""
    if not 0 < position < len(text):
        return False
    if _is_mark(text[position]):
        return True
    before = position - 1
    while before > 0 and _is_mark(text[before]):
        before -= 1
    return all(
        one.isalnum() and not _no_blanks.match(one) for one in (text[before], text[position])
    )


def _is_mark(character: str) -> bool:
    """Whether it belongs to the letter before it: a combining mark, or a vowel or final of a Korean syllable."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


@lru_cache(maxsize=4)
def _folded(text: str) -> tuple[str, list[Span]]:
    """A text for comparison, and for each of its characters the letter with its marks, or other character, it comes from."""
    characters: list[str] = []
    origins: list[Span] = []
    end = 0
    while (start := end) < len(text):
        end = start + 1
        if text[start].isspace():
            parts = " " if characters and characters[-1] != " " else ""
        else:
            while end < len(text) and not text[end].isascii() and _is_mark(text[end]):
                end += 1
            parts = _folded_letter(text[start:end])
        characters += parts
        origins += [(start, end)] * len(parts)
    return "".join(characters), origins


@lru_cache(maxsize=4096)
def _folded_letter(letter: str) -> str:
    """A letter with its marks, or another character, for comparison; nothing for what is invisible."""
    if unicodedata.category(letter[0]) == "Cf":
        return ""
    lowered = unicodedata.normalize("NFD", letter).casefold().translate(_typography)
    return _optional.sub("", unicodedata.normalize("NFD", lowered))
