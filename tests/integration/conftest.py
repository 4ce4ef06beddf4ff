"""The command in its own process, and texts that contain a fact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from memagent.cli.main import run
from tests.support.timing import IF_SLOW, wait_until  # noqa: F401 - tests take wait_until from here

MEMAGENT = Path(sys.executable).parent / "memagent"
QUESTION = 'What is the code of "amber-17"?'
FACT = 'The code of "amber-17" is 48213.'
CODE = "48213"
SMALL_SECTIONS = tuple(
    part
    for name, value in {
        "tokenizer": "bytes",
        "window": 4096,
        "chunk_tokens": 400,
        "memory_tokens": 400,
        "answer_tokens": 200,
    }.items()
    for part in ("--set", f"{name}={value}")
)
"""Sections of at most 400 bytes: what a prompt holds can be counted by hand."""

WORDS = (
    *("harbour", "lantern", "winter", "ledger", "orchard", "captain", "letter", "market", "silver"),
    *("bridge", "garden", "evening", "window", "journey", "village", "morning", "paper", "river"),
)


class Outcome(NamedTuple):
    """How a call of the command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> list[str]:
        """Standard error without the lines that commands print only where a step is slow."""
        return [line for line in self.stderr.splitlines() if not IF_SLOW.match(line)]


class Cli:
    """Calls `memagent` with its own folder of runs and without settings of the environment."""

    def __init__(self, state: Path, program: Path = MEMAGENT) -> None:
        self.state = state
        self.program = program

    @property
    def as_users_start_it(self) -> Cli:
        """With its imports, where calls are forked."""
        return Cli(self.state)

    @property
    def runs(self) -> list[Path]:
        """Runs that were kept in the state folder."""
        return sorted(self.state.glob("memagent/runs/*"))

    def __call__(
        self,
        *arguments: str | Path,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Outcome:
        done = subprocess.run(
            [self.program, *arguments],
            input=stdin,
            capture_output=True,
            timeout=120,
            env=self.environment(env),
            cwd=cwd or self.state,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    @contextmanager
    def started(
        self, *arguments: str | Path, via: Sequence[str] = (), stdin: int | IO[bytes] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The command while it runs; killed at the end if it still does.

        `via` is a command that becomes ours.
        """
        process = subprocess.Popen(
            [*via, self.program, *arguments],
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(),
            cwd=self.state,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MEMAGENT_", "OPENAI_", "PYTHON"))
            and name not in ("URL", "API_KEY")
        }
        own = {"XDG_STATE_HOME": str(self.state), "HF_HUB_OFFLINE": "1"}
        return {**inherited, **own, **(extra or {})}


@pytest.fixture(scope="session")
def memagent(programs: Path) -> Path:
    """The command, forked from a process that has its imports."""
    return programs / "memagent"


@pytest.fixture
def cli(tmp_path: Path, request: pytest.FixtureRequest) -> Cli:
    """Calls are forked from a process with their imports in modules that say `IS_FORKED = True`."""
    state = tmp_path / "state"
    state.mkdir()
    if getattr(request.module, "IS_FORKED", False):
        return Cli(state, request.getfixturevalue("memagent"))
    return Cli(state)


@pytest.fixture
def here(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """The command inside this process, for many cases that end soon: no second to start each."""

    def call(
        *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Outcome:
        environment = cli.environment(env)
        for name in os.environ.keys() - environment.keys():
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(cwd or cli.state)
        code = run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return call


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text of five sections (with SMALL_SECTIONS) that states FACT once."""
    path = tmp_path / "book.txt"
    path.write_text(story(1800, seed=4, fact=FACT))
    return path


def story(num_chars: int, *, seed: int, fact: str | None = None) -> str:
    """Sentences about nothing, of so many characters or a few more; `fact` somewhere among them."""
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence) + 1 for sentence in sentences) < num_chars:
        words = " ".join(rng.choices(WORDS, k=rng.randint(6, 12)))
        sentences.append(f"The {words} {rng.randint(1, 99)}.")
    if fact is not None:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return " ".join(sentences) + "\n"


def on_a_small_disk(num_kilobytes: int) -> tuple[str, ...]:
    """A command that runs another one, none of whose files can become larger."""
    # Python would leave its own cached files cut off
    limit = f'ulimit -f {num_kilobytes}; export PYTHONDONTWRITEBYTECODE=1; exec "$@"'
    return ("bash", "-c", limit, "limited")


def num_lines(path: Path) -> int:
    """Whole lines in a file; 0 while it does not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def finish(process: subprocess.Popen[bytes], *, number: signal.Signals | None = None) -> Outcome:
    """Wait for a process to end, after a signal if one is given."""
    if number is not None:
        process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    return Outcome(process.returncode, stdout.decode(), stderr.decode())
