"""Needles: how many there are, what they look like, where they stand."""

import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.lengths import bucket_counts, uniformity_p
from memagent.data.tasks.registry import open_task
from memagent.data.tasks.ruler.haystack import NOISE
from memagent.errors import ConfigError
from tests.support.ruler_solvers import NEEDLE
from tests.support.ruler_sources import ruler_settings
from tests.support.timing import growth


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ruler") / "sources"


def examples(folder: Path, task: str, count: int, **settings: Any) -> list[Example]:
    given = {"tokens": 6000, "tokenizer": "bytes", **settings}
    opened = open_task(f"ruler/{task}", ruler_settings(folder, f"ruler/{task}", **given))
    return [opened.example(index) for index in range(count)]


def is_number(text: str) -> bool:
    return re.fullmatch(r"[1-9]\d{6}", text) is not None


def is_words(text: str) -> bool:
    return re.fullmatch(r"[a-z]+-[a-z]+", text) is not None


def is_uuid(text: str) -> bool:
    return str(uuid.UUID(text)) == text and uuid.UUID(text).version == 4


# --- what is in the text --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "num_needles", "num_keys", "num_answers", "is_key", "is_value"),
    [
        ("niah_single_1", 1, 1, 1, is_words, is_number),
        ("niah_single_2", 1, 1, 1, is_words, is_number),
        ("niah_single_3", 1, 1, 1, is_words, is_uuid),
        ("niah_multikey_1", 4, 4, 1, is_words, is_number),
        ("niah_multivalue", 4, 1, 4, is_words, is_number),
        ("niah_multiquery", 4, 4, 4, is_words, is_number),
    ],
)
def test_needles_are_as_many_and_as_different_as_rulers(
    folder: Path,
    task: str,
    num_needles: int,
    num_keys: int,
    num_answers: int,
    is_key: Any,
    is_value: Any,
) -> None:
    for example in examples(folder, task, 20):
        found = NEEDLE.findall(example.text())
        assert len(found) == num_needles == example.metadata["num_needles"]
        assert len({key for _, key, _ in found}) == num_keys
        assert len({value for _, _, value in found}) == num_needles
        assert len(example.answers) == len(example.evidence) == num_answers
        assert all(is_key(key) and is_value(value) for _, key, value in found)


@pytest.mark.parametrize(
    ("task", "is_key", "is_value"),
    [("niah_multikey_2", is_words, is_number), ("niah_multikey_3", is_uuid, is_uuid)],
)
def test_a_haystack_of_needles_has_every_key_once(
    folder: Path, task: str, is_key: Any, is_value: Any
) -> None:
    for example in examples(folder, task, 5, tokens=20_000):
        lines = example.text().split("\n")
        found = [NEEDLE.fullmatch(line) for line in lines]
        pairs = [(match[2], match[3]) for match in found if match]
        assert len(pairs) == len(lines) == example.metadata["num_distractors"] + 1
        assert len({key for key, _ in pairs}) == len({value for _, value in pairs}) == len(pairs)
        assert all(is_key(key) and is_value(value) for key, value in pairs)


def test_what_is_shorter_than_a_needle_is_filled_with_noise(folder: Path) -> None:
    made = examples(folder, "niah_multikey_3", 20, tokens=1500)
    assert all(1470 <= (example.num_tokens or 0) <= 1500 for example in made)
    assert any(NOISE[0] in example.text() for example in made)


def test_a_haystack_of_noise_is_noise_and_the_needle(folder: Path) -> None:
    (example,) = examples(folder, "niah_single_1", 1)
    text = example.text().replace(example.evidence[0].text + " ", "", 1)
    rest = text
    for number in range(len(text)):
        if not rest:
            break
        assert rest.startswith(NOISE[number % len(NOISE)])
        rest = rest[len(NOISE[number % len(NOISE)]) :].removeprefix(" ")
    assert rest == ""


