"""Worker processes that are killed at random moments: no hang, no process and no lock that stays, and the same results.

What travels between a command and its workers is megabytes here, so that many kills arrive while it does.
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.eval.records import read_items
from tests.integration.conftest import Cli, finish, num_lines, story, wait_until
from tests.support.processes import kill, marked
from tests.support.sizes import sized

IS_FORKED = True
NUM_KILLS = sized(2, 20)
NUM_ITEMS = 8
DIED = "a worker process died, perhaps because memory ran out; free some, or use fewer processes"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds workers in /proc"
)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "long.jsonl"
    text = story(20_000, seed=3) * 200
    examples = [
        Example(
            id=f"e{number}",
            task="codes",
            question="What of the harbour, the lantern and the winter?",
            answers=("17",),
            grader="lenient",
            documents=(Passage(text=f"{number}. {text}"),),
        )
        for number in range(NUM_ITEMS)
    ]
    write_examples(path, examples)
    return path


def asked(dataset: Path, run: Path, *, method: str = "direct") -> list[str | Path]:
    return [
        *("eval", "--file", dataset, "--engine", "scripted", "--method", method),
        *(
            "--set",
            "tokenizer=bytes",
            "--set",
            "window=4096",
            "--set",
            "chunk_tokens=400",
            "--processes",
            "2",
        ),
        *("--set", "memory_tokens=400", "--set", "answer_tokens=100", "--run-dir", run),
    ]


def built(out: Path) -> list[str | Path]:
    return [
        *("data", "build", "ruler/niah_single_1", "--tokens", "1000000", "--num", "6"),
        *("--tokenizer", "bytes", "--store", "text", "--no-figure", "--processes", "2"),
        *("--out", out),
    ]


def command_of(process_id: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    return b""


def workers_of(cli: Cli) -> list[int]:
    """The worker processes of commands that have not ended."""
    found = marked(f"XDG_STATE_HOME={cli.state}")
    return [one for one in found if b"spawn_main" in command_of(one)]


def with_kills(
    cli: Cli, command: Sequence[str | Path], going_on: Sequence[str | Path], rng: random.Random
) -> int:
    """Run a command to its end while two of its workers are killed, which may be twice at the same work.

    The number of workers that were killed: a command may end before the moment comes.
    """
    with cli.started(*command) as process:
        wait_until(lambda: workers_of(cli) or process.poll() is not None)
        num_killed = 0
        for _ in range(2):
            time.sleep(rng.uniform(0, 1.0))
            for worker in workers_of(cli)[:1]:
                kill(worker)
                num_killed += 1
        done = finish(process)
    assert not workers_of(cli)
    assert "Traceback" not in done.stderr
    if done.code != 0:
        assert DIED in done.stderr
        assert cli(*going_on).code == 0
    return num_killed


def test_workers_killed_at_random_moments_change_no_evaluation(
    cli: Cli, dataset: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    num_killed = 0
    for number in range(NUM_KILLS):
        run = tmp_path / f"run{number}"
        num_killed += with_kills(cli, asked(dataset, run), ("eval", "--resume", run), rng)
        assert sorted(one.key.index for one in read_items(run)) == list(range(NUM_ITEMS))
        assert {one.status for one in read_items(run)} == {"ok"}
    assert num_killed


def test_workers_killed_at_random_moments_change_no_dataset(cli: Cli, tmp_path: Path) -> None:
    rng = random.Random(2)
    straight = tmp_path / "straight.jsonl"
    assert cli.as_users_start_it(*built(straight)).code == 0
    num_killed = 0
    for number in range(NUM_KILLS):
        out = tmp_path / f"built{number}.jsonl"
        num_killed += with_kills(cli, built(out), built(out), rng)
        assert out.read_bytes() == straight.read_bytes()
        assert not list(tmp_path.glob(f".*{out.name}*"))
        out.unlink()
    assert num_killed


def test_workers_that_are_always_killed_end_a_build_with_one_line(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "built.jsonl"
    with cli.started(*built(out)) as process:
        while process.poll() is None:
            for worker in workers_of(cli):
                kill(worker)
        done = finish(process)
    assert done.code == 2
    assert done.said[-1] == f"memagent: {DIED}; build again to resume"
    assert "Traceback" not in done.stderr
    assert cli(*built(out)).code == 0


WAITING = """
import asyncio, pathlib
from memagent.eval.methods import METHODS
async def waiting(example, context):
    pathlib.Path({began!r}).touch()
    while not pathlib.Path({released!r}).exists():
        await asyncio.sleep(0.01)
    return await METHODS["direct"](example, context)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_hang_do_not_keep_an_evaluation_from_ending(
    cli: Cli, dataset: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run, began, released = (tmp_path / name for name in ("run", "began", "released"))
    method = tmp_path / "method.py"
    method.write_text(WAITING.format(began=str(began), released=str(released)))
    command = asked(dataset, run, method=f"{method}:waiting")
    with cli.started(*command, "--concurrency", "1") as process:
        wait_until(lambda: began.exists() or process.poll() is not None)
        stopped = workers_of(cli)
        for worker in stopped:
            os.kill(worker, signal.SIGSTOP)
        released.touch()
        wait_until(lambda: num_lines(run / "steps.jsonl") or process.poll() is not None)
        done = finish(process, number=number)
    assert len(stopped) == 2, done.stderr
    assert not workers_of(cli)
    assert done.code == 130
    assert done.said[-2:] == [
        "memagent: interrupted",
        f"all answers are kept; resume with: memagent eval --resume {run}",
    ]
    resumed = cli("eval", "--resume", run, "--processes", "0")
    assert resumed.code == 0, resumed.stderr
