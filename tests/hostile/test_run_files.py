"""Run directories of strangers whose files are links, pipes, devices or folders: nothing outside is read or changed.

Each command that opens runs meets each kind of file in each place. It ends with one line, or as if the file were
not there, and never waits; a list of runs still shows the others.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.reader import Reader
from memagent.cli.main import run
from memagent.engines.base import open_engine
from memagent.errors import RunError
from memagent.rl.resume import remember_named, stored_values
from memagent.rl.settings import parse_config
from memagent.runs import Run, remove_run, stored_runs
from memagent.serve.mcp import DocumentDesk
from memagent.viewer.library import Library
from tests.hostile.damaged_runs import RunKind, make_runs
from tests.hostile.harness import time_limit
from tests.hostile.test_damaged_views import look_at_everything
from tests.support.gateways import MODEL, SMALL, asking, novel, serving_gateway
from tests.support.tiny_training import tiny_config, tiny_run

SECRET = '{"step": 7, "kind": "SECRET"}'
"""The only line of a file of the user, without an end: a journal whose last line is torn, to whoever follows a link."""
Plant = Callable[[Path, Path], None]
"""Puts something in the place of a file of a run; the second path is a folder of the user."""


def _to_a_file(path: Path, user: Path) -> None:
    path.symlink_to(user / "secret")


def _to_nothing(path: Path, user: Path) -> None:
    path.symlink_to(user / "new")


def _to_a_folder(path: Path, user: Path) -> None:
    path.symlink_to(user)


def _to_a_device(path: Path, user: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path, user: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, user: Path) -> None:
    path.mkdir()


def _hard_link(path: Path, user: Path) -> None:
    path.hardlink_to(user / "secret")


PLANTS: dict[str, Plant] = {
    plant.__name__.lstrip("_"): plant
    for plant in (_to_a_file, _to_nothing, _to_a_folder, _to_a_device, _pipe, _folder, _hard_link)
}


class Case:
    """A copy of a run, and the folder of a user beside it."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.original = original
        self.run = folder / "runs" / "theirs"
        self.user = folder / "user"
        shutil.copytree(original, self.run)
        self.user.mkdir()
        (self.user / "secret").write_text(SECRET)
        (self.user / ".config").mkdir()

    def plant(self, name: str, kind: str) -> None:
        path = self.run / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        PLANTS[kind](path, self.user)

    def command(self, *words: str) -> int:
        """Run a command on the copy, within the limits of time."""
        with time_limit():
            return run([word.replace(str(self.original), str(self.run)) for word in words])

    def check_user(self, output: str = "") -> None:
        """Nothing of the user was changed or shown."""
        assert sorted(path.name for path in self.user.iterdir()) == [".config", "secret"]
        assert (self.user / "secret").read_text() == SECRET
        assert "SECRET" not in output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunKind]]:
    """A run of each kind that stopped on its way."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("made")
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        names = ("ask", "eval", "report", "data filter")
        kinds = dict(zip(names, make_runs(folder / "all"), strict=True))
        trained = folder / "train"
        resume = ("train", "--resume", str(trained), "--quiet")
        make_begun_training(trained, folder)
        yield {**kinds, "train": RunKind(trained, resume, "")}


def make_begun_training(run_dir: Path, folder: Path) -> None:
    """A training run as far as files are concerned: it is refused before a model is loaded."""
    config = parse_config(tiny_run(folder, steps=1, warm_start=None, validation=None))
    remember_named(config)
    with Run.create(run_dir, {"kind": "train", "config": stored_values(config)}):
        (run_dir / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "reward": 0.5}\n')
        checkpoint = run_dir / "checkpoints" / "step-000001"
        (checkpoint / "model").mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        (checkpoint / "model" / "model.safetensors").touch()
        (run_dir / "samples").mkdir()


@pytest.fixture
def case(
    made: dict[str, RunKind],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    folder = made[request.param].folder
    # what it names was named here before: it is not refused for that
    monkeypatch.setenv("XDG_STATE_HOME", str(made["train"].folder.with_name("state")))
    return Case(folder, tmp_path)


def _is_harmless(name: str, plant: str) -> bool:
    """What stands for nothing, and is replaced or not used."""
    if plant == "folder":
        return name in ("checkpoints", "rollouts", "samples", "sync", "scratch_model", "final")
    return (name, plant) in {
        ("replies.jsonl", "to_nothing"),
        ("replies.jsonl", "hard_link"),
        ("checkpoints", "hard_link"),
        ("sync", "hard_link"),
        ("scratch_model", "hard_link"),
        ("final", "hard_link"),
    }


def _resumed() -> list[tuple[str, str, str]]:
    """The kind of run, the file of it, and what is in its place."""
    files = {
        "ask": ("run.json", "steps.jsonl", "replies.jsonl", ".lock"),
        "eval": ("run.json", "steps.jsonl", "replies.jsonl", ".lock"),
        "data filter": ("run.json", "steps.jsonl", ".lock"),
        "train": (
            "run.json", "metrics.jsonl", ".lock", "checkpoints", "checkpoints/step-000001",
            "checkpoints/step-000001/state.json", "checkpoints/step-000001/model/model.safetensors",
            "rollouts", "samples", "scratch_model", "start.safetensors", "sync", "final",
        ),
    }  # fmt: skip
    return [
        (kind, name, plant)
        for kind, names in files.items()
        for name in names
        for plant in PLANTS
        if kind != "train" or not _is_harmless(name, plant)
    ]


@pytest.mark.parametrize(("case", "name", "plant"), _resumed(), indirect=["case"])
def test_nothing_outside_of_a_run_that_is_resumed_is_opened(
    made: dict[str, RunKind],
    case: Case,
    name: str,
    plant: str,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    case.plant(name, plant)
    [kind] = [kind for kind in made.values() if kind.folder == case.original]
    capsys.readouterr()
    exit_code = case.command(*kind.resume)
    shown = capsys.readouterr()
    case.check_user(shown.out)
    if not _is_harmless(name, plant):
        assert exit_code == 2, shown.err
        first, *rest = shown.err.splitlines()
        assert first.startswith("memagent: ")
        assert str(case.run) in first
        assert all("resume with: memagent" in line for line in rest), shown.err


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_run_kept_of_standard_input_is_no_other_file(
    made: dict[str, RunKind], tmp_path: Path, plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(made["ask"].folder, tmp_path)
    manifest = json.loads((case.run / "run.json").read_text())
    manifest["command"]["paths"] = ["-"]
    (case.run / "run.json").write_text(json.dumps(manifest))
    case.plant("stdin", plant)
    assert case.command(*made["ask"].resume) == 2
    shown = capsys.readouterr().err
    # a file with two names is read, and is not the text of the run
    assert (str(case.run) if plant == "hard_link" else f"{case.run / 'stdin'} is a link") in shown
    assert len(shown.splitlines()) == 1
    case.check_user(shown)


def _looked_at() -> list[tuple[str, str, str]]:
    names = {
        "ask": ("run.json", "steps.jsonl", ".lock", "replies.jsonl"),
        "report": ("run.json", "steps.jsonl", "grades", "grades/f1.jsonl"),
        "train": ("run.json", "metrics.jsonl", "samples", "samples/step-000001.jsonl"),
    }
    return [(kind, name, plant) for kind in names for name in names[kind] for plant in PLANTS]


@pytest.mark.parametrize(("case", "name", "plant"), _looked_at(), indirect=["case"])
def test_a_list_shows_the_other_runs_and_nothing_else_is_read(
    made: dict[str, RunKind], case: Case, name: str, plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = case.run.with_name("other")
    shutil.copytree(made["ask"].folder, other)
    (case.run / name).parent.mkdir(exist_ok=True)
    case.plant(name, plant)
    with time_limit():
        assert "other" in [listed.run.name for listed in Library([case.run.parent]).runs()]
        # a file with two names is read: the user made one of them
        secret = "SECRET" if plant != "hard_link" else "\0"
        assert look_at_everything(case.run.parent, secret=secret) == []
    assert case.command("runs", "list", str(case.run.parent)) == 0
    assert "other" in capsys.readouterr().out
    for words in (("runs", "show", str(case.run)), ("report", str(case.run))):
        assert case.command(*words) in (0, 2)
    shown = capsys.readouterr()
    case.check_user(shown.out)


async def test_a_reading_over_mcp_is_not_continued_into_other_files(tmp_path: Path) -> None:
    for name in ("run.json", "steps.jsonl", "text", ".lock"):
        for plant in PLANTS:
            if (name, plant) == ("text", "hard_link"):  # it is only read
                continue
            folder = tmp_path / f"{name}-{plant}"
            reader = Reader(open_engine("scripted"), **SMALL)
            desk = DocumentDesk(reader, [], runs=folder / "made")
            found = await desk.ask(f"The code is 48213. {'Rain fell. ' * 200}", "What is the code?")
            case = Case(folder / "made" / found.reading, folder)
            case.plant(name, plant)
            with time_limit(), pytest.raises(RunError) as refused:
                await DocumentDesk(reader, [], runs=case.run.parent).continue_reading()
            case.check_user(str(refused.value))


def test_a_reading_of_the_gateway_with_other_files_in_it_is_begun_again(tmp_path: Path) -> None:
    places = [(name, plant) for name in ("run.json", "steps.jsonl", ".lock") for plant in PLANTS]
    texts = [novel(60 + number) for number in range(len(places))]
    readings = tmp_path / "state" / "readings"

    def answers() -> Iterator[str]:
        with serving_gateway(tmp_path / "state") as gateway:
            for text in texts:
                made = gateway.client().chat.completions.create(model=MODEL, messages=asking(text))
                yield made.choices[0].message.content or ""

    cases = []
    for answer, (name, plant) in zip(answers(), places, strict=True):
        assert "Anna" in answer
        [reading] = {*readings.iterdir()} - {case.original for case in cases}
        cases.append(Case(reading, tmp_path / f"{name}-{plant}"))
        shutil.rmtree(reading)
        cases[-1].plant(name, plant)
        cases[-1].run.rename(reading)
    for answer, case in zip(answers(), cases, strict=True):
        assert "Anna" in answer
        case.check_user(answer)


@pytest.mark.parametrize("name", ["checkpoints", "sync", "scratch_model", "tensorboard"])
def test_a_training_run_is_not_begun_in_a_folder_with_links(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    case = Case(tmp_path / "new", tmp_path)
    case.plant(name, "to_a_folder")
    config = tiny_config(tmp_path, steps=1, warm_start=None, validation=None)
    assert case.command("train", str(config), "--run-dir", str(case.run), "--quiet") == 2
    assert f"{case.run / name} is a link" in capsys.readouterr().err
    assert [path.name for path in case.run.iterdir()] == [name]
    case.check_user()


def test_a_lock_that_is_no_file_keeps_a_run_from_being_deleted(
    made: dict[str, RunKind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    case = Case(made["ask"].folder, tmp_path / "memagent")
    case.plant(".lock", "to_a_file")
    with pytest.raises(RunError, match=r"\.lock is a link"):
        remove_run(case.run)
    case.check_user()


@pytest.mark.parametrize(
    ("name", "num_bytes", "words"),
    [
        ("run.json", 33 << 20, "more than 33,554,432 bytes"),
        ("steps.jsonl", 1 << 40, "a line of more than 268,435,456 bytes"),
    ],
)
def test_a_file_of_any_size_takes_little_memory(
    made: dict[str, RunKind],
    tmp_path: Path,
    name: str,
    num_bytes: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case(made["report"].folder, tmp_path)
    os.truncate(case.run / name, 0)
    os.truncate(case.run / name, num_bytes)
    assert case.command(*made["report"].resume) == 2
    assert words in capsys.readouterr().err
    with time_limit():
        assert [found.state for found in stored_runs(case.run.parent)] == ["damaged"]


class Opened:
    """What this process opens by a path beneath some folder, apart from new files and the lock."""

    def __init__(self) -> None:
        self.beneath: Path | None = None
        self.paths: set[str] = set()
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.beneath is None or not isinstance(arguments[0], str | Path):
            return
        path = str(arguments[0])
        is_new = path.endswith((".part", "/.lock"))
        if path.startswith(f"{self.beneath}/") and not is_new and not os.path.isdir(path):
            self.paths.add(path)


def test_commands_open_files_of_a_run_relative_to_its_folder_only(
    made: dict[str, RunKind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door opens `steps.jsonl` in a folder that it holds; any other way names the whole path."""
    monkeypatch.setenv("XDG_STATE_HOME", str(made["train"].folder.with_name("state")))
    opened = Opened()
    for name in ("ask", "eval", "report", "data filter"):
        case = Case(made[name].folder, tmp_path / name)
        opened.beneath = case.run
        assert case.command(*made[name].resume) == 0
        if name == "ask":
            again = str(case.run.with_name("again"))
            limits = ("--max-calls", "99", "--quiet")
            assert (
                case.command("ask", "--continue", str(case.run), "--run-dir", again, *limits) == 0
            )
        if name == "report":
            assert case.command("eval", "regrade", str(case.run), "--grader", "f1") == 0
            assert case.command("report", str(case.run)) == 0
        assert case.command("runs", "show", str(case.run)) == 0
        assert look_at_everything(case.run.parent) == []
        opened.beneath = None
        assert {path.name for path in case.run.iterdir()} >= {"run.json", "steps.jsonl"}
    assert opened.paths == set()