def test_essays_that_are_too_short_begin_again_and_it_is_noted(folder: Path) -> None:
    (example,) = examples(folder, "niah_single_2", 1, tokens=60_000)
    texts = [(folder / "essays" / f"{number}.txt").read_text().strip() for number in range(3)]
    once = "\n\n".join(texts) + "\n\n"
    text = example.text().replace(example.evidence[0].text + " ", "", 1)
    assert text == (once * 10)[: len(text)]
    assert example.metadata["essay_rounds"] == -(-len(text) // len(once)) == 3


def test_shifted_essays_begin_at_another_sentence_each_time(folder: Path) -> None:
    made = examples(folder, "niah_single_2", 8, shift=True)
    assert len({example.text()[:60] for example in made}) == 8
    assert all(example.text()[0] in "IO" for example in made)  # "In 1873 ..." or the needle's "One"


def test_settings_of_a_task_can_be_changed(folder: Path) -> None:
    given = {"num_keys": 3, "num_values": 2, "num_queries": 2, "values": "words"}
    (example,) = examples(folder, "niah_single_1", 1, **given)
    assert len(NEEDLE.findall(example.text())) == 6
    assert len(example.answers) == 4
    assert all(is_words(answer) for answer in example.answers)
    assert re.match(r"What are all the secret words of \S+ and \S+ that the text", example.question)


def test_more_queries_than_keys_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_queries=2 asks for more than num_keys=1; raise"):
        examples(folder, "niah_single_1", 1, num_queries=2)


# --- where needles stand --------------------------------------------------------------------------


def depth_of(example: Example) -> float:
    """Of the first needle, measured in the text: 0 at its start, 1 at its end."""
    item = example.evidence[0]
    return item.start / (len(example.text()) - len(item.text))


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_depths_are_uniform(folder: Path, task: str) -> None:
    depths = [depth_of(example) for example in examples(folder, task, 500)]
    counts = bucket_counts([min(depth, 1.0) for depth in depths], num_buckets=10)
    assert uniformity_p(counts) > 0.01
    assert uniformity_p([sum(counts[:9]), counts[9] * 9]) > 0.001  # the end is not left out


def test_the_depth_in_the_text_is_the_depth_that_was_drawn(folder: Path) -> None:
    for example in examples(folder, "niah_single_2", 50):
        assert depth_of(example) == pytest.approx(example.metadata["depths"][0], abs=0.02)


def test_needles_break_no_sentence(folder: Path) -> None:
    for example in examples(folder, "niah_multiquery", 30):
        text = example.text()
        for item in example.evidence:
            before = text[: item.start].rstrip()
            assert before == "" or before[-1] in ".!"
            assert text[item.end : item.end + 1] in (" ", "")


def test_rulers_forty_depths_can_be_asked_for(folder: Path) -> None:
    made = examples(folder, "niah_multiquery", 100, depth="ruler")
    depths = [depth for example in made for depth in example.metadata["depths"]]
    assert all(len(set(example.metadata["depths"])) == 4 for example in made)
    assert sorted(set(depths)) == [round(100 * step / 39) / 100 for step in range(40)]


@pytest.mark.parametrize(
    ("depth", "low", "high"), [(0, 0.0, 0.0), (0.5, 0.48, 0.52), (1, 0.98, 1.0)]
)
def test_one_depth_can_be_asked_for(folder: Path, depth: float, low: float, high: float) -> None:
    for example in examples(folder, "niah_single_2", 5, depth=depth):
        assert low <= depth_of(example) <= high


def test_a_depth_outside_the_text_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="depth"):
        examples(folder, "niah_single_2", 1, depth=1.5)


# --- speed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_1", "niah_multikey_2"])
def test_the_cost_of_a_text_grows_with_its_length_and_no_faster(folder: Path, task: str) -> None:
    def work(num_tokens: int) -> None:
        (example,) = examples(folder, task, 1, tokens=num_tokens)
        assert 0.98 * num_tokens <= (example.num_tokens or 0) <= num_tokens

    assert growth(work, 500_000, 4_000_000, repeats=1) < 32
