"""Run directories of strangers: what they name is used only when the user names it too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent.cli.main import run
from memagent.config import with_override
from memagent.rl.resume import remember_named, resumed_config, stored_values
from memagent.rl.settings import parse_config
from memagent.runs import Run
from tests.support.loopback import Endpoint, running
from tests.support.tiny_training import tiny_run

QUESTION = 'What is the code of "amber-17"?'
SMALL = ("--tokenizer", "bytes", "--set", "window=4096", "--set", "chunk_tokens=400")
LIMITS = ("--set", "memory_tokens=400", "--set", "answer_tokens=200", "--quiet")
METHOD = """\
from pathlib import Path

Path(__file__).with_name("was-run").touch()


async def answer(example, context):
    raise ValueError("no answer")
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running(log=tmp_path_factory.mktemp("log") / "calls.jsonl") as endpoint:
        yield endpoint


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_text('The code of "amber-17" is 48213. ' + "Nothing else was said. " * 30)
    return path


def as_user(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home))


def change(run_dir: Path, **settings: Any) -> None:
    """Edit the engine settings in run.json."""
    path = run_dir / "run.json"
    manifest = json.loads(path.read_text())
    manifest["command"]["engine_settings"].update(settings)
    path.write_text(json.dumps(manifest))


def interrupted(note: Path, run_dir: Path, base_url: str) -> None:
    """A run that stopped after one call."""
    command = ["ask", str(note), "-q", QUESTION, *SMALL, *LIMITS, "--base-url", base_url]
    assert run([*command, "--run-dir", str(run_dir), "--max-calls", "1"]) == 4


def test_the_address_in_a_strangers_run_gets_neither_text_nor_key(
    endpoint: Endpoint,
    note: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_user(monkeypatch, tmp_path / "stranger")
    interrupted(note, tmp_path / "run", endpoint.base_url)
    as_user(monkeypatch, tmp_path / "me")
    monkeypatch.setenv("MEMAGENT_API_KEY", "secret")
    num_before = len(endpoint.records())
    capsys.readouterr()

    assert run(["ask", "--resume", str(tmp_path / "run"), "--max-calls", "99"]) == 2
    assert f"give it again: --base-url {endpoint.base_url}" in capsys.readouterr().err
    assert len(endpoint.records()) == num_before

    again = ["ask", str(note), "--resume", str(tmp_path / "run"), "--max-calls", "99", "--quiet"]
    assert run([*again, "--base-url", endpoint.base_url]) == 0
    assert capsys.readouterr().out == "48213\n"


def test_an_address_that_was_changed_in_my_run_is_refused_and_my_own_is_not(
    endpoint: Endpoint,
    note: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_user(monkeypatch, tmp_path / "me")
    interrupted(note, tmp_path / "run", endpoint.base_url)
    resume = ["ask", "--resume", str(tmp_path / "run"), "--max-calls", "99", "--quiet"]
    change(tmp_path / "run", base_url="http://127.0.0.1:9/v1")
    assert run(resume) == 2
    assert "http://127.0.0.1:9/v1, which you have not named" in capsys.readouterr().err
    change(tmp_path / "run", base_url=endpoint.base_url)
    assert run(resume) == 0


def test_an_address_in_the_environment_counts_as_named(
    endpoint: Endpoint, note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch, tmp_path / "stranger")
    interrupted(note, tmp_path / "run", endpoint.base_url)
    as_user(monkeypatch, tmp_path / "me")
    monkeypatch.setenv("MEMAGENT_BASE_URL", endpoint.base_url)
    resume = ["ask", str(note), "--resume", str(tmp_path / "run"), "--max-calls", "99", "--quiet"]
    assert run(resume) == 0


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's evaluation with a method of their own, whose file leaves a mark when it is run."""
    as_user(monkeypatch, tmp_path / "stranger")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "method.py").write_text(METHOD)
    command = ["eval", "--task", "beyond/two_hop", "--lengths", "2k", "--num", "1", "--quiet"]
    command += [
        "--engine",
        "scripted",
        "--set",
        "length_tokenizer=bytes",
        "--set",
        "tokenizer=bytes",
    ]
    command += ["--method", f"{tmp_path}/theirs/method.py:answer", "--processes", "0"]
    assert run([*command, "--run-dir", str(tmp_path / "run")]) == 0
    (tmp_path / "theirs" / "was-run").unlink()
    (tmp_path / "theirs").rename(
        tmp_path / "code"
    )  # a new path: the file was not run yet from there
    manifest = tmp_path / "run" / "run.json"
    manifest.write_text(manifest.read_text().replace("/theirs/", "/code/"))
    as_user(monkeypatch, tmp_path / "me")
    return tmp_path / "run"


def test_code_in_a_strangers_evaluation_is_not_run(
    evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{tmp_path}/code/method.py:answer"
    capsys.readouterr()
    assert run(["eval", "--resume", str(evaluated), "--quiet"]) == 2
    assert f"give it again: --method {spec}" in capsys.readouterr().err
    assert not (tmp_path / "code" / "was-run").exists()

    command = ["eval", "--resume", str(evaluated), "--quiet", "--processes", "0"]
    assert run([*command, "--method", spec]) == 0, capsys.readouterr().err
    assert (tmp_path / "code" / "was-run").exists()


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("vllm:model", {"vllm_python": "/tmp/theirs"}),
        ("vllm:model", {"vllm_args": "--trust-remote-code"}),
        ("openai:model", {"base_url": "http://127.0.0.1:9/v1"}),
    ],
)
@pytest.mark.parametrize("place", ["command", "method"])
def test_programs_and_addresses_in_a_strangers_evaluation_are_refused(
    evaluated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    settings: dict[str, str],
    place: str,
) -> None:
    path = evaluated / "run.json"
    manifest = json.loads(path.read_text())
    stored = manifest["command"]
    method = {"name": "reader", "engine_settings": settings if place == "method" else {}}
    stored.update(engine=engine, engine_settings=settings if place == "command" else {})
    stored["suite"]["methods"] = [method]
    path.write_text(json.dumps(manifest))
    assert run(["eval", "--resume", str(evaluated), "--quiet"]) == 2
    assert "which you have not named on this machine" in " ".join(capsys.readouterr().err.split())


