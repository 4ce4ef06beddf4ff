"""The graders on the answers of HotpotQA: each equals itself and nothing else."""

import gzip
import json
from itertools import pairwise

import pytest

from memagent.rewards.metrics import equal
from memagent.rewards.text import answer_key, squad_key
from memagent.rewards.verifiers import grade
from tests.support.published import Published


@pytest.fixture(scope="module")
def answers(published: Published) -> list[str]:
    path = published.folder / "hotpotqa" / "dev.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["answer"] for line in file]


@pytest.mark.parametrize("name", ["strict", "lenient", "exact", "f1", "contains"])
def test_every_answer_is_right_in_a_box(answers: list[str], name: str) -> None:
    assert len(set(answers)) > 200
    wrong = [a for a in answers if grade(name, f"It is \\boxed{{{a}}}.", [a]).value != 1.0]
    assert wrong == []


def test_every_longer_answer_is_stated_in_a_sentence_and_lost_in_its_denial(
    answers: list[str],
) -> None:
    # a bracket is a clause of its own, which a "not" before it does not reach
    longer = [a for a in answers if len(answer_key(a)) > 3 and not a.startswith("(")]
    assert len(set(longer)) > 200
    stated = [a for a in longer if grade("contains", f"It was {a} all along", [a]).value]
    denied = [a for a in longer if grade("contains", f"It was not {a} at all", [a]).value]
    assert stated == longer
    assert denied == []


def test_neighbouring_answers_are_distinguished(answers: list[str]) -> None:
    for one, other in pairwise(answers):
        if squad_key(one) != squad_key(other):
            assert not equal(one, other), (one, other)
