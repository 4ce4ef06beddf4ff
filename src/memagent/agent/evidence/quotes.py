"""Quotes: spans that a model copied from a section, found again in the text.

    section ── model ──▶ "the house is  RED" ── locate ──▶ Quote(text="The house is red", start=812, end=828)

A quote is searched word for word, then without regard to case and white space. What was found is what the
text has, never what the model wrote; what was not found has no place, and is never shown as a source.

    >>> locate("the house  is RED", "Once. The house is red.")
    (6, 22)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memagent.documents.document import Document, Place

MARKS = " \t\r\n\"'\u201c\u201d\u2018\u2019\u00ab\u00bb"
"""Blanks and quotation marks that models put around a quote."""
MIN_WORDS = 4
"""Fewer words of a memory that a section has too are no quote."""
MIN_SHARE, MIN_CONTENT_WORDS, MAX_SENTENCE_CHARS = 0.6, 3, 600
"""A note rewords a sentence that has this share of its content words, of at least so many; longer sentences are no quote."""

Span = tuple[int, int]
"""Where a quote begins and ends, in characters."""

_word = re.compile(r"\w+")
_sentence_end = re.compile(r"(?<=[.!?])\s+")
_sentence = re.compile(r"\S.*?(?:[.!?](?=\s)|(?=\n\s*\n)|\Z)", re.DOTALL)
_FUNCTION = """a an and are as at be been but by for from had has have he her his in into is it its no not of on or she so
than that the their them there they this to was were which who will with"""
_function_words = frozenset(_FUNCTION.split())


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


def item_key(text: str | None) -> str:
    """A name or value for comparison: case, punctuation and a leading article do not count."""
    words = _word.findall((text or "").casefold())
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words)


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
            others = (one for one in _all_places(quote.text, section) if one not in used)
            span = next((one for one in others if _has_whole_words(one, section)), span)
        if span is not None:
            used.add(span)
        found.append(_placed(quote, span, document, start))
    return tuple(found)


def _placed(said: Quote, span: Span | None, document: Document, start: int) -> Quote:
    if span is None:
        return said
    low, high = start + span[0], start + span[1]
    return replace(
        said,
        text=document.text[low:high],
        start=low,
        end=high,
        places=document.places(low, high),
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
                if len(_word.findall(part)) >= MIN_WORDS and (span := locate(part, section))
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
    words = [word for word in _word.findall(note) if word.casefold() not in _function_words]
    if len(words) < MIN_CONTENT_WORDS or len(sentence) > MAX_SENTENCE_CHARS:
        return 0.0
    there = {word.casefold() for word in _word.findall(sentence)}
    # the first word has a capital wherever it begins a sentence
    telling = [word for word in words[1:] if word[0].isupper()]
    telling += [word for word in words if any(map(str.isdigit, word))]
    if not telling or any(word.casefold() not in there for word in telling):
        return 0.0
    share = sum(word.casefold() in there for word in words) / len(words)
    return share if share >= MIN_SHARE else 0.0


def locate(said: str, section: str) -> Span | None:
    """Where a section has what was said: word for word, else without regard to case and white space.

    Of several places the first counts. A quote has whole words: what is only a part of a word is nowhere, and one of
    several words that breaks off inside of one, as a reply does at its limit, is continued to its end.
    What holds no word is nowhere.
    """
    wanted = said.strip(MARKS).strip()
    if not any(character.isalnum() for character in wanted):
        return None
    if (start := section.find(wanted)) >= 0 and _has_whole_words(
        (start, end := start + len(wanted)), section
    ):
        return start, end
    places = _all_places(said, section)
    first = next(places, None)
    if first is None or _has_whole_words(first, section):
        return first
    whole = next((place for place in places if _has_whole_words(place, section)), None)
    if whole is None and len(_word.findall(wanted)) >= MIN_WORDS:
        return _with_whole_words(first, section)
    return whole


def _has_whole_words(span: Span, text: str) -> bool:
    return not any(_is_inside_word(text, position) for position in span)


def _with_whole_words(span: Span, text: str) -> Span:
    """A span with the rest of the words that it begins and ends with."""
    start, end = span
    while _is_inside_word(text, start):
        start -= 1
    while _is_inside_word(text, end):
        end += 1
    return start, end


def _is_inside_word(text: str, position: int) -> bool:
    """Whether letters or digits stand on both sides, of a script that puts blanks between words."""
    around = text[position - 1 : position + 1] if position else ""
    return len(around) == 2 and all(map(_has_blanks_between_words, around))


def _has_blanks_between_words(character: str) -> bool:
    return character.isalnum() and (character < "\u0e00" or "\u1e00" <= character < "\u2000")


def _all_places(said: str, section: str) -> Iterator[Span]:
    """Where a section has what was said, without regard to case and white space."""
    key, _ = _folded(said.strip(MARKS).strip())
    text, origins = _folded(section)
    start = text.find(key)
    while start >= 0:
        end = start + len(key)
        yield origins[start], origins[end - 1] + 1
        start = text.find(key, end)


def _folded(text: str) -> tuple[str, list[int]]:
    """A text in lower case with single blanks, and for each of its characters the one it comes from."""
    folded: list[str] = []
    origins: list[int] = []
    for position, character in enumerate(text):
        if character.isspace():
            if folded and folded[-1] != " ":
                folded.append(" ")
                origins.append(position)
            continue
        for part in character.casefold():
            folded.append(part)
            origins.append(position)
    return "".join(folded), origins
