"""The script that trains the reader: which runs it starts, with which time and data."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "train_1_5b.sh"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$@" END >> "$CALLS"
while [ "$1" != --run-dir ]; do shift; done
mkdir -p "$2/final"
exit "$CODE"
"""


class Script:
    """The script with a stand-in for memagent that notes its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        command = folder / "bin" / "memagent"
        command.parent.mkdir()
        command.write_text(STAND_IN)
        command.chmod(0o755)
        (folder / "data").mkdir()
        for name in ("dev_7k", "dev_28k"):
            (folder / "data" / f"{name}.jsonl").touch()

    def run(self, *arguments: object, code: int = 0, **variables: str) -> int:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "CALLS": str(self._calls), "CODE": str(code), **variables}
        command = [str(SCRIPT), *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True)
        return done.returncode

    @property
    def calls(self) -> list[list[str]]:
        if not self._calls.exists():
            return []
        calls = self._calls.read_text().split("END\n")[:-1]
        return [call.splitlines() for call in calls]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def after(call: list[str], option: str) -> str:
    return call[call.index(option) + 1]


def test_the_warm_start_is_followed_by_reinforcement_learning_on_its_adapter(
    script: Script,
) -> None:
    assert script.run("some-model", "data", "results", 1200, 480) == 0
    warm, rl = script.calls
    data = script.folder / "data"
    assert Path(warm[1]).name == "warm_start.toml"
    assert after(warm, "--model") == after(rl, "--model") == "some-model"
    assert after(warm, "--max-minutes") == "8.00"
    names = ("long", "short", "answers", "tasks")
    lessons = "[" + ",".join(f'"{data}/lessons_{name}.jsonl"' for name in names) + "]"
    assert f"warm_start.files={lessons}" in warm
    assert Path(rl[1]).name == "rl.toml"
    assert 17.0 < float(after(rl, "--max-minutes")) <= 17.5
    assert f'model.adapter="{script.folder}/results/warm/final"' in rl
    for number, name in enumerate(("short", "plain", "natural", "titled", "longer")):
        assert f'tasks.{number}.files=["{data}/train_{name}.jsonl"]' in rl
    held_out = [f'{{files=["{data}/dev_{name}.jsonl"]}}' for name in ("7k", "28k")]
    assert f"validation.tasks=[{','.join(held_out)}]" in rl


def test_ruler_is_validated_on_where_its_file_is(script: Script) -> None:
    (script.folder / "data" / "dev_ruler_8k.jsonl").touch()
    assert script.run("some-model", "data", "results", 1200, 480) == 0
    given = next(one for one in script.calls[1] if one.startswith("validation.tasks="))
    assert given.count("files=") == 3
    assert given.endswith('/dev_ruler_8k.jsonl"]}]')


def test_an_adapter_replaces_the_warm_start(script: Script) -> None:
    (script.folder / "mine").mkdir()
    options = {"ADAPTER": "mine", "RL_OPTIONS": "--set seed=2", "TAIL_SECONDS": "0"}
    assert script.run("some-model", "data", "results", 600, **options) == 0
    (rl,) = script.calls
    assert f'model.adapter="{script.folder}/mine"' in rl
    assert "seed=2" in rl
    assert 9.5 < float(after(rl, "--max-minutes")) <= 10.0


def test_a_failing_warm_start_or_no_time_ends_the_script(script: Script) -> None:
    assert script.run("some-model", "data", "results", 1200, code=3) == 3
    assert len(script.calls) == 1
    assert script.run("some-model", "data", "short", 200, 60) == 0
    assert len(script.calls) == 2, "the warm start alone"
    assert script.run("some-model", "data") == 2
    assert len(script.calls) == 2
