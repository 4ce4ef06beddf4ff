"""The quick counter finds what the tokenizer finds, in every script, and never fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memagent import quick_counts
from memagent.documents.tokenizers import HuggingFaceTokenizer
from tests.conftest import prose
from tests.hostile.texts import TEXTS, hostile_text

Count = Callable[[str], int]


@pytest.fixture(params=["gpt2", "qwen"])
def tokenizer(
    request: pytest.FixtureRequest, tokenizer_folder: Path, qwen_like_folder: Path
) -> HuggingFaceTokenizer:
    folder = tokenizer_folder if request.param == "gpt2" else qwen_like_folder
    tokenizer = HuggingFaceTokenizer.from_path(folder, request.param)
    assert tokenizer.is_quick
    return tokenizer


@pytest.mark.parametrize("kind", sorted(TEXTS))
@pytest.mark.parametrize("num_chars", [300, 30_000])
def test_counts_are_exact_in_every_script(
    kind: str, num_chars: int, tokenizer: HuggingFaceTokenizer
) -> None:
    text = hostile_text(kind, num_chars)
    assert tokenizer.count(text) == tokenizer._exact_count(text)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(TEXTS)), st.integers(1, 2000), st.integers(0, 99)),
        min_size=1,
        max_size=8,
    )
)
def test_counts_are_exact_in_mixtures(
    parts: list[tuple[str, int, int]], tokenizer: HuggingFaceTokenizer
) -> None:
    text = prose(30).join(hostile_text(*part) for part in parts)
    assert tokenizer.count(text) == tokenizer._exact_count(text)


def test_ordinary_chinese_is_counted_quickly(tokenizer: HuggingFaceTokenizer) -> None:
    text = "今天早上下雨了\uff0c磨坊的老板没有来。第二天他把磨坊卖给了邻居\uff01\n" * 1500
    assert len(text.encode()) > 100_000
    exact = tokenizer._exact_count(text)
    tokenizer._exact_count = None  # type: ignore[method-assign, assignment]
    assert tokenizer.count(text) == exact


class Panic(BaseException):
    """As Rust panics arrive: not an Exception."""


@pytest.mark.parametrize("failure", [Panic, ValueError, MemoryError])
def test_a_failing_block_is_counted_by_the_tokenizer(failure: type[BaseException]) -> None:
    def quick(text: str) -> int:
        if "mill" in text:
            raise failure
        return len(text)

    count = quick_counts._in_blocks(quick, len, sum)
    text = prose(800)
    assert "mill" in text
    assert count(text) == len(text)


def test_an_interrupt_is_not_taken_for_a_failing_block() -> None:
    def quick(text: str) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick_counts._in_blocks(quick, len, sum)("some text")


def test_the_bytes_of_every_rare_character_reveal_it() -> None:
    every = [chr(code) for code in range(0x110000)]
    missed = [
        char
        for char in filter(quick_counts._RARE.match, every)
        if not quick_counts._has_rare(char, quick_counts._utf8(char))
    ]
    assert missed == []


def test_plain_texts_are_not_searched_for_each_rare_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_counts, "_RARE", None)
    count = quick_counts._in_blocks(len, lambda text: 0, sum)
    text = prose(800) + " \u201cCaf\u00e9\u201d \u2014 na\u00efve\u2026 \u03b7 \u4eca\u5929 "
    assert count(text) == len(text)


def test_text_that_is_dense_in_places_is_counted_quickly() -> None:
    dense = "\u4eca\u5929\u65e9\u4e0a\u4e0b\u96e8\u4e86\uff0c" * 900
    count = quick_counts._in_blocks(len, lambda text: 0, sum)
    text = prose(4000) + dense + prose(4000)
    assert count(text) == len(text)


def test_blocks_join_back_and_are_short_where_there_are_words() -> None:
    text = prose(2000)
    blocks = list(quick_counts._blocks(text, 1000))
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= 1000


def test_the_encoder_is_exact_too(tokenizer_folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer.from_path(tokenizer_folder, "x")

    def ids_of(text: str) -> list[int]:
        return list(tokenizer._encode(text).ids)

    encode = quick_counts.quick_encoder(tokenizer_folder / "tokenizer.json", ids_of)
    assert encode is not None
    for kind in TEXTS:
        text = hostile_text(kind, 12_000)
        assert encode(text) == ids_of(text), kind
