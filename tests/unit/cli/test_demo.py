"""`memagent demo` needs no file, no model and no folder of the repository."""

from pathlib import Path

import pytest

from memagent.cli.main import run
from memagent.documents.sample import QUESTIONS, town_archive


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with the user's folders in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


def test_the_demo_answers_two_questions(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--engine", "scripted", "--run-dir", "here"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [lines[0], lines[3]] == list(QUESTIONS)
    assert "behind the loose brick beside the bakery oven" in lines[1]
    assert "memory after section 1" in printed.err
    assert f"the text says: {lines[1]}\nthe text says: {lines[4]}\n" in printed.err
    assert "very small" not in printed.err
    assert (
        f"ask more: memagent ask {home}/data/memagent/town-archive.txt -q QUESTION" in printed.err
    )
    assert (home / "here" / "steps.jsonl").exists()


def test_the_text_is_saved_and_no_other_file_is_overwritten(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--save", "archive.txt"]) == 0
    assert (home / "archive.txt").read_text() == town_archive()
    assert run(["demo", "--save", "archive.txt"]) == 0
    (home / "archive.txt").write_text("mine")
    capsys.readouterr()
    assert run(["demo", "--save", "archive.txt"]) == 2
    assert "archive.txt exists and has other contents" in capsys.readouterr().err
    assert (home / "archive.txt").read_text() == "mine"
    assert run(["demo", "--save", "none/archive.txt"]) == 2
    assert capsys.readouterr().err.startswith("memagent: none/archive.txt cannot be written (")


def test_a_misspelt_engine_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--engine", "scriptd"]) == 2
    assert "did you mean scripted?" in capsys.readouterr().err
