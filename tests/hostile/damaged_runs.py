"""Damaged run directories: readings, evaluations and screenings with a few changes each, then resumed.

    python -m tests.hostile.damaged_runs --count 1000 --seed 0

exits with 1 if one of them gives a traceback, takes more than 10 seconds, or ends well with another
answer although a line of its journal, which has checksums, was changed.
"""

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memagent.cli.main import run
from tests.hostile.harness import own_folders, time_limit
from tests.hostile.json_damage import damaged_bytes, damaged_json

QUESTION = 'What is the code of "amber-17"?'
READING = ("--engine", "scripted", "--tokenizer", "bytes", "--set", "window=4096", "--quiet")
SIZES = ("--set", "chunk_tokens=400", "--set", "memory_tokens=400", "--set", "answer_tokens=200")


class Finished(NamedTuple):
    """How a command ended."""

    exit_code: int
    output: str


class RunKind(NamedTuple):
    """A run that can be resumed, and with which command."""

    folder: Path
    resume: tuple[str, ...]
    output: str
    """Of the command when nothing is damaged."""


def command(*arguments: str) -> Finished:
    """Run `memagent` in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        exit_code = run(list(arguments))
    return Finished(exit_code, out.getvalue())


def make_runs(folder: Path) -> list[RunKind]:
    """Runs that stopped on their way, one of each kind, all with the scripted engine."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "note.txt"
    note.write_text('The code of "amber-17" is 48213. ' + "Nothing else was said. " * 120)
    asked = folder / "ask"
    ask = ("ask", str(note), "-q", QUESTION, *READING, *SIZES, "--run-dir", str(asked))
    assert command(*ask, "--max-calls", "4").exit_code == 4
    suite = ("eval", "--task", "ruler/niah_single_1", "--lengths", "600", "--num", "3")
    method = ("--method", "reader", "--engine", "scripted", "--set", "tokenizer=bytes", "--quiet")
    agent = {"window": 4096, "chunk_tokens": 400, "memory_tokens": 400, "answer_tokens": 200}
    settings = [word for name in agent for word in ("--set", f"agent.{name}={agent[name]}")]
    evaluated, whole = folder / "eval", folder / "whole"
    for path, max_calls in ((evaluated, 6), (whole, 99)):
        limit = ("--run-dir", str(path), "--max-calls", str(max_calls))
        assert command(*suite, *method, *settings, *limit).exit_code in (0, 4)
    data, kept = folder / "data.jsonl", folder / "kept.jsonl"
    build = ("data", "build", "ruler/niah_single_1", "--tokens", "600", "--num", "3", "--quiet")
    build = (*build, "--out", str(data), "--tokenizer", "bytes", "--processes", "1")
    assert command(*build).exit_code == 0
    screened = folder / "filter"
    screen = ("data", "filter", str(data), "--out", str(kept), "--engine", "scripted", "--quiet")
    assert command(*screen, "--run-dir", str(screened)).exit_code == 0
    return [
        _kind(asked, ("ask", "--resume", str(asked), "--max-calls", "99", "--quiet")),
        _kind(evaluated, ("eval", "--resume", str(evaluated), "--max-calls", "99", "--quiet")),
        _kind(whole, ("report", str(whole))),
        _kind(
            screened, (*screen[:2], *screen[3:5], "--force", "--quiet", "--resume", str(screened))
        ),
    ]


def _kind(folder: Path, resume: tuple[str, ...]) -> RunKind:
    with _copied(folder):
        done = command(*resume)
    return RunKind(folder, resume, done.output)


@contextlib.contextmanager
def _copied(folder: Path) -> Iterator[None]:
    """Whatever is done to a folder is undone."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        copy.rename(folder)


def damage(folder: Path, rng: random.Random, *, has_checksums: bool) -> Path:
    """Change one file of a run; which one. Without checksums, its lines are as of earlier versions."""
    names = [
        name for name in ("run.json", "steps.jsonl", "replies.jsonl") if (folder / name).exists()
    ]
    path = folder / rng.choice(names)
    if path.name == "run.json":
        path.write_bytes(damaged_json(path.read_text(), rng))
        return path
    if not has_checksums:
        path.write_bytes(re.sub(rb',"crc":"[0-9a-f]{8}"\}\n', b"}\n", path.read_bytes()))
    lines = path.read_bytes().splitlines(keepends=True)
    place = rng.randrange(len(lines)) if lines else 0
    kind = rng.randrange(4)
    if not lines or kind == 0:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))
    elif kind == 1:
        lines[place] = damaged_json(lines[place].decode(), rng) + b"\n"
        path.write_bytes(b"".join(lines))
    elif kind == 2:
        lines[place] = lines[place].replace(*rng.choice(((b"1", b"2"), (b"0", b"9"), (b"e", b"a"))))
        path.write_bytes(b"".join(lines))
    else:
        path.write_bytes(b"".join(rng.choice((lines[::-1], lines[1:], lines + lines, lines[:-1]))))
    return path


def complaint(kind: RunKind, rng: random.Random) -> str | None:
    """What is wrong with how a damaged run is resumed; None if nothing is."""
    with _copied(kind.folder):
        has_checksums = rng.random() < 0.5
        changed = damage(kind.folder, rng, has_checksums=has_checksums)
        before = os.environ.get("COLUMNS")
        try:
            with time_limit():
                done = command(*kind.resume)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            return (
                f"{changed.name}: {type(error).__name__} at {last.filename}:{last.lineno}: {error}"
            )
        finally:
            assert os.environ.get("COLUMNS") == before
        is_same = done.output == kind.output
        is_checked = has_checksums and changed.name in ("steps.jsonl", "replies.jsonl")
        if kind.resume[0] == "ask" and is_checked and done.exit_code == 0:
            return None if is_same else f"{changed.name}: another answer: {done.output[:200]!r}"
    return None


def attack(kinds: list[RunKind], count: int, seed: int) -> list[str]:
    """What is wrong with `count` damaged runs."""
    wrong = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = rng.choice(kinds)
        if reason := complaint(kind, rng):
            wrong.append(f"seed {seed}, number {number}, {kind.resume[0]}: {reason}")
    return wrong


def main() -> int:
    """The exit code: 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own_folders(folder)
        wrong = attack(make_runs(Path(folder) / "runs"), options.count, options.seed)
    print(f"{options.count} damaged runs, {len(wrong)} complaints", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
