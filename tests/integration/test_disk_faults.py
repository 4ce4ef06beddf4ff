"""Each file operation of a command fails, and the power goes after each: nothing that was reported is lost.

The commands run on a disk of `tests/support/disk.py`. First every operation fails once, then it and all that
follow: the command says so in one line or is not harmed, and resumed on a healthy disk it ends as if nothing
had happened. Then the disk is put into every state in which the power may leave it.
"""

import errno
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memagent.agent.trace import Trace
from memagent.data.formats.files import write_examples
from memagent.rl.weights.checkpoint import list_checkpoints
from memagent.run_files import read_lines
from memagent.tracking import comparable, read_metrics
from tests.integration.conftest import QUESTION, SMALL_SECTIONS, Cli, Outcome, story
from tests.integration.test_eval import make_example, records_of
from tests.integration.test_kill_resume import without_clock
from tests.support.disk import (
    FOR_EVER,
    IS_SUPPORTED,
    Contents,
    Disk,
    Fault,
    Kind,
    Operation,
    Outage,
    contents_after,
    states_without_power,
)
from tests.support.loopback import running
from tests.support.sizes import IS_LARGE, sized
from tests.support.tiny_models import make_tiny_model
from tests.support.tiny_training import tiny_config

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="it takes Linux and a C compiler")


class Case(NamedTuple):
    """A command, and what it leaves when it has finished."""

    begin: tuple[str, ...]
    resume: tuple[str, ...]
    mark: str
    """The file that is there where there is something to resume."""
    result: Callable[[Path], Any]
    num_at_once: int = 1
    """Calls at once, in flight or with replies that are being written, which may be lost."""
    program: str = "memagent"
    every: int = 1
    """Where it takes long, each so-manyth operation is tried, in `make test-hostile` only."""


def traces(disk: Path) -> Any:
    """Steps of parallel calls are in the order in which calls ended, and name each other by it."""
    return [in_reading_order(without_clock(trace)) for trace in Trace.load(disk / "run")]


def in_reading_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def place(step: dict[str, Any]) -> tuple[bool, int, str]:
        return (step["section"] is None, (step["section"] or {"start": 0})["start"], step["reply"])

    ordered = sorted(steps, key=place)
    numbers = {step["index"]: number for number, step in enumerate(ordered)}
    for step in ordered:
        step["index"] = numbers[step["index"]]
        step["inputs"] = [numbers[index] for index in step.get("inputs", ())]
    return ordered


def dataset(disk: Path) -> Any:
    found = (path for path in disk.glob("out.*") if path.suffix != ".part")
    return {path.name: path.read_bytes() for path in found}


def checkpoints(disk: Path) -> Any:
    """The two newest; one more is there if it could not be removed."""
    newest = list_checkpoints(disk / "run")[-2:]
    files = {
        str(path.relative_to(disk)): path.read_bytes()
        for one in newest
        for path in one.rglob("*.*")
    }
    return files, [comparable(line) for line in read_metrics(disk / "run")]


def trained(disk: Path) -> Any:
    weights = (disk / "run" / "final" / "model.safetensors").read_bytes()
    return weights, [comparable(line) for line in read_metrics(disk / "run")]


def gateway(disk: Path) -> Any:
    readings = [Trace.load(reading) for reading in (disk / "gateway" / "readings").iterdir()]
    files = sorted(path.read_bytes() for path in (disk / "gateway" / "files").iterdir())
    return [[without_clock(trace) for trace in reading] for reading in readings], files


RUN = ("--run-dir", "{disk}/run")
URL = ("--base-url", "{url}")
ASK = ("ask", "{book}", "-q", QUESTION, *SMALL_SECTIONS, *URL, *RUN)
ASKED = (("ask", "--resume", "{disk}/run"), "run/run.json", traces)
BUILD = ("data", "build", "small/colours", "--num", "3", "--seed", "7", "--processes", "1")
PROGRAMS = ("-m", "tests.support.disk_programs")
CASES = {
    "in order": Case(ASK, *ASKED),
    "parallel": Case((*ASK, "--mode", "parallel", "--set", "concurrency=2"), *ASKED, num_at_once=2),
    "evidence": Case((*ASK, "--evidence"), *ASKED),
    "eval": Case(
        ("eval", "--file", "{codes}", *URL, *SMALL_SECTIONS, *RUN, "--set", "concurrency=1"),
        ("eval", "--resume", "{disk}/run"),
        "run/run.json",
        lambda disk: records_of(disk / "run"),
        num_at_once=2,
    ),
    "build": Case(
        (*BUILD, "--out", "{disk}/out.jsonl"),
        (*BUILD, "--out", "{disk}/out.jsonl", "--force"),
        "out.jsonl",
        dataset,
    ),
    "build gz": Case(
        (*BUILD, "--out", "{disk}/out.jsonl.gz", "--no-figure"),
        (*BUILD, "--out", "{disk}/out.jsonl.gz", "--no-figure", "--force"),
        "out.jsonl.gz",
        dataset,
    ),
    "filter": Case(
        (
            "data",
            "filter",
            "{codes}",
            "--out",
            "{disk}/out.jsonl",
            *URL,
            "--set",
            "concurrency=1",
            *RUN,
        ),
        ("data", "filter", "--out", "{disk}/out.jsonl", "--resume", "{disk}/run", "--force"),
        "run/run.json",
        dataset,
        num_at_once=2,
    ),
    "checkpoints": Case(
        (*PROGRAMS, "checkpoints", "{model}", "{disk}/run"),
        (*PROGRAMS, "checkpoints", "{model}", "{disk}/run"),
        "run",
        checkpoints,
        num_at_once=0,
        program="python",
    ),
    "gateway": Case(
        (*PROGRAMS, "gateway", "{disk}/gateway"),
        (*PROGRAMS, "gateway", "{disk}/gateway"),
        "gateway",
        gateway,
        program="python",
    ),
    "train": Case(
        ("train", "{config}", *RUN),
        ("train", "--resume", "{disk}/run"),
        "run/run.json",
        trained,
        every=7,
    ),
}
SHORT_TRAINING: dict[str, Any] = {
    "steps": 2,
    "warm_start": {"steps": 2, "batch": 2},
    "rollout": {"prompts": 2, "group_size": 2, "driver": "lockstep"},
    "update": {"updates": 1, "max_tokens": 1024},
    "checkpoint": {"every": 1, "keep": 1},
    "validation": {"every": 2, "num": 2, "tasks": [{"tasks": ["small/colours"]}]},
    "logging": {"trackers": [], "rollouts": 1},
}


