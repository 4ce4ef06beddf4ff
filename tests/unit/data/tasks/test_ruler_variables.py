"""Variable tracking: chains in order, names and values that differ, a worked example on request."""

import re
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.registry import open_task
from tests.support.ruler_solvers import ASSIGNMENT, solve


def examples(count: int, **settings: Any) -> list[Example]:
    task = open_task("ruler/vt", {"tokens": 4000, "tokenizer": "bytes", **settings})
    return [task.example(index) for index in range(count)]


def test_a_chain_of_four_hops_has_five_variables() -> None:
    for example in examples(30):
        found = ASSIGNMENT.findall(example.text())
        names = [name for name, _ in found]
        value = found[0][1]
        assert re.fullmatch(r"\d{5}", value)
        assert value in example.question
        assert all(re.fullmatch(r"[A-Z]{5}", name) for name in names)
        assert len(set(names)) == 5
        assert [right for _, right in found] == [value, *names[:-1]]
        assert example.answers == tuple(names)


def test_evidence_is_the_chain_in_order_with_what_to_remember() -> None:
    (example,) = examples(1)
    value, names = example.metadata["value"], example.answers
    assert [item.text for item in example.evidence] == [
        f"Set {name} = {right}." for name, right in zip(names, (value, *names), strict=False)
    ]
    assert example.evidence[0].note == f"The variables with the value {value} so far: {names[0]}."
    assert example.evidence[4].note.endswith(f"so far: {', '.join(names)}.")


@pytest.mark.parametrize(("num_chains", "num_hops"), [(1, 1), (2, 4), (4, 3), (3, 10)])
def test_chains_and_hops_can_be_set(num_chains: int, num_hops: int) -> None:
    for example in examples(20, num_chains=num_chains, num_hops=num_hops):
        found = ASSIGNMENT.findall(example.text())
        assert len(found) == len({name for name, _ in found}) == num_chains * (num_hops + 1)
        assert len({right for _, right in found if right.isdigit()}) == num_chains
        assert len(example.answers) == len(example.evidence) == num_hops + 1
        assert solve("ruler/vt", example.text(), example.question) == set(example.answers)


def test_the_assignments_are_spread_over_the_text() -> None:
    depths = [depth for example in examples(100) for depth in example.metadata["depths"]]
    assert sum(depths) / len(depths) == pytest.approx(0.5, abs=0.05)
    assert min(depths) < 0.05
    assert max(depths) > 0.95


def test_a_worked_example_stands_before_the_question_on_request() -> None:
    (plain,), (shown,) = examples(1), examples(1, one_shot=True)
    assert shown.text() == plain.text()
    assert shown.answers == plain.answers
    assert shown.question.endswith(plain.question)
    shot = shown.question.removesuffix(plain.question)
    text, rest = shot.split("\nQuestion: ")
    answer = rest.split("\nAnswer: ")[1].split("\n")[0]
    assert solve("ruler/vt", text, rest) == set(re.split(r", | and ", answer))
    assert not set(plain.answers) & {name for name, _ in ASSIGNMENT.findall(text)}
