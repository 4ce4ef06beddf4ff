"""No text is cut into more sections than its tokens need."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memagent.documents.chunking import EDGE_TOKENS, MIN_SHARE, split
from memagent.documents.document import Document
from memagent.tokens.tokenizers import (
    ByteTokenizer,
    EstimatingTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from tests.hostile.texts import TEXTS, hostile_text

kinds = st.sampled_from(sorted(TEXTS))


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "estimate":
        return EstimatingTokenizer()
    return HuggingFaceTokenizer.from_path(folder, kind)


def check_sections(text: str, tokenizer: Tokenizer, chunk_tokens: int) -> None:
    chunks = list(split(Document.from_text(text), tokenizer, chunk_tokens=chunk_tokens))
    assert "".join(chunk.text for chunk in chunks) == text
    sizes = [tokenizer.count(chunk.text) for chunk in chunks]
    assert max(sizes, default=0) <= chunk_tokens
    assert min(sizes[:-1], default=chunk_tokens) >= MIN_SHARE * chunk_tokens - EDGE_TOKENS


@pytest.mark.parametrize("kind", sorted(TEXTS))
@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes", "estimate"])
def test_a_section_holds_its_share_of_the_limit(
    kind: str, tokenizer: str, tokenizer_folder: Path
) -> None:
    text = hostile_text(kind, 8_000)
    check_sections(text, tokenizer_of(tokenizer, tokenizer_folder), 400)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.tuples(kinds, st.integers(1, 1500)), min_size=1, max_size=6),
    chunk_tokens=st.integers(40, 600),
    tokenizer=st.sampled_from(["gpt2", "bytes", "estimate"]),
    seed=st.integers(0, 1000),
)
def test_a_section_holds_its_share_in_mixtures_too(
    parts: list[tuple[str, int]],
    chunk_tokens: int,
    tokenizer: str,
    seed: int,
    tokenizer_folder: Path,
) -> None:
    text = "".join(hostile_text(kind, num_chars, seed) for kind, num_chars in parts)
    check_sections(text, tokenizer_of(tokenizer, tokenizer_folder), chunk_tokens)


def test_letters_without_end_are_cut_as_their_tokens_need() -> None:
    text = "".join(random.Random(0).choices("ATCG", k=100_000))
    chunks = list(split(Document.from_text(text), EstimatingTokenizer(), chunk_tokens=5000))
    assert len(chunks) == 9
