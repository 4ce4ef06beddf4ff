"""Retrieval: the passages of a text that fit a question best, by words (BM25) or by meaning (embeddings).

passages = cut_passages(document, tokenizer, passage_tokens=256)
found = best_passages(passages, by_words(passages, question), max_tokens=2000)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk, Document
from memagent.documents.ranking import check_bm25, rank_by_words
from memagent.engines.embedding import Embedder
from memagent.tokens.tokenizers import Tokenizer

JOINT_TOKENS = 2
"""The blank line between two passages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved:
    """Passages that a search returned."""

    chunks: list[Chunk]
    """In the order of the text."""
    num_passages: int
    """Passages of the whole text."""

    def text(self) -> str:
        """One text: neighbours as they stand in the document, a blank line between others."""
        text = ""
        for number, passage in enumerate(self.chunks):
            is_next = number > 0 and self.chunks[number - 1].end == passage.start
            text = text + passage.text if is_next else f"{text.rstrip()}\n\n{passage.text.lstrip()}"
        return text.strip()


def cut_passages(document: Document, tokenizer: Tokenizer, *, passage_tokens: int) -> list[Chunk]:
    """A document as passages of at most `passage_tokens`."""
    return list(Chunks(document, tokenizer, passage_tokens))


def check_words() -> None:
    """Raise ConfigError where the library of BM25 is not installed."""
    check_bm25("the method bm25")


def by_words(passages: Sequence[Chunk], question: str) -> list[int]:
    """Numbers of the passages, best BM25 score first; those that share no word with the question are left out.

    Where none shares one, the first passage is all there is.
    """
    texts = [passage.text for passage in passages]
    ranked = rank_by_words(texts, question, what="the method bm25")
    return [each.number for place, each in enumerate(ranked) if place == 0 or each.score > 0]


async def by_meaning(passages: Sequence[Chunk], question: str, embedder: Embedder) -> list[int]:
    """Numbers of the passages, most similar to the question first."""
    [asked] = await embedder.embed([question], is_query=True)
    vectors = await embedder.embed([passage.text for passage in passages])
    scores = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
    return sorted(range(len(passages)), key=lambda number: -scores[number])


def best_passages(
    passages: Sequence[Chunk], ranked: Iterable[int], *, max_tokens: int
) -> Retrieved:
    """The highest ranked passages, as many as fit."""
    chosen: list[Chunk] = []
    num_tokens = 0
    for number in ranked:
        num_tokens += passages[number].num_tokens + JOINT_TOKENS
        if num_tokens > max_tokens:
            break
        chosen.append(passages[number])
    return Retrieved(
        chunks=sorted(chosen, key=lambda chunk: chunk.index), num_passages=len(passages)
    )
