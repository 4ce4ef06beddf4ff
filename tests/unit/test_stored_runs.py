"""Runs on this machine: listed, shown, deleted."""

import json
from pathlib import Path

import pytest

from memagent import Reader
from memagent.agent.model_call import Limits
from memagent.cli.main import run
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import LimitReached, RunError
from memagent.runs import Run, describe_run, find_run, remove_run, runs_folder, stored_runs

TEXT = "It rained. Hedda inherits the house.\n" * 20
QUESTIONS = ["Who inherits the house?", "Did it rain?"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return runs_folder()


def read(folder: Path, *, max_calls: int | None = None) -> Path:
    """A reading of two questions, each of several sections."""
    reader = Reader(
        ScriptedEngine(lambda messages, sampling: "Hedda\x1b]0;title\x07."),
        tokenizer="bytes",
        limits=Limits(max_calls=max_calls),
        window=3000,
        chunk_tokens=300,
        memory_tokens=100,
        answer_tokens=60,
    )
    try:
        reader.ask_many(QUESTIONS, TEXT, run_dir=folder)
    except LimitReached:
        assert max_calls is not None
    return folder


def write_run(
    path: Path, manifest: dict[str, object], *, metrics: str = "", journal: str = ""
) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"format": 1, **manifest}))
    (path / "metrics.jsonl").write_text(metrics)
    (path / "steps.jsonl").write_text(journal)
    return path


def test_there_are_no_runs_at_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert stored_runs() == []
    assert run(["runs", "list"]) == 0
    assert capsys.readouterr().out.split() == ["NAME", "KIND", "CREATED", "SIZE", "STATE", "WHAT"]


def test_readings_are_listed_with_how_far_they_came(state: Path) -> None:
    complete, partial = read(state / "b"), read(state / "a", max_calls=4)
    found = {each.path: each for each in stored_runs()}
    assert found[complete].state == "2 of 2 answered"
    assert found[complete].is_complete
    assert not found[complete].can_resume
    assert found[partial].state == "0 of 2 answered"
    assert found[partial].can_resume
    assert found[partial].what == "Who inherits the house? (text)"
    assert found[complete].num_bytes > 1000


def test_evaluations_and_training_are_listed_newest_first(state: Path) -> None:
    suite = {"kind": "eval", "suite": None, "num_items": 4, "tasks": [{"tasks": ["ruler/vt"]}]}
    write_run(state / "e", {**suite, "created": "2026-03-01T09:00:00"}, journal="{}\n{}\n")
    config = {"about": "", "steps": 50, "model": {"source": "smollm2-135m"}}
    lines = '{"step": 6, "kind": "train"}\n{"step": 7, "kind": "train"}\n{"ste'
    training = {"kind": "train", "config": config, "created": "2026-03-02T09:00:00"}
    write_run(state / "t", training, metrics=lines)
    assert [(each.name, each.state, each.what) for each in stored_runs()] == [
        ("t", "7 of 50 steps", "smollm2-135m"),
        ("e", "2 of 4 items", "ruler/vt"),
    ]


