"""Hiding sentences in a text without breaking it."""

import random

import pytest

from memagent.data.tasks.ruler.haystack import (
    EssayHaystack,
    NeedleHaystack,
    NoiseHaystack,
    depths_of,
    hide,
    nearest_gap,
)

TEXT = "It rains. Mr. Low waits. Is it late? Nobody knows.\n\nA new day begins."


def gaps(text: str) -> list[str]:
    """The beginnings of what follows each gap."""
    places = sorted({nearest_gap(text, step / 1000) for step in range(1001)})
    return [text[place : place + 6] for place in places]


def test_gaps_are_between_sentences() -> None:
    assert gaps(TEXT) == ["It rai", "Mr. Lo", "Is it ", "Nobody", "A new ", ""]


def test_titles_and_initials_end_no_sentence() -> None:
    text = "Dr. J. Smith and Mrs. Low met. They ate."
    assert gaps(text) == ["Dr. J.", "They a", ""]


def test_an_unfinished_sentence_at_the_end_is_not_a_gap() -> None:
    assert gaps("It rains. And then the") == ["It rai", "And th"]


def test_texts_without_spaces_between_sentences_have_gaps() -> None:
    assert gaps("\u96e8\u3002\u98a8\uff01\u590f") == [
        "\u96e8\u3002\u98a8\uff01\u590f",
        "\u98a8\uff01\u590f",
        "\u590f",
    ]


def test_texts_without_sentences_are_parted_at_lines_or_words() -> None:
    code = "a = b + 1\n" * 500
    assert nearest_gap(code, 0.5) == 2500
    assert nearest_gap(code, 0.3334) == 1670
    assert nearest_gap("word " * 1000, 0.5003) == 2500
    assert (nearest_gap("x" * 5000, 0.4), nearest_gap("x" * 5000, 0.6)) == (0, 5000)


def test_a_sentence_that_is_near_is_preferred_to_a_line() -> None:
    text = "a b\n" * 100 + "The end. Begin " + "a b\n" * 100
    assert nearest_gap(text, 0.45) == text.index("Begin")


def test_sentences_are_hidden_and_located() -> None:
    hidden = hide(
        TEXT, [(0.4, "Late key."), (0.0, "First key."), (1.0, "Last key.")], separator=" "
    )
    assert hidden.text == (
        "First key. It rains. Mr. Low waits. Late key. Is it late? Nobody knows.\n\n"
        "A new day begins. Last key."
    )
    assert [hidden.text[start:end] for start, end in hidden.spans] == [
        "Late key.",
        "First key.",
        "Last key.",
    ]


def test_sentences_at_one_place_keep_the_order_of_their_depths() -> None:
    hidden = hide("It rains. It pours.", [(0.52, "B."), (0.51, "A.")], separator=" ")
    assert hidden.text == "It rains. A. B. It pours."
    assert hidden.spans == [(13, 15), (10, 12)]


def test_sentences_can_be_hidden_in_nothing() -> None:
    assert hide("", [(0.9, "B."), (0.1, "A.")], separator="\n") == ("A.\nB.", [(3, 5), (0, 2)])


def test_any_text_survives_hiding() -> None:
    source = random.Random(5)
    for _ in range(200):
        text = "".join(source.choices("aB. !\n", k=source.randint(0, 80)))
        placed = [(source.random(), f"<{number}>") for number in range(4)]
        hidden = hide(text, placed, separator="|")
        assert [hidden.text[start:end] for start, end in hidden.spans] == [
            "<0>",
            "<1>",
            "<2>",
            "<3>",
        ]
        rest = hidden.text
        for _, sentence in placed:
            rest = rest.replace(sentence, "")
        assert rest.replace("|", "") == text


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 20])
def test_noise_has_as_many_sentences_as_asked(size: int) -> None:
    assert NoiseHaystack().text(size).count(".") == size


def test_essays_are_cut_between_words() -> None:
    haystack = EssayHaystack("one two three")
    assert haystack.text(7) == "one two"
    assert haystack.text(9) == "one two"
    assert haystack.text(13) == "one two three"
    assert haystack.text(18) == "one two three\n\none"
    assert EssayHaystack("one two three", first_char=4).text(12) == "two three"
    assert (haystack.notes(13), haystack.notes(18)) == ({"essay_rounds": 1}, {"essay_rounds": 2})


def test_a_larger_haystack_of_needles_begins_with_a_smaller() -> None:
    source = random.Random(0)
    haystack = NeedleHaystack(lambda: str(source.random()))
    long = haystack.text(5)
    assert long.startswith(haystack.text(3) + "\n")
    assert haystack.text(5) == long


def test_more_depths_than_rulers_forty_are_drawn_in_rounds() -> None:
    depths = depths_of(random.Random(0), 100, "ruler")
    assert len(set(depths[:40])) == len(set(depths[40:80])) == 40
    assert depths_of(random.Random(0), 2, 0.25) == [0.25, 0.25]