CODE = """\
from pathlib import Path

Path(__file__).with_name("was-run").touch()


async def score(task, outcome):
    return 0.0
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The manifest of a training run whose reward is a file that leaves a mark when it is run."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(CODE)
    config = tiny_run(tmp_path)
    config["agent"]["reward"] = f"{tmp_path}/code/mine.py:score"
    config["rollout"]["driver"] = "free"
    return manifest_of(tmp_path / "run", config)


def manifest_of(folder: Path, config: dict[str, Any]) -> Path:
    with Run.create(folder, {"kind": "train", "config": config}):
        return folder


def test_code_in_a_strangers_training_run_is_not_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, mark = f"{tmp_path}/code/mine.py:score", tmp_path / "code" / "was-run"
    resume = ["train", "--resume", str(trained), "--dry-run"]
    resume += ["--set", f"agent.settings.prompts={tmp_path}/prompts.toml"]
    assert run(resume) == 2
    assert f"give it again: --set agent.reward={spec}" in capsys.readouterr().err
    assert not mark.exists()
    assert run([*resume, "--reward", f"{tmp_path}/code/mine.py:other"]) == 2
    assert "`" not in capsys.readouterr().err
    assert not mark.exists()
    assert run([*resume, "--reward", spec]) == 0, capsys.readouterr().err
    assert mark.exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("validation.graders=['{file}:score']", "give it again: --set validation.graders=["),
        ("agent.name={file}:agent", "give it again: --set agent.name="),
        (
            "rollout.engine_settings.base_url=http://127.0.0.1:9/v1",
            "give it again: --set rollout.engine_settings.base_url=http://127.0.0.1:9/v1",
        ),
        ("rollout.engine_settings.vllm_args=--load-x", "give rollout.engine_settings.vllm_args"),
    ],
)
def test_graders_agents_and_endpoints_of_a_strangers_training_run_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, expected: str
) -> None:
    config = with_override(tiny_run(tmp_path), change.replace("{file}", f"{tmp_path}/code/mine.py"))
    config["agent"]["reward"] = "strict"
    folder = manifest_of(tmp_path / "run", config)
    assert run(["train", "--resume", str(folder), "--dry-run"]) == 2
    assert expected in capsys.readouterr().err


def test_code_of_my_own_training_run_is_run_again(tmp_path: Path) -> None:
    config = parse_config(tiny_run(tmp_path))
    remember_named(config)
    assert resumed_config(config.model_dump(mode="json")) == config


def test_the_key_of_an_endpoint_is_not_kept_with_a_training_run(tmp_path: Path) -> None:
    values = with_override(tiny_run(tmp_path), "rollout.engine_settings.api_key=secret")
    assert "secret" not in json.dumps(stored_values(parse_config(values)))


# --- files that a run names ------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of the user, with a file that no run of theirs has named."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "id_rsa.txt").write_text("SECRET " * 40)
    return tmp_path / "mine"


@pytest.mark.parametrize("how", ["--continue", "--resume"])
def test_a_text_that_a_strangers_reading_names_is_not_sent(
    endpoint: Endpoint,
    note: Path,
    mine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    as_user(monkeypatch, tmp_path / "stranger")
    interrupted(note, tmp_path / "run", endpoint.base_url)
    manifest = tmp_path / "run" / "run.json"
    values = json.loads(manifest.read_text())
    values["command"] |= {"paths": ["id_rsa.txt"], "folder": str(mine)}
    manifest.write_text(json.dumps(values))
    as_user(monkeypatch, tmp_path / "me")
    monkeypatch.setenv("MEMAGENT_BASE_URL", endpoint.base_url)
    num_before = len(endpoint.records())
    capsys.readouterr()
    command = ["ask", how, str(tmp_path / "run"), "--max-calls", "99", "--quiet"]
    assert run(command) == 2
    shown = capsys.readouterr()
    secret = mine / "id_rsa.txt"
    assert f"the text {secret}, which you have not named on this machine" in shown.err
    assert f"give it again: `memagent ask {secret} {how} {tmp_path / 'run'}`" in shown.err
    assert len(endpoint.records()) == num_before
    # named again, it is read; a text that has changed is continued and not resumed
    assert run([*command[:1], str(secret), *command[1:]]) == (0 if how == "--continue" else 2)
    # and it may be named by runs from now on
    assert run(command) == (0 if how == "--continue" else 2)
    assert "not named" not in capsys.readouterr().err


def test_a_strangers_screening_reads_no_file_that_was_not_named(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_user(monkeypatch, tmp_path / "stranger")
    data, out = tmp_path / "data.jsonl", tmp_path / "kept.jsonl"
    build = ["data", "build", "ruler/niah_single_1", "--tokens", "2000", "--num", "2", "--quiet"]
    assert run([*build, "--out", str(data), "--tokenizer", "bytes", "--processes", "1"]) == 0
    screen = ["data", "filter", str(data), "--out", str(out), "--engine", "scripted", "--quiet"]
    assert run([*screen, "--run-dir", str(tmp_path / "run")]) == 0
    theirs = mine / "diary.jsonl"
    theirs.write_text("SECRET")
    manifest = tmp_path / "run" / "run.json"
    kept = manifest.read_text()
    manifest.write_text(kept.replace(str(data), str(theirs)))
    as_user(monkeypatch, tmp_path / "me")
    resume = ["--out", str(out), "--force", "--resume", str(tmp_path / "run"), "--quiet"]
    capsys.readouterr()
    assert run(["data", "filter", *resume]) == 2
    assert f"the file {theirs}, which you have not named" in capsys.readouterr().err
    manifest.write_text(kept)
    assert run(["data", "filter", *resume]) == 2
    assert run(["data", "filter", str(data), *resume]) == 0
    assert run(["data", "filter", *resume]) == 0  # it has been named now


def test_files_of_a_strangers_evaluation_are_read_when_they_are_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_user(monkeypatch, tmp_path / "stranger")
    data = tmp_path / "data.jsonl"
    build = ["data", "build", "ruler/niah_single_1", "--tokens", "2000", "--num", "2", "--quiet"]
    assert run([*build, "--out", str(data), "--tokenizer", "bytes", "--processes", "1"]) == 0
    command = ["eval", "--file", str(data), "--method", "direct", "--set", "tokenizer=bytes"]
    command += ["--engine", "scripted", "--processes", "0", "--quiet"]
    assert run([*command, "--run-dir", str(tmp_path / "run")]) == 0
    resume = ["eval", "--resume", str(tmp_path / "run"), "--quiet", "--processes", "0"]
    assert run(resume) == 0
    as_user(monkeypatch, tmp_path / "me")
    capsys.readouterr()
    assert run(resume) == 2
    assert f"give it again: --set tasks.0.files.0={data}" in capsys.readouterr().err
    assert run([*resume, "--file", str(data)]) == 0
    assert run(resume) == 0  # it has been named now
    as_user(monkeypatch, tmp_path / "other")
    assert run([*resume, "--set", f"tasks.0.files.0={data}"]) == 0


def test_files_of_a_strangers_training_run_are_read_when_they_are_named_again(
    tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "lessons.jsonl").touch()
    config = tiny_run(tmp_path)
    config["agent"] |= {"reward": "strict"}
    config["warm_start"] |= {"files": [str(mine / "lessons.jsonl")]}
    prompts = config["agent"]["settings"]["prompts"]
    folder = manifest_of(tmp_path / "run", config)
    resume = ["train", "--resume", str(folder), "--dry-run"]
    capsys.readouterr()
    named = []
    for setting, path in (
        ("agent.settings.prompts", prompts),
        ("warm_start.files.0", str(mine / "lessons.jsonl")),
    ):
        assert run([*resume, *named]) == 2
        assert f"give it again: --set {setting}={path}" in capsys.readouterr().err
        named += ["--set", f"{setting}={path}"]
    run([*resume, *named])
    assert "not named" not in capsys.readouterr().err
