"""Run directories that somebody changed: refused in a line, or resumed with the same answer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.cli.main import run
from memagent.engines.base import open_engine
from memagent.errors import RunError
from memagent.replies import REPLIES
from memagent.run_files import read_lines, sealed
from tests.hostile.damaged_runs import RunKind, attack, command, make_runs

COUNT = 40
"""Damaged runs in each run of the tests; `python -m tests.hostile.damaged_runs` resumes a thousand."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunKind]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        return make_runs(tmp_path_factory.mktemp("runs") / "all")


def test_damaged_runs_are_refused_or_end_the_same(runs: list[RunKind]) -> None:
    assert attack(runs, COUNT, seed=1) == []


TEXT = "The code is 48213. " + "Nothing else was said. " * 200
SETTINGS: dict[str, Any] = {
    "tokenizer": "bytes",
    "window": 4096,
    "chunk_tokens": 400,
    "memory_tokens": 400,
    "answer_tokens": 200,
}


def asked(run_dir: Path) -> Trace:
    return Reader(open_engine("scripted"), **SETTINGS).ask("What is it?", TEXT, run_dir=run_dir)


def unfinished(run_dir: Path) -> list[str]:
    """A run that stopped after some calls; its replies."""
    asked(run_dir)
    replies = run_dir / REPLIES
    lines = replies.read_text().splitlines()[:9]
    replies.write_text("".join(f"{line}\n" for line in lines))
    return lines


def test_a_changed_value_of_a_reply_is_found(tmp_path: Path) -> None:
    lines = unfinished(tmp_path)
    changed = lines[4].replace('"prompt_tokens":', '"prompt_tokens":1', 1)
    assert json.loads(changed)["usage"]["prompt_tokens"] > 1000
    (tmp_path / REPLIES).write_text("\n".join([*lines[:4], changed, *lines[5:]]) + "\n")
    with pytest.raises(RunError, match=r"replies\.jsonl, line 5, is damaged"):
        asked(tmp_path)


def test_a_line_without_a_checksum_after_one_with_it_is_damage(tmp_path: Path) -> None:
    lines = unfinished(tmp_path)
    bare = lines[4][: lines[4].rindex(',"crc":')] + "}"
    (tmp_path / REPLIES).write_text("\n".join([*lines[:4], bare, *lines[5:]]) + "\n")
    with pytest.raises(RunError, match=r"line 5, is damaged"):
        asked(tmp_path)


def test_a_checksum_is_of_the_line_without_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"".join(sealed(line) + b"\n" for line in (b'{"n":1}', b"{}", b'{"n":2}')))
    assert [line.record for line in read_lines(path)] == [{"n": 1}, {}, {"n": 2}]
    assert path.read_bytes().splitlines()[0] == b'{"n":1,"crc":"d44b3b7e"}'


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", {}),
        ("command", 7),
        ("questions", "What?"),
        ("document", None),
        ("prompts", {"name": 1}),
        ("agent", []),
        ("model", ["m"]),
        ("kind", {"a": 1}),
    ],
)
def test_a_manifest_of_another_shape_is_a_line(
    runs: list[RunKind], field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[0].folder / "run.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), field: value}))
    try:
        assert run(list(runs[0].resume)) == 2
    finally:
        path.write_text(before)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(runs[0].folder) in error


def test_runs_that_are_not_damaged_end_as_they_should(runs: list[RunKind]) -> None:
    assert "48213" in runs[0].output
    assert "100.0" in runs[1].output
    assert command("report", str(runs[2].folder)).exit_code == 0


@pytest.mark.parametrize(
    "state",
    [
        7,
        {},
        {"progress": 7, "num_lines": []},
        {"progress": {"step": "4"}, "num_lines": "many"},
        {"progress": {"step": 1e9, "warm_step": None}, "num_lines": None},
        {"progress": {"elsewhere": 1}},
    ],
    ids=str,
)
def test_the_state_of_a_checkpoint_is_checked(tmp_path: Path, state: object) -> None:
    from memagent.rl.trainer import _num_lines, _progress_of
    from memagent.rl.weights.checkpoint import FORMAT, STATE, read_state

    (tmp_path / STATE).write_text(json.dumps({"format": FORMAT, "state": state}))
    with pytest.raises(RunError, match=re.escape(str(tmp_path))):
        _progress_of(read_state(tmp_path), tmp_path)
    with pytest.raises(RunError, match=re.escape(str(tmp_path))):
        _num_lines(tmp_path)


def test_a_run_that_is_refused_keeps_its_steps(tmp_path: Path) -> None:
    unfinished(tmp_path)
    steps = (tmp_path / "steps.jsonl").read_bytes()
    (tmp_path / REPLIES).write_text("{}\n{}\n")
    with pytest.raises(RunError, match=r"line 1, is damaged"):
        asked(tmp_path)
    assert (tmp_path / "steps.jsonl").read_bytes() == steps
