"""The sections of a text in the order in which they are read, and what is left of them.

sections = await order_sections(chunks, question, "relevance")
chunk = await sections.get(0)         # the one that shares most words with the question
sections.unread(after=1)              # character offsets of everything else
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memagent.config import ReadingOrder
from memagent.documents.chunking import Chunks, Span
from memagent.documents.document import Chunk
from memagent.documents.ranking import rank_by_words


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOrder:
    """Sections by their position in a reading."""

    chunks: Chunks
    ranking: tuple[int, ...] | None = None
    """Numbers of the sections as they are read; None for the order of the text."""

    async def get(self, position: int) -> Chunk | None:
        """The section that is read at a position, or None past the end."""
        if self.ranking is None:
            return await cut_chunk(self.chunks, position)
        if position >= len(self.ranking):
            return None
        return await cut_chunk(self.chunks, self.ranking[position])

    def unread(self, spans: Sequence[Span]) -> tuple[tuple[int, int], ...]:
        """The parts of the text outside of spans that were read."""
        return gaps([(span.start, span.end) for span in spans], len(self.chunks.document.text))


async def order_sections(chunks: Chunks, question: str, order: ReadingOrder) -> SectionOrder:
    """The sections as they are to be read. By relevance, the whole text is cut first."""
    if order == "text":
        return SectionOrder(chunks=chunks)
    return SectionOrder(chunks=chunks, ranking=await asyncio.to_thread(_ranking, chunks, question))


def _ranking(chunks: Chunks, question: str) -> tuple[int, ...]:
    texts = [chunk.text for chunk in chunks]
    ranked = rank_by_words(texts, question, what="`order=relevance`")
    return tuple(each.number for each in ranked)


async def cut_chunk(chunks: Chunks, index: int) -> Chunk | None:
    """The chunk at an index; in a thread if it has to be located, which would hold others up."""
    if chunks.is_known(index):
        return chunks.get(index)
    return await asyncio.to_thread(chunks.get, index)


def gaps(spans: Iterable[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """What spans leave out of a text of this length.

    >>> gaps([(10, 20), (0, 5)], 30)
    ((5, 10), (20, 30))
    """
    found: list[tuple[int, int]] = []
    position = 0
    for start, end in sorted(spans):
        if start > position:
            found.append((position, start))
        position = max(position, end)
    return (*found, (position, length)) if position < length else tuple(found)
