"""Worker processes: prepared once, deaf to Ctrl-C, and never left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from memagent.errors import DataError
from memagent.processes import ProcessPool, WorkerDied
from tests.support.processes import is_running
from tests.support.sizes import sized
from tests.support.timing import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_BYTES = 30_000_000
PROGRAM = """
import sys, time
from memagent.processes import ProcessPool
from tests.unit.test_processes import own_id, pause
if __name__ == "__main__":
    pool = ProcessPool(2)
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


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def large_result(mark: Path, seconds: float) -> bytes:
    """From a process that is killed around the time at which it sends the result, if it is the first one."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return bytes(NUM_BYTES)
    threading.Timer(seconds, kill_oneself).start()
    return bytes(NUM_BYTES)


def unsendable() -> object:
    return threading.Lock()


def failing(number: int) -> None:
    raise DataError(f"number {number}")


def test_workers_are_prepared_once_and_ignore_interrupts() -> None:
    with ProcessPool(1, initializer=prepare, initargs=("ready",)) as pool:
        assert pool.submit(prepared).result() == ["ready"]
        assert pool.submit(interrupt_oneself).result() == "still here"
        assert pool.submit(prepared).result() == ["ready"]
        assert pool.submit(own_id).result() != os.getpid()


def test_workers_that_hang_are_ended_at_once() -> None:
    pool = ProcessPool(1)
    process_id = pool.submit(own_id).result()
    pool.submit(pause)
    started = time.monotonic()
    pool.shutdown(cancel_futures=True)
    assert time.monotonic() - started < 30
    assert not is_running(process_id)


def test_a_worker_that_is_killed_while_it_sends_is_replaced(tmp_path: Path) -> None:
    rng = random.Random(5)
    with ProcessPool(2) as pool:
        results = [
            pool.submit(large_result, tmp_path / str(number), rng.uniform(0, 0.05))
            for number in range(sized(2, 40))
        ]
        assert {len(one.result()) for one in results} == {NUM_BYTES}


def test_a_function_that_kills_each_worker_fails_alone() -> None:
    with ProcessPool(2) as pool:
        bad = pool.submit(kill_oneself)
        good = [pool.submit(abs, -number) for number in range(4)]
        with pytest.raises(
            WorkerDied, match="a worker process died, perhaps because memory ran out"
        ):
            bad.result()
        assert [one.result() for one in good] == [0, 1, 2, 3]


def test_errors_of_workers_arrive_with_their_traceback() -> None:
    with ProcessPool(1) as pool:
        failed = pool.submit(failing, 7).exception()
        with pytest.raises(TypeError, match="not sent from a worker: cannot pickle"):
            pool.submit(unsendable).result()
    assert isinstance(failed, DataError)
    assert str(failed) == "number 7"
    assert 'raise DataError(f"number {number}")' in str(failed.__cause__)
    with ProcessPool(1, initializer=failing, initargs=(8,)) as pool:
        assert str(pool.submit(own_id).exception()) == "number 8"


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