@pytest.mark.parametrize("journal", [b"", b"x\ny\n"])
@pytest.mark.parametrize(
    "manifest",
    [
        b"{",
        b"[]",
        b'{"format": 9}',
        b'{"format": 1, "kind": [], "created": {}, "questions": 3}',
        b'{"format": 1, "kind": "ask", "questions": [[]], "document": []}',
        b'{"format": 1, "kind": "eval", "tasks": [3, {"tasks": 3}], "num_items": true}',
        b'{"format": 1, "kind": "train", "config": [], "created": null}',
    ],
)
def test_damaged_runs_are_listed_and_do_not_end_the_list(
    state: Path, manifest: bytes, journal: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "bad").mkdir(parents=True)
    (state / "bad" / "run.json").write_bytes(manifest)
    (state / "bad" / "steps.jsonl").write_bytes(journal)
    read(state / "good")
    assert run(["runs", "list"]) == 0
    assert "2 of 2 answered" in capsys.readouterr().out
    assert run(["runs", "list", "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == {"bad", "good"}
    assert run(["runs", "show", "bad"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_is_found_by_its_beginning_and_misspelt_names_get_a_hint(state: Path) -> None:
    for name in ("20260301-a1", "20260301-b2"):
        read(state / name)
    assert find_run("20260301-b").name == "20260301-b2"
    assert find_run(str(state / "20260301-a1")).name == "20260301-a1"
    with pytest.raises(RunError, match=r"'20260301': 20260301-b2, 20260301-a1; give more of"):
        find_run("20260301")
    with pytest.raises(RunError, match=r"no run '20260310-a1'.*did you mean 20260301-a1\?"):
        find_run("20260310-a1")


def test_of_many_runs_with_one_beginning_the_newest_are_named_and_the_rest_counted(
    state: Path,
) -> None:
    for number in range(7):
        read(state / f"2026-{number}")
    expected = "several runs begin with '2026': 2026-6, 2026-5, 2026-4, 2026-3, 2026-2 and 2 more;"
    with pytest.raises(RunError, match=expected):
        find_run("2026")


@pytest.mark.parametrize(
    ("name", "why"), [("runs/none", "does not exist"), ("runs/here", "holds no run: there is no")]
)
def test_a_path_without_a_run_is_not_looked_for_by_name(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/here").mkdir(parents=True)
    with pytest.raises(RunError, match=f"^{name} {why}"):
        find_run(name)


def test_a_folder_without_a_run_is_not_looked_for_by_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with pytest.raises(RunError, match=r"^here holds no run: there is no run\.json in it"):
        find_run("here")
    with pytest.raises(RunError, match=r"^nosuch does not exist"):
        find_run("nosuch/")


def test_the_newest_run_is_shown_where_none_is_named(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "show"]) == 2
    assert capsys.readouterr().err == f"memagent: there are no runs in {state}\n"
    read(state / "20260301-a1")
    read(state / "20260301-b2")
    assert run(["runs", "show"]) == 0
    assert capsys.readouterr().out.startswith(f"run      {state / '20260301-b2'}\n")


def test_a_reading_is_shown_with_its_answers(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(state / "one")
    assert run(["runs", "show", "one"]) == 0
    shown = capsys.readouterr().out
    assert "state    2 of 2 answered" in shown
    assert "Who inherits the house?\nHedda" in shown
    assert "resume with" not in shown
    assert run(["runs", "show", "one", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["traces"][1]["question"] == "Did it rain?"


def test_an_unfinished_reading_is_shown_with_the_command_that_resumes_it(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = read(state / "one", max_calls=4)
    assert run(["runs", "show", "one"]) == 0
    shown = capsys.readouterr().out
    assert "no answer yet; 2 sections are read" in shown
    assert shown.endswith(f"resume with: memagent ask --resume {path}\n")


def test_runs_in_another_folder_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path / "mine" / "one")
    assert run(["runs", "list", "mine"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("one   ask   20")


def test_a_run_is_deleted_after_confirmation(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = read(state / "one"), read(state / "two")
    monkeypatch.setattr(
        "click.confirm", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert run(["runs", "rm", "one"]) == 130
    assert first.exists()
    assert run(["runs", "rm", "one", "two", "--yes"]) == 0
    assert not first.exists()
    assert not second.exists()


def test_a_run_in_use_and_folders_elsewhere_are_not_deleted(state: Path, tmp_path: Path) -> None:
    used = Run.create(state / "used", {"kind": "ask", "questions": []})
    assert describe_run(used.path).is_in_use
    with pytest.raises(RunError, match="in use by another memagent process"):
        remove_run(used.path)
    used.close()
    project = read(tmp_path / "project")
    (project / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="delete the folder yourself"):
        remove_run(project)
    (state / "link").symlink_to(project)
    with pytest.raises(RunError, match="delete the folder yourself"):
        remove_run(state / "link")
    (state / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        remove_run(state / "empty")
    assert (project / "thesis.tex").exists()
    remove_run(used.path)
    assert not used.path.exists()


@pytest.mark.parametrize("name", ["../..", ".", "", "one/../.."])
def test_names_do_not_lead_out_of_the_state_folder(state: Path, name: str) -> None:
    read(state / "one")
    assert run(["runs", "rm", name, "--yes"]) == 2
    assert (state / "one").exists()
