"""tools/explain_validation.py: losses from the memory, and where wrong answers got lost."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("explain_validation")
    for name in ("explain_validation", "compare_validations"):
        sys.modules.pop(name, None)


def record(answer: str, *memories: str, said: str = "\\boxed{other}") -> SimpleNamespace:
    steps = [{"kind": "read", "memory": memory} for memory in memories]
    return SimpleNamespace(answers=(answer,), answer=said, trace={"steps": steps})


def test_a_loss_is_a_section_after_which_the_answer_is_gone(explain: ModuleType) -> None:
    assert explain.losses(record("Rome", "", "in rome", "rome, Paris", "Paris")) == (1, 2)
    assert explain.losses(record("Rome", "", "Paris")) == (0, 0)


@pytest.mark.parametrize(
    ("found", "fate"),
    [
        (record("no", "x"), "yes or no"),
        (record("Rome", "x", "y"), "never in a memory"),
        (record("Rome", "Rome", "y"), "not in the last memory"),
        (record("old Rome", "old Rome"), "in the last memory, another answer"),
        (record("old Rome", "old Rome", said="\\boxed{Rome}"), "in the last memory, another form"),
    ],
)
def test_wrong_answers_are_sorted_by_where_they_got_lost(
    explain: ModuleType, found: SimpleNamespace, fate: str
) -> None:
    assert explain.fate(found) == fate
