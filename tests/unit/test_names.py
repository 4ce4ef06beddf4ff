"""Names that are nearly right."""

from __future__ import annotations

import pytest

from memagent.names import hint, nearest, similar

GRADERS = ("strict", "lenient", "exact_match")


@pytest.mark.parametrize(
    ("name", "found"), [("strct", "strict"), ("STRICT", "strict"), ("leniant", "lenient")]
)
def test_a_misspelt_name_finds_the_nearest_one(name: str, found: str) -> None:
    assert nearest(name, GRADERS) == found
    assert hint(name, GRADERS) == f"did you mean {found}?"


def test_a_name_like_no_other_gets_the_list() -> None:
    assert nearest("xyz", GRADERS) is None
    assert hint("xyz", GRADERS) == "known: strict, lenient, exact_match"
    assert hint("xyz", []) == "known: none"


def test_another_remedy_may_stand_in_place_of_the_list() -> None:
    assert hint("xyz", GRADERS, otherwise="check the name") == "check the name"


def test_several_suggestions_are_listed_with_the_nearest_first() -> None:
    names = ("report.txt", "report2.txt", "notes.md")
    assert similar("reprt.txt", names, max_num=3) == ["report.txt", "report2.txt"]
    assert hint("reprt.txt", names, max_num=3) == "did you mean report.txt or report2.txt?"


def test_names_of_any_case_are_given_as_they_are_written() -> None:
    assert nearest("qwen3", ["Qwen3", "Llama"]) == "Qwen3"


def test_a_lower_cutoff_finds_what_is_less_similar() -> None:
    assert nearest("smollm", ["smollm2-135m"], cutoff=0.9) is None
    assert nearest("smollm", ["smollm2-135m"], cutoff=0.5) == "smollm2-135m"
