"""Two ranks, two replicas and a pool on two nodes: a node and the driver are killed in the middle of rollouts.

After each: the right number of steps, no rollout trained on twice, none lost without being counted.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memagent.rl.trainer import Trainer
from memagent.rl.weights.checkpoint import latest_checkpoint, read_state
from memagent.tracking import read_metrics
from tests.support.cluster_runs import assert_same_training, train
from tests.support.ray_nodes import add_node, running_nodes
from tests.support.tiny_training import OFFLOADED, tiny_config, tiny_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

START = "from memagent.cli.main import main; main()"
PROMPTS, GROUP_SIZE = 3, 4
RANKS_AND_REPLICAS = {"trainer_ranks": 2, "engine_replicas": 2, "wait_seconds": 240}
AHEAD: dict[str, Any] = {
    "steps": 6,
    "warm_start": None,
    "validation": None,
    "rollout": {"prompts": PROMPTS, "group_size": GROUP_SIZE, "asynchronous": True},
    "objective": {"max_staleness": 2},
}
"""Rollouts that go on during updates."""


def settings(folder: Path, address: str, **changes: Any) -> dict[str, Any]:
    """The tiny run with its reward in the pool, and all of its rollouts kept."""
    folder.mkdir(exist_ok=True)
    cluster = {**RANKS_AND_REPLICAS, "address": address}
    config = tiny_run(folder, cluster=cluster, checkpoint={"every": 1, "keep": 2}, **changes)
    (folder / "offloaded.py").write_text(OFFLOADED)
    config["agent"]["reward"] = f"{folder / 'offloaded.py'}:score"
    config["logging"]["rollouts"] = 1000
    return config


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(settings(folder / "files", "none"), folder / "run")
    return folder / "run"


@contextmanager
def two_nodes(head_cpus: int, other_cpus: int) -> Iterator[Any]:
    """A head node, and one that can be killed."""
    with running_nodes(1, num_cpus=head_cpus) as nodes:
        add_node(nodes, num_cpus=other_cpus)
        yield nodes


class KillNode:
    """Kills the second node while rollouts of step 2 are sampled; another one comes later."""

    def __init__(self, nodes: Any, *, num_cpus: int, back_after: float) -> None:
        self._nodes = nodes
        self._num_cpus = num_cpus
        self._back_after = back_after
        self.is_done = False

    def __call__(self, trainer: Trainer, step: int) -> None:
        if not self.is_done:
            self.is_done = True
            asyncio.get_running_loop().call_later(0.2, self._kill)

    def _kill(self) -> None:
        self._nodes.remove_node(next(iter(self._nodes.worker_nodes)), allow_graceful=False)
        come_back = partial(add_node, self._nodes, num_cpus=self._num_cpus)
        asyncio.get_running_loop().call_later(self._back_after, come_back)


def rollouts_of(run: Path) -> dict[str, list[tuple[str, int, float]]]:
    """Task, number and reward of the rollouts of each step."""
    return {
        path.name: [
            (record["task_id"], record["index"], record["reward"])
            for record in map(json.loads, path.read_bytes().splitlines())
        ]
        for path in sorted((run / "samples").iterdir())
    }


def assert_accounted(run: Path, *, steps: int) -> None:
    """Every rollout was trained on once, or is counted as dropped, unwanted or outstanding."""
    records = [one for one in read_metrics(run) if one["kind"] == "train"]
    assert [one["step"] for one in records] == list(range(1, steps + 1))
    taken = Counter(
        (task, index) for rollouts in rollouts_of(run).values() for task, index, _ in rollouts
    )
    assert set(taken.values()) == {1}, "no rollout is in two steps"
    tasks = Counter(task for task, _ in taken)
    assert set(tasks.values()) == {GROUP_SIZE}
    assert len(tasks) == steps * PROMPTS
    assert sum(one["num_failed"] for one in records) == 0
    newest = latest_checkpoint(run)
    assert newest is not None
    progress = read_state(newest)["progress"]
    num_dropped = sum(one["num_dropped"] + one["num_unwanted"] for one in records)
    assert progress["position"] == len(tasks) + num_dropped + len(progress["pending"])


@pytest.mark.parametrize(
    ("head_cpus", "other_cpus"), [(1, 3), (3, 1)], ids=["ranks-and-replica", "replica"]
)
def test_a_node_that_is_killed_changes_nothing_but_the_notes(
    head_cpus: int, other_cpus: int, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with two_nodes(head_cpus, other_cpus) as nodes:
        kill = KillNode(nodes, num_cpus=other_cpus, back_after=5.0)
        watch = train(settings(tmp_path / "files", nodes.address), run, kill)
    assert kill.is_done
    assert_same_training(run, alone)
    assert rollouts_of(run) == rollouts_of(alone)
    died = [note for note in watch.notes if " died" in note or "has ended" in note]
    assert any(note.startswith("engine replica") for note in died)
    assert any("trainer ranks" in note for note in died) == (other_cpus == 3)


def test_no_rollout_is_lost_with_a_node_while_replicas_run_ahead(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with two_nodes(1, 3) as nodes:
        kill = KillNode(nodes, num_cpus=3, back_after=5.0)
        train(settings(tmp_path / "files", nodes.address, **AHEAD), run, kill)
    assert kill.is_done
    assert_accounted(run, steps=6)
    assert max(one["staleness_max"] for one in read_metrics(run)) <= 2


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in-turn", "ahead"])
def test_a_driver_that_is_killed_resumes_on_the_cluster_it_left(
    *, is_ahead: bool, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with two_nodes(2, 2) as nodes:
        changes = AHEAD if is_ahead else {}
        values = settings(tmp_path / "files", nodes.address, **changes)
        config = tiny_config(tmp_path / "files", **values)
        first = subprocess.Popen(command(config, "--run-dir", run), stderr=subprocess.PIPE)
        try:
            until_sampling(run, first)
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        num_done = len(read_metrics(run))
        resumed = subprocess.run(
            command("--resume", run), capture_output=True, text=True, timeout=600
        )
    assert resumed.returncode == 0, resumed.stderr
    if is_ahead:
        assert num_done < 6
        assert_accounted(run, steps=6)
    else:
        assert num_done < len(read_metrics(alone))
        assert_same_training(run, alone)
        assert rollouts_of(run) == rollouts_of(alone)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", START, "train", *map(str, arguments)]


def until_sampling(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a step is in a checkpoint and rollouts of a later one are on the disk."""
    end = time.monotonic() + 300
    while not (
        (run / "checkpoints" / "step-000001").exists()
        and any(os.path.getsize(path) for path in (run / "rollouts").glob("step-*.jsonl"))
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
