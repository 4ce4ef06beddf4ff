"""The sections of a task's text, cut once for all rollouts that read it.

    chunks = sections_of(task, client.tokenizer, chunk_tokens=5000, max_sections=8)

All rollouts of a group read the same text, and reading on a text that is cut already costs nothing.
"""

from __future__ import annotations

from functools import lru_cache

from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer, tokenizer_for_model
from memagent.errors import ConfigError


def sections_of(
    task: Example, tokenizer: str, *, chunk_tokens: int, max_sections: int | None = None
) -> Chunks:
    """The sections of a task's text. Raises ConfigError when there are more than `max_sections`."""
    chunks = _chunks(task.text(), tokenizer, chunk_tokens)
    if max_sections is not None and chunks.get(max_sections) is not None:
        raise ConfigError(
            f"the text of {task.id} has {chunks.total()} sections, more than max_sections="
            f"{max_sections}; raise it or chunk_tokens, or take shorter texts"
        )
    return chunks


@lru_cache(maxsize=4)
def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a model, opened once and not for each rollout."""
    return tokenizer_for_model(name)[0]


@lru_cache(maxsize=256)
def _chunks(text: str, tokenizer: str, chunk_tokens: int) -> Chunks:
    return Chunks(Document.from_text(text), tokenizer_of(tokenizer), chunk_tokens)
