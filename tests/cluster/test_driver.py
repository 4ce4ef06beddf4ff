"""`memagent train --cluster auto`: a cluster that is started for the run, and a driver that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memagent.tracking import read_metrics
from tests.support.cluster_runs import assert_same_training
from tests.support.tiny_training import tiny_config

START = "from memagent.cli.main import main; main()"
CLUSTER = ("--cluster", "auto", "--set", "cluster.trainer_ranks=2")
END_SECONDS = 150.0
"""Ray's own agent waits a minute for its head node before it ends."""

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", START, "train", *map(str, arguments)]


def processes_of(mark: str) -> list[int]:
    """Processes whose environment has a mark: what a command starts inherits it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in found if pid != os.getpid()]


def assert_nothing_is_left(mark: str) -> None:
    end = time.monotonic() + END_SECONDS
    while left := processes_of(mark):
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.5)


def test_a_killed_driver_leaves_nothing_running_and_its_run_resumes_on_the_cluster(
    tmp_path: Path,
) -> None:
    (tmp_path / "files").mkdir()
    config = tiny_config(tmp_path / "files", checkpoint={"every": 1, "keep": 2})
    alone, run = tmp_path / "alone", tmp_path / "run"
    done = subprocess.run(command(config, "--run-dir", alone), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mark = f"MEMAGENT_TEST_MARK={tmp_path.name}-{os.getpid()}"
    environment = {**os.environ, **dict([mark.split("=")])}
    first = command(config, "--run-dir", run, *CLUSTER)
    process = subprocess.Popen(first, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        while not (run / "checkpoints" / "step-000001").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        assert len(processes_of(mark)) > 5, "Ray's own, the ranks, the driver"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert_nothing_is_left(mark)
    assert len(read_metrics(run)) < len(read_metrics(alone))
    resumed = subprocess.run(
        command("--resume", run), env=environment, capture_output=True, text=True, timeout=600
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "2 ranks on CPUs" in resumed.stderr
    assert_same_training(run, alone)
    assert_nothing_is_left(mark)


def test_an_interrupted_run_saves_its_steps_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = tiny_config(tmp_path / "files", steps=50)
    run = tmp_path / "run"
    mark = f"MEMAGENT_TEST_MARK={tmp_path.name}-{os.getpid()}"
    environment = {**os.environ, **dict([mark.split("=")])}
    process = subprocess.Popen(
        command(config, "--run-dir", run, *CLUSTER),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (run / "samples" / "step-000001.jsonl").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert f"resume with: memagent train --resume {run}" in stderr
    assert any((run / "checkpoints").glob("step-*"))
    assert_nothing_is_left(mark)


def test_a_dry_run_reserves_all_places_and_starts_one_of_each(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = tiny_config(tmp_path / "files")
    sizes = ("--set", "cluster.trainer_ranks=24", "--set", "cluster.engine_replicas=24")
    done = subprocess.run(
        command(config, "--dry-run", "--cluster", "auto", *sizes),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "on 1 rank on CPUs" in done.stderr
    assert "room for 24 trainer ranks and 24 engine replicas; one of each" in done.stderr
