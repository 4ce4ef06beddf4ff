"""Count what a question, an evaluation item, a request and a training step walk through.

    python tools/walk.py             all walks: functions of the package entered, their files, the deepest chain
    python tools/walk.py ask         one walk
    python tools/walk.py ask --list  its functions as well, with the number of times each was entered

Each walk is made twice and counted the second time, when modules are loaded and caches are warm. Comprehensions,
lambdas and class bodies are not counted as functions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import memagent

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.support

PACKAGE = str(Path(memagent.__file__).parent) + "/"
TEXT = "\n\n".join(f"Line {n} tells of rain and wind over the old harbour." for n in range(120))
"""Three sections of 512 tokens."""
SUITE = """
tasks = [{ tasks = ["small/colours"], settings = { sentences = 60 } }]
num = 1
agent = { window = 2048, chunk_tokens = 512, memory_tokens = 96 }
"""
READING = ("--window", "2048", "--chunk-tokens", "512", "--set", "memory_tokens=96")


class Walk(NamedTuple):
    num_functions: int
    num_files: int
    depth: int
    """Frames of the package on the stack at once; frames of libraries between them do not count."""


class Steps:
    """Functions of the package that are entered while it counts, in all threads."""

    def __init__(self) -> None:
        self.entered: Counter[CodeType] = Counter()
        self.depth = 0
        self._is_counting = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def clear(self) -> None:
        self.entered.clear()
        self.depth = 0

    def start(self) -> None:
        self._is_counting = True

    def stop(self) -> None:
        self._is_counting = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all threads that start within the block, and this one."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self._is_counting or not _is_function(code):
            return
        self.entered[code] += 1
        self.depth = max(self.depth, _depth(frame))

    def walk(self) -> Walk:
        files = {code.co_filename for code in self.entered}
        return Walk(len(self.entered), len(files), self.depth)

    def listed(self) -> str:
        rows = sorted(
            (code.co_filename.removeprefix(PACKAGE), code.co_qualname, count)
            for code, count in self.entered.items()
        )
        return "\n".join(f"{count:5} {file}: {name}" for file, name, count in rows)


def _is_function(code: CodeType) -> bool:
    is_ours = code.co_filename.startswith(PACKAGE)
    return (
        is_ours and not code.co_name.startswith("<") and code.co_flags & 2 != 0
    )  # not a class body


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth += _is_function(frame.f_code)
        frame = frame.f_back
    return depth


# --- the walks ------------------------------------------------------------------------------------


def command(folder: Path, *words: str) -> None:
    """A command of memagent, in this process."""
    from memagent.cli.main import run
    from memagent.cli.shared import progress

    progress.SECONDS_TO_FIRST_LINE = 3600.0  # walks do not depend on how fast this machine is
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        exit_code = run([*words, "--run-dir", str(folder / "run")])
    if exit_code:
        raise RuntimeError(f"memagent {' '.join(words)}: {said.getvalue()}")


def ask(folder: Path, steps: Steps, *options: str) -> None:
    """`memagent ask` over three sections."""
    book = folder / "book.txt"
    book.write_text(TEXT)
    words = ("ask", str(book), "-q", "What of the harbour?", "--engine", "scripted", *READING)
    with steps.counted():
        command(folder, *words, *options)


def ask_with_evidence(folder: Path, steps: Steps) -> None:
    ask(folder, steps, "--evidence")


def ask_parallel(folder: Path, steps: Steps) -> None:
    ask(folder, steps, "--mode", "parallel")


def reader(_: Path, steps: Steps) -> None:
    """`Reader.ask` in Python: nothing on disk."""
    engine = memagent.open_engine("scripted")
    asked = memagent.Reader(engine, window=2048, chunk_tokens=512, memory_tokens=96)
    with steps.counted():
        asked.ask("What of the harbour?", memagent.Document.from_text(TEXT))


def item(folder: Path, steps: Steps) -> None:
    """An evaluation of one item."""
    suite = folder / "one.toml"
    suite.write_text(SUITE)
    with steps.counted():
        command(folder, "eval", str(suite), "--engine", "scripted")


def gateway(folder: Path, steps: Steps, *, is_short: bool = False) -> None:
    """A request to the gateway with a text that has grown since the last one."""
    from tests.support.gateways import asking, novel, serving_gateway

    text = novel(150)
    with serving_gateway(folder) as server:
        for grown in ("", "\n\n".join(f"Later {n} it rained again." for n in range(60))):
            with steps.counted() if grown else contextlib.nullcontext():
                messages = asking("Hello." if is_short else text + grown)
                server.client().chat.completions.create(model="memagent", messages=messages)


def gateway_short(folder: Path, steps: Steps) -> None:
    """A request to the gateway that fits the window."""
    gateway(folder, steps, is_short=True)


def train(folder: Path, steps: Steps) -> None:
    """One training step: a tiny model, two tasks with four rollouts each."""
    from memagent.rl.settings import read_config
    from memagent.rl.trainer import TrainingCallbacks, open_training
    from tests.support.tiny_training import tiny_config

    class Second(TrainingCallbacks):
        def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
            steps.stop()
            if step == 1:
                steps.start()

    rollout = {"prompts": 2, "group_size": 4, "driver": "lockstep"}
    changes: dict[str, Any] = {"steps": 2, "rollout": rollout, "objective": {}, "update": {}}
    changes |= {"warm_start": None, "validation": None, "checkpoint": {"every": 100}}
    config = read_config(tiny_config(folder, **changes))

    async def run() -> None:
        async with open_training(config, folder / "run", callbacks=Second()) as trainer:
            await trainer.train()

    asyncio.run(run())
    steps.stop()


WALKS: dict[str, Callable[[Path, Steps], None]] = {
    "ask": ask,
    "ask-evidence": ask_with_evidence,
    "ask-parallel": ask_parallel,
    "reader": reader,
    "item": item,
    "gateway": gateway,
    "gateway-short": gateway_short,
    "train": train,
}


def take(name: str) -> Steps:
    """The second of two equal walks."""
    steps = Steps()
    for _ in range(2):
        steps.clear()
        with tempfile.TemporaryDirectory() as folder, steps.installed():
            WALKS[name](Path(folder), steps)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], help="default: all")
    parser.add_argument("--list", action="store_true", help="list the functions of each walk")
    options = parser.parse_args()
    print(f"{'walk':14} {'functions':>9} {'files':>6} {'depth':>6}")
    for name in options.walks or WALKS:
        steps = take(name)
        walk = steps.walk()
        print(f"{name:14} {walk.num_functions:9} {walk.num_files:6} {walk.depth:6}")
        if options.list:
            print(steps.listed())


if __name__ == "__main__":
    main()
