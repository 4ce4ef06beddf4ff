"""Common and frequent words: every count exactly as it should be."""

import math
import random
import re
from collections import Counter

import pytest

from memagent.data.example import Example
from memagent.data.tasks.registry import open_task
from memagent.data.tasks.ruler.words import (
    coded_words,
    draw_new,
    least_words,
    zeta,
    zipf_counts,
)
from memagent.errors import ConfigError
from tests.support.ruler_solvers import LISTED


def example(task: str, index: int = 0, **settings: object) -> Example:
    given = {"tokens": 8000, "tokenizer": "bytes", **settings}
    return open_task(f"ruler/{task}", given).example(index)


# --- cwe ------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    numbers, words = zip(*LISTED.findall(text), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert " ".join(f"{n}. {w}" for n, w in zip(numbers, words, strict=True)) == text
    return list(words)


@pytest.mark.parametrize(
    ("tokens", "common", "uncommon"), [(8000, 30, 3), (40_000, 30, 3), (3000, 6, 1)]
)
def test_ten_words_occur_often_and_all_others_seldom(
    tokens: int, common: int, uncommon: int
) -> None:
    for index in range(5):
        made = example("cwe", index, tokens=tokens)
        counts = Counter(listed(made.text()))
        assert len(made.answers) == 10
        assert {counts.pop(word) for word in made.answers} == {common}
        assert set(counts.values()) == {uncommon}
        assert len(counts) == made.metadata["num_uncommon"]


def test_frequencies_can_be_set() -> None:
    made = example("cwe", num_common=4, freq_common=12, freq_uncommon=5)
    counts = Counter(listed(made.text()))
    assert sorted(counts[word] for word in made.answers) == [12] * 4
    assert Counter(counts.values()) == {12: 4, 5: made.metadata["num_uncommon"]}
    assert "Which 4 words" in made.question


def test_common_words_have_to_be_commoner() -> None:
    with pytest.raises(ConfigError, match="freq_common=3 must be above freq_uncommon=3"):
        example("cwe", freq_common=3)


def test_ten_words_thirty_times_need_some_room() -> None:
    message = r"tokens=4096 is too short: ruler/cwe with 20 words 30 times has \d+ at least; raise"
    with pytest.raises(ConfigError, match=message):
        example("cwe", tokens=4096, num_common=20)


def test_no_answer_is_part_of_another() -> None:
    for index in range(100):
        answers = example("cwe", index, tokens=6000).answers
        assert not any(a != b and a in b for a in answers for b in answers)


def test_the_answers_are_the_commonest_words_at_any_length() -> None:
    """Also where pairs such as gentle-harbour are counted by their words."""
    made = example("cwe", tokens=1_000_000)
    words = [word for entry in listed(made.text()) for word in entry.split("-")]
    ranked = Counter(words).most_common(11)
    assert {word for word, _ in ranked[:10]} == set(made.answers)
    assert ranked[9][1] > ranked[10][1]


def test_words_of_lists_that_the_dictionary_suffices_for_are_as_before() -> None:
    """The first pairs too: texts that were well-posed keep their bytes."""
    digests = [
        example("cwe", tokens=tokens, seed=1).text_sha256[:12] for tokens in (30_000, 400_000)
    ]
    assert digests == ["b85da352e9c6", "623203be3d5c"]


# --- fwe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [2.0, 1.5, 3.0])
def test_coded_words_follow_zipfs_law(alpha: float) -> None:
    for index in range(10):
        made = example("fwe", index, tokens=20_000, alpha=alpha)
        counts = Counter(made.text().split(" "))
        ranked = [count for _, count in counts.most_common()]
        total = _total(ranked, alpha)
        assert ranked == [int(total * rank**-alpha) for rank in range(1, len(ranked) + 1)]
        assert counts.most_common(1)[0][0] == "..."
        assert [word for word, _ in counts.most_common(4)[1:]] == list(made.answers)
        assert ranked[1] > ranked[2] > ranked[3] > ranked[4]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word in counts if word != "...")


def _total(ranked: list[int], alpha: float) -> float:
    """A number whose shares, rounded down, are these counts: each count narrows it down."""
    low = max(count * rank**alpha for rank, count in enumerate(ranked, start=1))
    high = min((count + 1) * rank**alpha for rank, count in enumerate(ranked, start=1))
    assert low < high
    return (low + high) / 2


def test_the_vocabulary_is_a_fiftieth_of_the_length() -> None:
    assert example("fwe", tokens=20_000).metadata["vocabulary"] == 400
    flat = example("fwe", tokens=5000, alpha=1.05)
    assert flat.metadata["vocabulary"] == 100
    assert len(set(flat.text().split())) == 100


def test_counts_are_worked_by_hand() -> None:
    # 164.49 / zeta(2) = 100: the ranks have 100, 25, 11.1, 6.25, 4, 2.8 ...
    assert zipf_counts(165, 6, 2.0) == [100, 25, 11, 6, 4, 2]
    assert zipf_counts(165, 100, 2.0) == [100, 25, 11, 6, 4, 2, 2, 1, 1, 1]


def test_zeta_is_riemanns() -> None:
    assert zeta(2.0) == pytest.approx(math.pi**2 / 6, abs=1e-12)
    assert zeta(4.0) == pytest.approx(math.pi**4 / 90, abs=1e-12)
    assert zeta(1.5) == pytest.approx(2.6123753486854883, abs=1e-9)


@pytest.mark.parametrize("alpha", [1.1, 2.0, 3.5])
def test_from_the_least_words_on_the_ranks_are_distinct(alpha: float) -> None:
    least = least_words(4, alpha)
    for num_words in range(least, least + 500):
        counts = [*zipf_counts(num_words, 5, alpha), 0]
        assert counts[1] > counts[2] > counts[3] > counts[4]


def test_more_coded_words_begin_with_the_same_ones() -> None:
    few, many = coded_words(random.Random(3), 10), coded_words(random.Random(3), 5000)
    assert many[:10] == few
    assert len(set(many)) == 5000


# --- the lists of words ---------------------------------------------------------------------------


def test_what_is_taken_is_not_drawn_again() -> None:
    source, taken = random.Random(0), set[str]()
    drawn = [draw_new("words", source, taken) for _ in range(3000)]
    assert len(set(drawn)) == 3000
    assert set(drawn) == taken
