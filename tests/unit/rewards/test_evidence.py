"""Capture and retention of evidence."""

import pytest

from memagent.rewards.evidence import overlap, recall

HOUSE, OWNER = "The house is red.", "Anna owns it."


@pytest.mark.parametrize(
    ("memories", "captured", "retained"),
    [
        (["nothing"], 0.0, 0.0),
        ([HOUSE, f"{HOUSE} {OWNER}"], 1.0, 1.0),
        ([HOUSE, OWNER], 1.0, 0.5),
        ([f"{HOUSE}\n{OWNER}", "Anna."], 1.0, 0.0),
        (["THE HOUSE -- is red; anna owns it"], 1.0, 1.0),
        (["Joanna owns it. The house is reddish."], 0.0, 0.0),
    ],
)
def test_evidence_is_searched_in_all_memories_and_in_the_last(
    memories: list[str], captured: float, retained: float
) -> None:
    assert recall([HOUSE, OWNER], memories) == (captured, retained)


@pytest.mark.parametrize(("evidence", "memories"), [([], ["a"]), (["a"], []), (["?!"], ["a"])])
def test_without_evidence_or_memories_there_is_no_figure(
    evidence: list[str], memories: list[str]
) -> None:
    assert recall(evidence, memories) is None


def test_places_agree_that_share_half_of_the_shorter_one() -> None:
    wanted = [(0, 20), (100, 140)]
    assert overlap([(0, 20), (110, 130), (50, 60)], wanted) == (2 / 3, 1.0)
    assert overlap([(15, 40)], wanted) == (0.0, 0.0)
    assert overlap([(10, 30)], wanted) == (1.0, 0.5)


def test_without_citations_there_is_no_precision_and_without_evidence_no_score() -> None:
    assert overlap([], [(0, 5)]) == (None, 0.0)
    assert overlap([(0, 5)], []) is None