class Bench(NamedTuple):
    """A command on its disk."""

    case: Case
    disk: Disk
    cli: Cli
    names: dict[str, str]
    whole: Any
    """What it leaves on a disk without faults."""
    kinds: list[Kind]
    """What it does there."""

    def clear(self) -> Contents:
        """An empty disk, and what is on it."""
        self.disk.clear()
        self.cli.state.mkdir()
        return Contents.of(self.disk.root)

    def begin(self, fault: Fault | None = None) -> Outcome:
        return self._call(self.case.begin, fault)

    def resume(self) -> Outcome:
        """As a user would: what left nothing behind is begun again, and advice is followed."""
        has_begun = (self.disk.root / self.case.mark).exists()
        command = self.case.resume if has_begun else self.case.begin
        outcome = self._call(command)
        while advice := re.search(
            r"not named on this machine; .* give it again: `?([^`\n]+)", outcome.stderr
        ):
            again = shlex.split(advice[1])
            if again[0] == "memagent":
                command = (*again[1:], *command[len(self.case.resume) :])
            else:
                command = (*command, *again)
            outcome = self._call(command)
        return outcome

    def result(self) -> Any:
        return self.case.result(self.disk.root)

    def num_calls(self, operations: Sequence[Operation]) -> int:
        """How many calls have left; of the programs, how many lines were printed but the answer."""
        if self.case.program == "python":
            lines = [one.data for one in operations if one.kind is Kind.SAID and one.offset == 1]
            return sum(b"answer" not in line for line in lines)
        sent = [one.data for one in operations if one.kind is Kind.SENT]
        return sum(data.startswith(b"POST /v1/chat") for data in sent)

    def _call(self, arguments: Sequence[str], fault: Fault | None = None) -> Outcome:
        environment = {**self.disk.environment(fault), "XDG_CACHE_HOME": self.names["cache"]}
        return self.cli(*(one.format(**self.names) for one in arguments), env=environment)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Files outside the disk, and an endpoint."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "book.txt").write_text(story(900, seed=3))
    write_examples(folder / "codes.jsonl", [make_example(number) for number in range(2)])
    make_tiny_model(folder / "model", "llama")
    config = tiny_config(folder, **SHORT_TRAINING)
    with running(reply="echo") as endpoint:
        files = {"book": "book.txt", "codes": "codes.jsonl", "model": "model", "cache": "cache"}
        names = {name: str(folder / file) for name, file in files.items()}
        yield {**names, "config": str(config), "url": endpoint.base_url}


