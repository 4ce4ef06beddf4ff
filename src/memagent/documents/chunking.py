"""Split a document into token-bounded chunks that join back to the original text.

Cutting is lazy: a chunk is located when it is needed, so the first call can be sent while most of
a long text has not been tokenised. Where a chunk ends depends only on the text, the tokenizer, the
limit and the chunk before it, so a resumed run cuts the rest as the first run would have.

    text ──┬───────── at most chunk_tokens ──────┬──▶
           │                          last tenth │
           start                      ▲          limit
                                      └ best end: paragraph, sentence, line, word

With `ends="exact"` a chunk is a window of exactly `chunk_tokens` tokens of the whole text, as the original
project cuts texts; the text is then tokenised as a whole before the first chunk. A character of several
tokens is not torn apart: it goes to the window in which it ends.

No text makes chunks of next to nothing: each but the last holds at least `MIN_SHARE` of the limit, if
need be by an end inside a word or a sequence of joined characters.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memagent.config import SectionEnds
from memagent.documents.document import Chunk, Document
from memagent.tokens.tokenizers import Measured, Tokenizer

ENDING_SHARE = 0.1
"""The part of a chunk, at its end, in which a natural end is looked for."""
MIN_SHARE = 0.5
"""The part of its limit that a chunk holds at least, except the last one: bounds the number of calls."""
FIRST_CHARS_PER_TOKEN = 4.5
"""How long a first block is guessed to be; after that the chunk before gives the rate."""
BLOCK_SPARE = 1.05
"""Blocks are measured this much longer than needed, or they would often be measured twice."""
EDGE_TOKENS = 8
"""Cutting a block can change the tokens at its edge; this close to the limit we count again."""
# From best to worst. Each match ends where a chunk may end.
NATURAL_ENDS = (
    re.compile(r"\n[ \t]*\n\s*"),
    re.compile(
        r"[.!?\u2026][\"')\]\u201d\u2019]*\s+"  # Western sentence, closing marks, white space
        r"|[\u3002\uff01\uff1f][\u300d\u300f\u201d\u2019\uff09]*"  # Chinese, Japanese: no space
    ),
    re.compile(r"\n\s*"),
    re.compile(r"\s+"),
)
BLOCK_CHARS = 1_000_000
"""Exact windows are found in blocks of so many characters, since tokens of a whole text take much memory."""
BLOCK_OVERLAP = 2_000
"""A block is tokenised so much further: its tokens near the end do not depend on where it was cut."""
EDGE_CHARS = 100_000
"""The end of a block in which the next one may start, at the start of a line."""
COMPARED_TOKENS = 32
"""Tokens that must be the same in both blocks."""
_line_start = re.compile(r"\n(?=\w)")
_measuring = threading.Lock()
"""One text at a time, for the sake of memory."""
JOINERS = {"\u200d", "\ufe0e", "\ufe0f"}
"""Zero-width joiner and variation selectors: they belong to the character before them."""


class Span(NamedTuple):
    """Where a chunk lies: character offsets and its size in tokens."""

    start: int
    end: int
    num_tokens: int


class Chunks:
    """The chunks of a document, located on demand and remembered as offsets only.

    Safe to share between threads: several questions over one text cut it once.
    """

    def __init__(
        self,
        document: Document,
        tokenizer: Tokenizer,
        chunk_tokens: int,
        *,
        ends: SectionEnds = "natural",
        known: Iterable[Span] = (),
    ) -> None:
        self.document = document
        self._tokenizer = tokenizer
        self._chunk_tokens = chunk_tokens
        self._ends = ends
        self._windows: list[Span] | None = None
        """All chunks, where their ends are exact and one was needed."""
        self._spans = list(known)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Chunk]:
        index = 0
        while (chunk := self.get(index)) is not None:
            yield chunk
            index += 1

    def get(self, index: int) -> Chunk | None:
        """The chunk at an index, or None past the end."""
        with self._lock:
            while len(self._spans) <= index and not self._is_complete:
                self._spans.append(self._next_span())
        if index >= len(self._spans):
            return None
        return self._chunk(index, self._spans[index])

    def is_known(self, index: int) -> bool:
        """Whether `get` at an index has nothing to locate."""
        return index < len(self._spans) or self._is_complete

    def number_at(self, start: int) -> int:
        """The index of the chunk that begins at a character, or holds it, among those located so far."""
        with self._lock:
            return bisect_right(self._spans, start, key=lambda span: span.start) - 1

    def total(self) -> int:
        """How many chunks there are. Cuts the whole text if that has not happened yet."""
        with self._lock:
            while not self._is_complete:
                self._spans.append(self._next_span())
        return len(self._spans)

    def estimated_total(self) -> tuple[int, bool]:
        """How many chunks there are, and whether that is exact or an estimate."""
        with self._lock:
            if self._is_complete:
                return len(self._spans), True
            done = self._spans[-1].end if self._spans else 0
            chars = done / len(self._spans) if done else self._chunk_tokens * FIRST_CHARS_PER_TOKEN
            rest = max(1, round((len(self.document.text) - done) / chars))
            return len(self._spans) + rest, False

    @property
    def _is_complete(self) -> bool:
        done = self._spans[-1].end if self._spans else 0
        return done >= len(self.document.text)

    def _next_span(self) -> Span:
        if self._ends == "exact":
            if self._windows is None:
                self._windows = exact_spans(self.document.text, self._tokenizer, self._chunk_tokens)
            return self._windows[len(self._spans)]
        last = self._spans[-1] if self._spans else None
        return next_span(self.document.text, last, self._tokenizer, self._chunk_tokens)

    def _chunk(self, index: int, span: Span) -> Chunk:
        return Chunk(
            index=index,
            text=self.document.text[span.start : span.end],
            start=span.start,
            end=span.end,
            num_tokens=span.num_tokens,
            places=self.document.places(span.start, span.end),
        )


def split(document: Document, tokenizer: Tokenizer, *, chunk_tokens: int) -> Iterator[Chunk]:
    """The chunks of a document, one after the other."""
    return iter(Chunks(document, tokenizer, chunk_tokens))


def exact_spans(
    text: str, tokenizer: Tokenizer, chunk_tokens: int, *, block_chars: int = BLOCK_CHARS
) -> list[Span]:
    """Consecutive windows of exactly so many tokens of the whole text; the last one has what is left.

    Long texts are tokenised in blocks, where that gives the tokens of the whole.
    """
    with _measuring:
        try:
            return _windows(_blocks(text, tokenizer, block_chars), len(text), chunk_tokens)
        except _NoSafePlaceError:
            return _windows(_blocks(text, tokenizer, len(text)), len(text), chunk_tokens)


class _Block(NamedTuple):
    start: int
    measured: Measured
    num_tokens: int
    """Tokens before the next block."""


def _windows(blocks: Iterable[_Block], num_chars: int, chunk_tokens: int) -> list[Span]:
    spans: list[Span] = []
    start = done = 0
    for block in blocks:
        for end_token in range(
            (len(spans) + 1) * chunk_tokens, done + block.num_tokens + 1, chunk_tokens
        ):
            end = block.start + block.measured.end_of(end_token - done)
            spans.append(Span(start, end, chunk_tokens))
            start = end
        done += block.num_tokens
    if start < num_chars:
        spans.append(Span(start, num_chars, done - len(spans) * chunk_tokens))
    return spans


def _blocks(text: str, tokenizer: Tokenizer, block_chars: int) -> Iterator[_Block]:
    """The text in blocks whose tokens are those of the whole text. Raises _NoSafePlaceError where none is found."""
    start = 0
    measured = tokenizer.measure(text[: block_chars + BLOCK_OVERLAP])
    while start + block_chars + BLOCK_OVERLAP < len(text):
        block = text[start : start + block_chars]
        places = [
            match.end() for match in _line_start.finditer(block, max(0, block_chars - EDGE_CHARS))
        ]
        if not places:
            raise _NoSafePlaceError
        place = places[-1]
        num_tokens = measured.tokens_before(place)
        following = tokenizer.measure(
            text[start + place : start + place + block_chars + BLOCK_OVERLAP]
        )
        for number in range(COMPARED_TOKENS):
            if measured.end_of(num_tokens + number) != place + following.end_of(number):
                raise _NoSafePlaceError
        yield _Block(start, measured, num_tokens)
        start, measured = start + place, following
    yield _Block(start, measured, measured.num_tokens)


class _NoSafePlaceError(Exception):
    """A text cannot be tokenised in blocks."""


def next_span(text: str, last: Span | None, tokenizer: Tokenizer, chunk_tokens: int) -> Span:
    """Where the chunk after `last` lies."""
    start = last.end if last else 0
    rate = (last.end - last.start) / max(last.num_tokens, 1) if last else FIRST_CHARS_PER_TOKEN
    block, measured = _measured_block(text, start, rate, tokenizer, chunk_tokens)
    if measured.num_tokens <= chunk_tokens:
        return Span(start, start + len(block), measured.num_tokens)
    limit = measured.end_of(chunk_tokens)
    end = _best_end(block, measured.end_of(int(chunk_tokens * (1 - ENDING_SHARE))), limit)
    num_tokens = measured.tokens_before(end)
    if num_tokens > chunk_tokens - EDGE_TOKENS:
        end, num_tokens = _shrunk(block, end, tokenizer, chunk_tokens)
    if num_tokens < chunk_tokens * MIN_SHARE:
        end, num_tokens = _filled(block, end, tokenizer, chunk_tokens)
    return Span(start, start + end, num_tokens)


def _measured_block(
    text: str, start: int, rate: float, tokenizer: Tokenizer, chunk_tokens: int
) -> tuple[str, Measured]:
    """Text from `start` on that is longer than a chunk (or ends the text), with its tokens."""
    num_chars = int(chunk_tokens * rate * BLOCK_SPARE) + EDGE_TOKENS
    while True:
        block = text[start : start + num_chars]
        measured = tokenizer.measure(block)
        if measured.num_tokens > chunk_tokens or start + num_chars >= len(text):
            return block, measured
        missing = 1 - measured.num_tokens / (chunk_tokens + 1)
        num_chars = int(num_chars * (1 + max(2 * missing, 0.05)))


def _best_end(block: str, earliest: int, limit: int) -> int:
    """The best place to end a chunk in (earliest, limit]; at least one character is taken."""
    limit = max(limit, 1)
    for pattern in NATURAL_ENDS:
        ends = [match.end() for match in pattern.finditer(block, earliest, limit)]
        if ends and (end := ends[-1]) > earliest:
            return _whole_characters(block, end)
    return _whole_characters(block, limit)


def _whole_characters(block: str, end: int) -> int:
    """An end that does not tear a mark, an emoji sequence or a joined character apart."""
    position = end
    while 0 < position < len(block) and _continues(block, position):
        position -= 1
    return position if position > 0 else end


def _continues(block: str, position: int) -> bool:
    following, before = block[position], block[position - 1]
    if following in JOINERS or before == "\u200d" or unicodedata.combining(following):
        return True
    return "\U0001f3fb" <= following <= "\U0001f3ff"  # skin tones


def _filled(block: str, end: int, tokenizer: Tokenizer, limit: int) -> tuple[int, int]:
    """An end, at or after the given one, that uses the limit, wherever it falls; found by bisection.

    For text without natural ends that a tokenizer counts as one piece, and for text whose tokens are
    unevenly spread. The block as a whole has more tokens than the limit.
    """
    too_late = len(block)
    num_tokens = tokenizer.count(block[:end])
    while too_late - end > 1 and num_tokens < limit * (1 - ENDING_SHARE):
        middle = (end + too_late) // 2
        count = tokenizer.count(block[:middle])
        if count <= limit:
            end, num_tokens = middle, count
        else:
            too_late = middle
    return end, num_tokens


def _shrunk(block: str, end: int, tokenizer: Tokenizer, chunk_tokens: int) -> tuple[int, int]:
    """An end, at or before the given one, whose text alone really has at most `chunk_tokens`."""
    while True:
        num_tokens = tokenizer.count(block[:end])
        if num_tokens <= chunk_tokens or end == 1:
            return end, num_tokens
        excess = num_tokens - chunk_tokens
        end = _whole_characters(block, max(end - excess, 1))
