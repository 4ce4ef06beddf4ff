"""`memagent train` as a user calls it: a run, its errors, a custom agent, kills at random moments.

The run that the others are compared with, bit for bit, starts with all its imports; the others are forked from a
process that has them.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memagent.rl.settings import read_config
from memagent.rl.trainer import open_training
from memagent.runs import read_manifest
from memagent.tracking import comparable, read_metrics
from tests.integration.conftest import on_a_small_disk
from tests.support.sizes import sized
from tests.support.tiny_training import tiny_config

AGENT = '''
"""Asks twice and takes the longer reply."""
from memagent.rl.types import Outcome


async def agent(task, client):
    messages = [{"role": "user", "content": task.question}]
    replies = []
    for _ in range(2):
        completion = await client.chat.completions.create(messages=messages, max_tokens=12)
        replies.append(completion.choices[0].message.content)
    return Outcome(answer=max(replies, key=len), metrics={"replies": len(replies)})
'''
START = "from memagent.cli.main import main; main()"
NUM_KILLS, NUM_STEPS = sized(3, 8), sized(3, 12)


def call(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_config(tmp_path_factory.mktemp("config"), steps=NUM_STEPS)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = call(sys.executable, "-c", START, "train", config, "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in done.stderr
    assert f"validation after step {NUM_STEPS}: reward" in done.stderr
    return folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [comparable(record) for record in read_metrics(folder)]


def weights_of(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def test_python_trains_as_the_command_line_does(config: Path, whole: Path, tmp_path: Path) -> None:
    async def train(run_dir: Path) -> Path:
        async with open_training(read_config(config), run_dir) as trainer:
            return await trainer.train()

    folder = tmp_path / "run"
    assert asyncio.run(train(folder)) == folder / "final"
    assert metrics_of(folder) == metrics_of(whole)
    assert weights_of(folder) == weights_of(whole)
    assert read_manifest(folder)["config"] == read_manifest(whole)["config"]
    names = [{path.name for path in run.iterdir()} for run in (folder, whole)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_has_the_metrics_of_one_that_was_not(
    memagent: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    draw = random.Random(7)
    arguments: tuple[str | Path, ...] = ("train", config, "--run-dir", folder)
    num_killed = 0
    for _ in range(60):
        process = subprocess.Popen(
            [memagent, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        lines = len(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
        if num_killed < NUM_KILLS:
            deadline = time.monotonic() + 120  # until it makes progress, and then a moment
            while process.poll() is None and time.monotonic() < deadline:
                if (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) != lines:
                    break
                time.sleep(0.02)
            time.sleep(draw.uniform(0.0, 1.0))
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        num_killed += 1
        arguments = ("train", "--resume", folder)
    assert process.returncode == 0
    assert num_killed >= sized(2, NUM_KILLS), "it was over before it could be killed"
    assert metrics_of(folder) == metrics_of(whole)
    assert weights_of(folder) == weights_of(whole)


def test_a_full_disk_stops_the_run_and_it_resumes_when_there_is_room(
    memagent: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    full = call(*on_a_small_disk(200), memagent, "train", config, "--run-dir", folder)
    assert full.returncode == 2, full.stderr
    assert "cannot write" in full.stderr
    assert "File too large" in full.stderr
    assert "Traceback" not in full.stderr
    done = call(memagent, "train", "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder) == metrics_of(whole)
    assert weights_of(folder) == weights_of(whole)


def test_a_disk_without_room_for_the_model_is_reported_in_one_line(
    memagent: Path, config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    full = call(*on_a_small_disk(100), memagent, "train", config, "--run-dir", folder)
    assert full.returncode == 2, full.stderr
    assert f"memagent: cannot write {folder}" in full.stderr
    assert "Traceback" not in full.stderr
    assert not folder.exists()


def test_an_interrupted_run_prints_how_to_resume(
    memagent: Path, config: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [memagent, "train", config, "--run-dir", folder], stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"memagent train --resume {folder}" in errors
    assert "Traceback" not in errors
    done = call(memagent, "train", "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder) == metrics_of(whole)


def test_an_agent_and_a_reward_of_the_user_are_trained(
    memagent: Path, config: Path, tmp_path: Path
) -> None:
    agent = tmp_path / "twice.py"
    agent.write_text(AGENT)
    reward = tmp_path / "reward.py"
    reward.write_text("def score(task, outcome):\n    return len(outcome.answer) % 3 / 2\n")
    done = call(
        memagent, "train", config, "--run-dir", tmp_path / "run", "--agent", f"{agent}:agent",
        "--reward", f"{reward}:score", "--set", "agent.settings={}", "--set", "steps=1",
        "--set", "warm_start.steps=1", "--set", "rollout.driver=free",
        "--set", f"warm_start.files=[{conversations(tmp_path)!r}]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    step = next(one for one in read_metrics(tmp_path / "run") if one["kind"] == "train")
    assert step["agent/replies"] == 2
    assert step["num_failed"] == 0


def conversations(folder: Path) -> str:
    path = folder / "shown.jsonl"
    messages = [
        {"role": "user", "content": "What colour is the coin?"},
        {"role": "assistant", "content": "red"},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return str(path)


def test_a_dry_run_opens_everything_and_leaves_nothing(
    memagent: Path, config: Path, tmp_path: Path
) -> None:
    done = call(memagent, "train", config, "--dry-run", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"{NUM_STEPS} steps of 3 x 4 rollouts" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_resumed_run_changes_nothing(memagent: Path, whole: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = (path for path in whole.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    before = files()
    done = call(
        memagent, "train", "--resume", whole, "--set", f"steps={NUM_STEPS + 2}", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    assert f"resumes after step {NUM_STEPS} of {NUM_STEPS + 2}" in done.stderr
    assert "nothing was trained" in done.stderr
    assert files() == before


def test_a_dry_run_draws_a_task_of_every_source_and_builds_lessons(
    memagent: Path, config: Path
) -> None:
    short = "[{tasks=['small/colours'], weight=1e6}, {tasks=['ruler/vt'], tokens=[64]}]"
    done = call(memagent, "train", config, "--dry-run", "--set", f"tasks={short}")
    assert done.returncode == 2, done.stderr
    assert "ruler/vt" in done.stderr
    other = "warm_start.tasks=[{tasks=['arithmetic']}]"
    done = call(memagent, "train", config, "--dry-run", "--set", other)
    assert done.returncode == 2, done.stderr
    assert "warm start" in done.stderr


def test_the_warm_start_alone_and_its_export(memagent: Path, config: Path, tmp_path: Path) -> None:
    done = call(memagent, "train", "sft", config, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    kinds = {record["kind"] for record in read_metrics(tmp_path / "run")}
    assert kinds == {"warm_start", "validation"}
    done = call(memagent, "train", "export", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rollout.group_size=1"], "use at least 2"),
        (["--set", "rolout.prompts=1"], "rolout"),
        (["--set", "update.updates=9"], "9 optimizer steps (update.updates)"),
        (["--agent", "nowhere.py:agent"], "nowhere.py"),
        (["--reward", "nowhere.py:score"], "nowhere.py"),
        (["--set", "tasks.0.files=['a.jsonl']"], "either tasks or files"),
        (["--resume", "nowhere"], "not both"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_run(
    memagent: Path, config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = call(memagent, "train", config, "--run-dir", tmp_path / "run", *arguments)
    assert done.returncode == 2, done.stderr
    *notices, error = done.stderr.splitlines()
    assert error.startswith("memagent: ")
    assert message in error
    assert notices in ([], ["loading the libraries of training"])
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_change_are_refused_on_resume(memagent: Path, whole: Path) -> None:
    done = call(memagent, "train", "--resume", whole, "--set", "optim.lr=1.0")
    assert done.returncode == 2
    assert "optim.lr cannot change" in done.stderr
    done = call(memagent, "train", "--resume", whole.parent)
    assert done.returncode != 0
    assert "holds no run" in done.stderr
