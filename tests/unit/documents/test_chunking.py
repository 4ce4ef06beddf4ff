"""Chunks: within the limit, at natural ends, lazy, and the same again on resuming."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent.documents.chunking import Chunks, Span, exact_spans, split
from memagent.documents.document import Document
from memagent.tokens.tokenizers import (
    ByteTokenizer,
    EstimatingTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from memagent.types import Message
from tests.conftest import prose


@pytest.fixture(params=["gpt2", "qwen", "bytes", "estimate"])
def tokenizer(
    request: pytest.FixtureRequest, tokenizer_folder: Path, qwen_like_folder: Path
) -> Tokenizer:
    made: dict[str, Tokenizer] = {
        "gpt2": HuggingFaceTokenizer.from_path(tokenizer_folder, "gpt2"),
        "qwen": HuggingFaceTokenizer.from_path(qwen_like_folder, "qwen"),
        "bytes": ByteTokenizer(),
        "estimate": EstimatingTokenizer(),
    }
    return made[request.param]


def test_chunks_join_back_and_keep_the_limit(tokenizer: Tokenizer) -> None:
    text = prose(600)
    chunks = list(split(Document.from_text(text), tokenizer, chunk_tokens=300))
    assert "".join(chunk.text for chunk in chunks) == text
    assert len(chunks) > 5
    assert max(tokenizer.count(chunk.text) for chunk in chunks) <= 300
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert abs(tokenizer.count(chunk.text) - chunk.num_tokens) <= 2


def test_chunks_are_nearly_full(tokenizer: Tokenizer) -> None:
    text = prose(2000)
    chunks = list(split(Document.from_text(text), tokenizer, chunk_tokens=500))
    sizes = [tokenizer.count(chunk.text) for chunk in chunks[:-1]]
    assert min(sizes) >= 0.85 * 500


@pytest.mark.parametrize(
    ("separator", "expected"),
    [("\n\n", "\n\n"), (". ", ". "), ("\n", "\n"), (" ", " ")],
    ids=["paragraph", "sentence", "line", "word"],
)
def test_chunks_end_at_the_best_natural_end(
    separator: str, expected: str, byte_tokenizer: ByteTokenizer
) -> None:
    text = separator.join("abcdefgh" for _ in range(200))
    chunks = list(split(Document.from_text(text), byte_tokenizer, chunk_tokens=150))
    assert all(chunk.text.endswith(expected) for chunk in chunks[:-1])


def test_a_paragraph_in_the_last_tenth_is_preferred_to_a_later_line(
    byte_tokenizer: ByteTokenizer,
) -> None:
    text = "x" * 93 + "\n\n" + "yy\nzz" * 100
    first = next(split(Document.from_text(text), byte_tokenizer, chunk_tokens=100))
    assert first.text == "x" * 93 + "\n\n"


def test_a_paragraph_before_the_last_tenth_is_not_worth_a_short_chunk(
    byte_tokenizer: ByteTokenizer,
) -> None:
    text = "x" * 50 + "\n\n" + "y" * 500
    first = next(split(Document.from_text(text), byte_tokenizer, chunk_tokens=100))
    assert len(first.text) == 100


def test_text_without_spaces_or_newlines_is_cut_to_size(tokenizer: Tokenizer) -> None:
    text = "".join(chr(ord("a") + (i * 7) % 26) for i in range(5000))
    chunks = list(split(Document.from_text(text), tokenizer, chunk_tokens=200))
    assert "".join(chunk.text for chunk in chunks) == text
    assert max(tokenizer.count(chunk.text) for chunk in chunks) <= 200


def test_chinese_ends_at_its_own_full_stop(byte_tokenizer: ByteTokenizer) -> None:
    text = "今天下雨了。" * 100
    chunks = list(split(Document.from_text(text), byte_tokenizer, chunk_tokens=400))
    assert all(chunk.text.endswith("。") for chunk in chunks)


def test_no_character_is_torn_apart(byte_tokenizer: ByteTokenizer) -> None:
    family = "👩\u200d👩\u200d👧\u200d👦"
    text = family * 40
    chunks = list(split(Document.from_text(text), byte_tokenizer, chunk_tokens=64))
    assert {chunk.text for chunk in chunks} <= {family, family * 2}
    accents = "e\u0301" * 100
    chunks = list(split(Document.from_text(accents), byte_tokenizer, chunk_tokens=16))
    assert all(not chunk.text.startswith("\u0301") for chunk in chunks)


def test_an_empty_document_has_no_chunks(byte_tokenizer: ByteTokenizer) -> None:
    assert list(split(Document.from_text(""), byte_tokenizer, chunk_tokens=100)) == []


def test_the_total_is_estimated_until_the_end_is_known(byte_tokenizer: ByteTokenizer) -> None:
    chunks = Chunks(Document.from_text("word " * 1000), byte_tokenizer, 100)
    chunks.get(0)
    assert chunks.estimated_total() == (50, False)
    assert chunks.total() == 50
    assert chunks.estimated_total() == (50, True)


class CountingTokenizer(ByteTokenizer):
    """Remembers how many characters it was asked to tokenise."""

    def __init__(self) -> None:
        self.num_chars = 0

    def measure(self, text: str):  # type: ignore[no-untyped-def]
        self.num_chars += len(text)
        return super().measure(text)

    def count_messages(self, messages: Sequence[Message]) -> int:
        raise NotImplementedError


def test_the_first_chunk_of_a_large_text_needs_only_the_beginning() -> None:
    tokenizer = CountingTokenizer()
    chunks = Chunks(Document.from_text("a line of text\n" * 1_000_000), tokenizer, 5000)
    first = chunks.get(0)
    assert first is not None
    assert len(first.text) <= 5000
    assert tokenizer.num_chars < 50_000


def test_chunks_of_joined_documents_know_their_sources(byte_tokenizer: ByteTokenizer) -> None:
    documents = [Document.from_text("one two three", f"{name}.txt") for name in "ab"]
    (chunk,) = split(Document.join(documents), byte_tokenizer, chunk_tokens=1000)
    assert [place.source for place in chunk.places] == ["a.txt", "b.txt"]
    assert [(place.start, place.end) for place in chunk.places] == [(0, 13), (0, 13)]


# --- exact windows --------------------------------------------------------------------------------


@given(st.text(max_size=400), st.integers(1, 50))
def test_exact_windows_join_back_and_have_as_many_tokens_as_asked(text: str, size: int) -> None:
    document = Document.from_text(text)
    chunks = list(Chunks(document, ByteTokenizer(), size, ends="exact"))
    assert "".join(chunk.text for chunk in chunks) == document.text
    num_bytes = len(document.text.encode())
    assert len(chunks) == -(-num_bytes // size)
    assert [chunk.num_tokens for chunk in chunks[:-1]] == [size] * (len(chunks) - 1)
    for number, chunk in enumerate(chunks[:-1], start=1):  # within a character of the exact place
        assert 0 <= number * size - len(document.text[: chunk.end].encode()) < 4


def test_exact_windows_are_those_of_the_whole_text_in_tokens(qwen_like_folder: Path) -> None:
    qwen = HuggingFaceTokenizer.from_path(qwen_like_folder, "qwen")
    text = prose(100)
    ids = qwen._backend.encode(text, add_special_tokens=False).ids
    windows = [qwen._backend.decode(ids[start : start + 64]) for start in range(0, len(ids), 64)]
    chunks = Chunks(Document.from_text(text), qwen, 64, ends="exact")
    assert [chunk.text for chunk in chunks] == windows
    assert len(windows) > 5
    assert [chunk.text for chunk in Chunks(Document.from_text(text), qwen, 64)] != windows


@pytest.mark.parametrize("block_chars", [300, 1000, 5000])
def test_exact_windows_found_in_blocks_are_those_of_the_whole_text(
    tokenizer: Tokenizer, block_chars: int
) -> None:
    text = "".join(f"Line {n} of it:\n\nNaïve {n * 7919} — {prose(2, seed=n)}\n" for n in range(80))
    whole = exact_spans(text, tokenizer, 64)
    assert exact_spans(text, tokenizer, 64, block_chars=block_chars) == whole
    assert len(whole) > 20
    without_lines = text.replace("\n", " ")
    assert exact_spans(without_lines, tokenizer, 64, block_chars=block_chars) == exact_spans(
        without_lines, tokenizer, 64
    )


def test_exact_windows_resume_where_they_stopped() -> None:
    document = Document.from_text("abcdefghij" * 5)
    whole = Chunks(document, ByteTokenizer(), 16, ends="exact")
    assert whole.total() == 4
    known = [Span(0, 16, 16), Span(16, 32, 16)]
    resumed = Chunks(document, ByteTokenizer(), 16, ends="exact", known=known)
    assert [chunk.text for chunk in resumed] == [chunk.text for chunk in whole]
