"""Text while it grows: no half characters, no beginnings of stop texts, nothing lost."""

import random
from collections.abc import Sequence

import pytest

from memagent.engines.local.generator import TextStream


def decode(ids: Sequence[int]) -> str:
    """Every token is a byte."""
    return bytes(ids).decode(errors="replace")


def cut(text: str, stops: Sequence[str]) -> str:
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


def streamed(data: bytes, stops: Sequence[str] = ()) -> list[str]:
    """The pieces, the last one with what is left at the end."""
    stream = TextStream(decode, stops)
    pieces = [stream.add(token) for token in data[:-1]]
    return [*pieces, stream.rest(cut(decode(data), stops))]


def test_a_character_is_emitted_whole() -> None:
    assert streamed("aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b"]


def test_invalid_bytes_are_emitted_with_the_next_character() -> None:
    assert streamed(b"a\xc3b\xc3") == ["a", "", "\ufffdb", "\ufffd"]


def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    assert streamed(b"a EN END", ["END"]) == ["a", " ", "", "", "EN ", "", "", ""]


def test_held_text_is_emitted_when_it_is_no_stop_text() -> None:
    assert streamed(b"ENx", ["END", "xyz"]) == ["", "", "ENx"]


def test_nothing_is_emitted_after_a_stop_text() -> None:
    assert streamed(b"a.b.c", [".b"]) == ["a", "", "", "", ""]


def test_the_earliest_of_several_stop_texts_counts() -> None:
    assert "".join(streamed(b"one two three", ["three", "wo t"])) == "one t"


@pytest.mark.parametrize("seed", range(200))
def test_pieces_join_to_the_text(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "aabb é😀".encode() + b"\xff\x80"
    data = bytes(rng.choices(alphabet, k=40))
    stops = ["".join(rng.choices("ab é", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
    whole = cut(decode(data), stops)
    pieces = streamed(data, stops)
    assert "".join(pieces) == whole
    before_the_end = "".join(pieces[:-1])
    assert not any(stop in before_the_end for stop in stops)
