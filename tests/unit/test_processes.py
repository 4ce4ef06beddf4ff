"""Worker processes: prepared once, deaf to Ctrl-C, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memagent.processes import end_workers, worker_pool
from tests.support.timing import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
from memagent.processes import worker_pool
from tests.unit.test_processes import own_id, pause
if __name__ == "__main__":
    pool = worker_pool(2)
    ids = {future.result() for future in [pool.submit(own_id) for _ in range(2)]}
    pool.submit(pause)
    print(*ids, flush=True)
    time.sleep(60)
"""

_prepared: list[str] = []


def prepare(word: str) -> None:
    _prepared.append(word)


def prepared() -> list[str]:
    return _prepared


def own_id() -> int:
    return os.getpid()


def pause() -> None:
    time.sleep(60)


def interrupt_oneself() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_workers_are_prepared_once_and_ignore_interrupts() -> None:
    with worker_pool(1, initializer=prepare, initargs=("ready",)) as pool:
        assert pool.submit(prepared).result() == ["ready"]
        assert pool.submit(interrupt_oneself).result() == "still here"
        assert pool.submit(prepared).result() == ["ready"]
        assert pool.submit(own_id).result() != os.getpid()


def test_workers_that_hang_are_ended_at_once() -> None:
    pool = worker_pool(1)
    process_id = pool.submit(own_id).result()
    pool.submit(pause)
    started = time.monotonic()
    end_workers(pool)
    assert time.monotonic() - started < 30
    assert not is_running(process_id)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")
def test_workers_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        workers = [int(word) for word in program.stdout.readline().split()]
        program.kill()
    assert workers
    wait_until(lambda: not any(is_running(worker) for worker in workers))