@pytest.fixture(
    scope="module", params=[name for name in CASES if IS_LARGE or CASES[name].every == 1]
)
def bench(
    request: pytest.FixtureRequest,
    programs: Path,
    shared: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    disk, case = Disk(tmp_path_factory.mktemp("bench")), CASES[request.param]
    cli = Cli(disk.root / "state", programs / case.program)
    bench = Bench(case, disk, cli, {**shared, "disk": str(disk.root)}, None, [])
    bench.clear()
    outcome = bench.begin()
    assert outcome.code == 0, outcome.stderr
    return bench._replace(whole=bench.result(), kinds=disk.kinds)


# --- operations that fail -------------------------------------------------------------------------

MODES = {
    "full once": Fault(0, errno.ENOSPC),
    "broken for two": Fault(0, errno.EIO, 2),
    "full from then on": Fault(0, errno.ENOSPC, FOR_EVER),
}


def faults(bench: Bench) -> Iterator[tuple[str, Fault]]:
    """Each operation in each mode; in short tests every other kind of operation once, in one mode."""
    last = {kind: number for number, kind in enumerate(bench.kinds)}
    first = list(CASES.values()).index(bench.case) % 2
    every = range(0, len(bench.kinds), bench.case.every)
    for place, number in enumerate(every if IS_LARGE else last.values()):
        for at, (mode, fault) in enumerate(MODES.items()):
            if IS_LARGE or (at == place // 2 and place % 2 == first):
                name = f"{number} {bench.kinds[number].name} {mode}"
                yield name, fault._replace(first=number)


def test_an_operation_that_fails_is_one_line_and_the_rest_is_done_later(bench: Bench) -> None:
    tried, problems = set(), []
    for name, fault in faults(bench):
        bench.clear()
        outcome = bench.begin(fault)
        tried.add(bench.kinds[fault.first])
        if problem := harm(bench, outcome) or harm_later(bench):
            problems.append(f"{name}: {problem}\n{outcome.stderr}")
    assert len(tried) >= 2
    assert not problems, "\n".join(problems)


def harm(bench: Bench, outcome: Outcome) -> str | None:
    """What is wrong with how a command ended on a faulty disk."""
    if "Traceback" in outcome.stderr:
        return "a traceback"
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("memagent: ")]
    if outcome.code == 0 and not errors:
        return None if said_no(outcome) or bench.result() == bench.whole else "another result"
    if (outcome.code, len(errors)) not in ((1, 1), (2, 1)):
        return f"code {outcome.code} with {len(errors)} lines"
    return None


def said_no(outcome: Outcome) -> bool:
    """Whether the gateway answered a request with an error."""
    return '"error": ' in outcome.stdout


def harm_later(bench: Bench) -> str | None:
    """What is wrong with how the command ends when the disk is repaired."""
    outcome = bench.resume()
    if outcome.code != 0:
        return f"later: code {outcome.code}, {outcome.stderr}"
    return None if bench.result() == bench.whole else "later: another result"


APPENDING = """
from pathlib import Path
from memagent.run_files import LineFile
with LineFile(Path({path!r})) as lines:
    for number in range(4):
        try:
            lines.append(b'{{"number": %d}}' % number)
            print(number)
        except OSError:
            pass
"""


def test_no_line_follows_half_a_line(programs: Path, tmp_path: Path) -> None:
    """The disk is full in the middle of a line, and the half cannot be removed at once."""
    disk = Disk(tmp_path)
    path, cli = disk.root / "lines.jsonl", Cli(tmp_path, programs / "python")
    for number in range(3, 10):
        disk.clear()
        fault = Fault(number, errno.ENOSPC, 2)
        program = APPENDING.format(path=str(path))
        outcome = cli("-c", program, env=disk.environment(fault))
        assert outcome.code == 0, outcome.stderr
        kept = [line.record["number"] for line in read_lines(path)]
        said = [int(word) for word in outcome.stdout.split()]
        assert said in (kept, kept[:-1]), "at most the last line is there although it failed"
        assert len(said) == 3


# --- power that goes ------------------------------------------------------------------------------

NUM_OUTAGES = sized(5, 250)


def test_what_was_acknowledged_is_there_after_a_power_cut(bench: Bench) -> None:
    before = bench.clear()
    assert bench.begin().code == 0
    operations = bench.disk.operations()
    assert contents_after(operations, before) == Contents.of(bench.disk.root)
    num_calls = bench.num_calls(operations)

    def acknowledged(done: Sequence[Operation]) -> int:
        """How many calls are not to be made again; one more: all is there."""
        if is_reported(bench, done):
            return num_calls + 1
        num_kept = bench.num_calls(done) - bench.case.num_at_once
        return max(0, num_kept)

    outages = states_without_power(operations, before, acknowledged)
    assert len(outages) > 30
    step = max(1, bench.case.every * len(outages) // NUM_OUTAGES)
    problems = []
    for number, outage in enumerate(outages[::step]):
        outage.contents.restore(bench.disk.root)
        if problem := loss(bench, outage, num_calls):
            sizes = {name: len(data) for name, data in outage.contents.files.items()}
            problems.append(f"{number * step}: {problem}; {sizes}")
    assert not problems, "\n".join(problems)


def is_reported(bench: Bench, done: Sequence[Operation]) -> bool:
    """Whether the result was printed."""
    said = [one for one in done if one.kind is Kind.SAID]
    printed = b"".join(one.data for one in said if one.offset == 1)
    if bench.case.program == "memagent":
        return printed.strip() != b"" or any(one.data.startswith(b"trained: ") for one in said)
    return b"step 3" in printed or b"answer" in printed


def loss(bench: Bench, outage: Outage, num_calls: int) -> str | None:
    """What is wrong with what a power cut left."""
    if outage.acknowledged > num_calls and bench.result() != bench.whole:
        return "what was reported is not there"
    if problem := harm_later(bench):
        return problem
    num_again = bench.num_calls(bench.disk.operations())
    if num_again > num_calls - min(outage.acknowledged, num_calls):
        return f"{num_again} of {num_calls} calls again, {outage.acknowledged} were acknowledged"
    return None
