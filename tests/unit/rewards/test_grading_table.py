"""The tables of docs/grading.md, row by row."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from memagent.rewards.verifiers import GRADERS, Match, grade

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "grading.md").read_text(encoding="utf-8")


class Case(NamedTuple):
    grader: str
    reply: str
    answers: list[str]
    match: Match
    value: float


def quoted(cell: str) -> list[str]:
    return [text.replace(r"\n", "\n") for text in re.findall("`([^`]*)`", cell)]


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading or a table's own first cell."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    table = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def tricky_cases() -> list[Case]:
    return [
        Case(*quoted(grader), *quoted(reply), quoted(answers), match, float(value))
        for grader, reply, answers, match, value in rows("## Examples")
    ]


@pytest.mark.parametrize("case", tricky_cases(), ids=lambda case: f"{case.grader}-{case.reply}")
def test_a_tricky_case_is_scored_as_documented(case: Case) -> None:
    score = grade(case.grader, case.reply, case.answers, case.match)
    assert score.value == case.value, score


@pytest.mark.parametrize("row", rows("| prediction, answer `Paris`"))
def test_the_two_rules_differ_as_documented(row: list[str]) -> None:
    prediction = quoted(row[0])[0]
    published = grade("original_sub_em", f"the answer is {prediction}", ["Paris"])
    assert published.value == float(row[1])
    assert grade("contains", prediction, ["Paris"]).value == float(row[2])


def test_every_grader_is_documented_and_has_cases() -> None:
    documented = [quoted(row[0])[0] for row in rows("| grader | what is graded")]
    assert documented == list(GRADERS)
    assert {case.grader for case in tricky_cases()} == set(GRADERS)
    assert len(tricky_cases()) > 60
