"""The sections of a task's text as the memory agent reads them: cut once for all rollouts of a group."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from memagent.config import AgentConfig, SectionEnds
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.errors import ConfigError
from memagent.tokens.tokenizers import Tokenizer, tokenizer_for_model

LongTexts = Literal["refuse", "cut_middle"]


class TaskSections(NamedTuple):
    """The sections that are read of a text."""

    chunks: Chunks
    is_cut: bool = False
    """Whether the middle of the text was left out."""


def sections_of(
    task: Example,
    *,
    tokenizer: str,
    config: AgentConfig,
    max_sections: int | None,
    long_texts: LongTexts,
) -> TaskSections:
    """The sections of a task's text. A text of more than `max_sections` is refused or cut."""
    text, size, ends = task.text(), config.chunk_tokens, config.section_ends
    chunks = _chunks(task.id, text, tokenizer, size, ends)
    if max_sections is None or chunks.get(max_sections) is None:
        return TaskSections(chunks)
    if long_texts == "refuse":
        raise ConfigError(
            f"the text of {task.id} has {chunks.total()} sections, more than "
            f"`max_sections={max_sections}`; raise it or `chunk_tokens`, or use shorter texts"
        )
    return TaskSections(
        _cut_chunks(task.id, text, tokenizer, size, ends, max_sections), is_cut=True
    )


def without_middle(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    """The first and the last tokens of a text, half of `max_tokens` each; a short text as it is."""
    measured = tokenizer.measure(text)
    if measured.num_tokens <= max_tokens:
        return text
    num_first = max_tokens // 2
    end = measured.end_of(num_first)
    start = measured.end_of(measured.num_tokens - (max_tokens - num_first))
    return text[:end] + text[start:]


@lru_cache(maxsize=4)
def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a client's model, kept open."""
    return tokenizer_for_model(name)[0]


@lru_cache(maxsize=256)
def _chunks(source: str, text: str, tokenizer: str, size: int, ends: SectionEnds) -> Chunks:
    document = Document.from_text(text, source=source)
    return Chunks(document, tokenizer_of(tokenizer), size, ends=ends)


@lru_cache(maxsize=256)
def _cut_chunks(
    source: str, text: str, tokenizer: str, size: int, ends: SectionEnds, max_sections: int
) -> Chunks:
    """At most `max_sections` of the beginning and the end of a text."""
    num_tokens, less = max_sections * size, 1
    while True:
        shorter = without_middle(text, tokenizer_of(tokenizer), max_tokens=num_tokens)
        chunks = _chunks(source, shorter, tokenizer, size, ends)
        if chunks.get(max_sections) is None:
            return chunks
        num_tokens -= less  # tokens at the seam, and sections that end before their limit
        less = min(4 * less, size // 4)
