"""The task for small models: its answer can be read, its evidence is in place, its settings are checked."""

import re
from collections import Counter
from typing import Any

import pytest

from memagent.data.tasks.beyond.facts import COLOURS
from memagent.data.tasks.colours import THINGS
from memagent.data.tasks.registry import open_task
from memagent.errors import ConfigError


def task(**settings: Any) -> Any:
    return open_task("small/colours", {"seed": 5, "tokenizer": "bytes", **settings})


@pytest.mark.parametrize(("sentences", "others"), [(1, 0), (24, 0), (24, 3), (10, 9)])
def test_the_text_states_the_colour_once(sentences: int, others: int) -> None:
    made = task(sentences=sentences, others=others)
    for index in range(50):
        example = made.example(index)
        text = example.text()
        assert len(re.findall(r"[^.]+\.", text)) == sentences
        stated = dict(re.findall(r"The (\w+) is (\w+)\.", text))
        (asked,) = re.findall(r"What colour is the (\w+)\?", example.question)
        assert len(stated) == 1 + others
        assert example.answers == (stated[asked],)
        [(start, end)] = example.evidence_offsets()
        assert text[start:end] == example.evidence[0].text == f"The {asked} is {stated[asked]}."


def test_things_colours_and_places_are_all_drawn() -> None:
    examples = [task(sentences=10).example(index) for index in range(500)]
    starts = Counter(example.text()[: example.evidence[0].start].count(".") for example in examples)
    assert sorted(starts) == list(range(10))
    assert {example.answers[0] for example in examples} == set(COLOURS)
    assert {example.question.split()[-1].rstrip("?") for example in examples} == set(THINGS)


def test_examples_depend_on_seed_and_index_alone() -> None:
    assert task().example(3) == task().example(3)
    assert task().example(3) != task().example(4)
    assert task().example(3).text() != task(seed=6).example(3).text()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tokens": 100}, "is given in sentences; leave out `tokens`"),
        ({"sentences": 2, "others": 2}, "raise `sentences`"),
        ({"others": len(THINGS)}, "others"),
        ({"sentence": 3}, "did you mean sentences"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        task(**settings)
