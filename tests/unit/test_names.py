"""Names that are nearly right."""

import pytest

from memagent.data.tasks.registry import TASKS
from memagent.names import hint, hint_in_folders, nearest, similar

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


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("vt", "did you mean ruler/vt?"),
        ("cwe", "did you mean ruler/cwe?"),
        ("colors", "did you mean small/colours?"),
        ("hotpot", "did you mean hotpotqa?"),
        ("HotpotQA", "did you mean hotpotqa?"),
        ("ruler/niah_singel_1", "did you mean ruler/niah_single_1?"),
        ("ruler/two_hop", "did you mean beyond/two_hop?"),
        ("niah", "did you mean ruler/niah_single_1 or ruler/niah_single_2 or ruler/niah_single_3?"),
        ("small/", "known: small/colours"),
        ("xyz", "known: hotpotqa, beyond/coreference, "),
    ],
)
def test_a_task_is_suggested_without_its_folder_too(name: str, suggested: str) -> None:
    assert hint_in_folders(name, TASKS).startswith(suggested)
