"""The same reading from the command line and from Python: same trace, same manifest, same refusals."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent import Document, Reader, Trace, open_engine
from memagent.agent.model_call import Limits
from memagent.cli.shared.console import with_options
from memagent.engines import store
from memagent.errors import ConfigError, MemagentError
from tests.integration.conftest import FACT, QUESTION, Outcome, story
from tests.support.loopback import Endpoint, running
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

Call = Callable[..., Outcome]
TIMINGS = ("started", "seconds")
SIZES = {"window": 4096, "chunk_tokens": 400, "memory_tokens": 200, "answer_tokens": 50}
NO_ENDPOINT = ("MEMAGENT_BASE_URL", "OPENAI_BASE_URL", "URL")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(story(3000, seed=5, fact=FACT))
    return path


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with running(max_model_len=6000) as served:
        yield served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096)


def options(settings: dict[str, Any]) -> list[str]:
    """Settings of Python as options of the command."""
    pairs = [("--set", f"{name}={value}") for name, value in settings.items()]
    return [part for pair in pairs for part in pair]


def from_the_shell(
    here: Call,
    book: Path,
    run: Path,
    engine: str | None,
    settings: dict[str, Any],
    environment: dict[str, str],
) -> dict[str, Any]:
    named = ["--engine", engine] if engine else []
    outcome = here(
        "ask", book.name, "-q", QUESTION, "--json", "--run-dir", run, *named, *options(settings),
        cwd=book.parent, env=environment,
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    printed: dict[str, Any] = json.loads(outcome.stdout)["trace"]
    return printed


def from_python(
    book: Path,
    run: Path,
    engine: str | None,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Trace:
    of_reader = {name: value for name, value in settings.items() if name in READER_SETTINGS}
    of_engine = {name: value for name, value in settings.items() if name not in READER_SETTINGS}
    monkeypatch.chdir(book.parent)
    with open_engine(engine, **of_engine) as opened:
        reader = Reader(opened, **of_reader)
        return reader.ask(QUESTION, Document.load(book.name), run_dir=run)


READER_SETTINGS = (*SIZES, "prompts", "seed", "temperature", "tokenizer")


def without_timings(trace: dict[str, Any]) -> dict[str, Any]:
    steps = [{k: v for k, v in step.items() if k not in TIMINGS} for step in trace["steps"]]
    return {**trace, "steps": steps}


def manifest(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "run.json").read_text())
    return {name: value for name, value in values.items() if name not in ("created", "command")}


def assert_same(
    here: Call,
    book: Path,
    engine: str | None,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str] | None = None,
) -> Trace:
    """Read through both doors, compare all that is printed and kept; the trace of Python."""
    environment = environment or {}
    runs = book.parent / "shell", book.parent / "python"
    printed = from_the_shell(here, book, runs[0], engine, settings, environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trace = from_python(book, runs[1], engine, settings, monkeypatch)
    assert without_timings(printed) == without_timings(trace.to_dict())
    assert len(trace.steps) > 2
    assert manifest(runs[0]) == manifest(runs[1])
    kept = [Trace.load(run)[0].to_dict() for run in runs]
    assert without_timings(kept[0]) == without_timings(kept[1])
    return trace


def test_the_scripted_engine_reads_the_same(
    here: Call, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = assert_same(here, book, "scripted", SIZES, monkeypatch)
    assert "48213" in str(trace.answer)


def test_an_endpoint_of_the_environment_reads_the_same(
    here: Call, book: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = {"MEMAGENT_BASE_URL": endpoint.base_url}
    settings = {**SIZES, "tokenizer": "bytes"}
    trace = assert_same(here, book, None, settings, monkeypatch, address)
    assert trace.model == "test-model", "as the endpoint says"


def test_a_local_model_reads_the_same(
    here: Call, book: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SIZES, "answer_tokens": 8, "memory_tokens": 8, "device": "cpu", "cache_gb": 0.1}
    assert_same(here, book, f"local:{model}", {**settings, "temperature": 0.0}, monkeypatch)


def test_a_known_model_brings_its_adapter_and_its_settings_through_both_doors(
    here: Call, book: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with a short name, an adapter of its own and reading defaults, chosen by default."""
    for name in NO_ENDPOINT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(store, "ADAPTERS", tmp_path / "adapters")
    known = store.KnownModel(
        repository="nobody/nothing",
        num_bytes=1,
        window=4096,
        licence="none",
        reading={"chunk_tokens": 900, "memory_tokens": 8, "answer_tokens": 8, "prompts": "small"},
        adapter="trained",
    )
    monkeypatch.setitem(store.KNOWN, store.EMBEDDED, known)
    (tmp_path / "data/memagent/models").mkdir(parents=True)
    (tmp_path / "data/memagent/models" / store.EMBEDDED).symlink_to(model)
    settings = {"window": 4096, "device": "cpu", "cache_gb": 0.1, "temperature": 0.0}

    plain = from_python(book, tmp_path / "plain", None, settings, monkeypatch)
    (tmp_path / "adapters").mkdir()
    make_tiny_adapter(model, tmp_path / "adapters" / "trained")
    trace = assert_same(here, book, None, settings, monkeypatch)

    kept = manifest(tmp_path / "python")
    assert (kept["agent"]["chunk_tokens"], kept["prompts"]["name"]) == (900, "small")
    assert trace.steps[0].reply != plain.steps[0].reply, "the adapter counts"
    stored = json.loads((tmp_path / "shell/run.json").read_text())["command"]
    assert stored["engine_settings"]["adapter"] == str(tmp_path / "adapters" / "trained")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        (None, {"window": 9000}),
        (None, {"window": 1000, "chunk_tokens": 5000}),
        (None, {"model": "m", "device": "cpu"}),
        ("scripted", {"timeout": 3}),
        ("scripted", {"model": "m"}),
        ("openai:another", {**SIZES, "tokenizer": "bytes"}),
    ],
    ids=str,
)
def test_both_doors_refuse_with_the_same_words(
    here: Call,
    book: Path,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    engine: str | None,
    settings: dict[str, Any],
) -> None:
    from memagent.cli.ask import command

    address = {"MEMAGENT_BASE_URL": endpoint.base_url}
    named = ["--engine", engine] if engine else []
    outcome = here("ask", book, "-q", QUESTION, *named, *options(settings), env=address)
    monkeypatch.setenv("MEMAGENT_BASE_URL", endpoint.base_url)
    with pytest.raises(MemagentError) as caught:
        from_python(book, book.parent / "run", engine, settings, monkeypatch)
    assert outcome.code == caught.value.exit_code == 2
    assert outcome.stderr.splitlines()[-1] == (
        f"memagent: {with_options(str(caught.value), command)}"
    )


def test_a_limit_stops_both_doors_at_the_same_call(here: Call, book: Path) -> None:
    outcome = here(
        "ask", book, "-q", QUESTION, "--engine", "scripted", "--max-calls", "2", *options(SIZES)
    )
    reader = Reader(open_engine("scripted"), limits=Limits(max_calls=2), **SIZES)
    with pytest.raises(MemagentError, match="stopped after 2 calls: `max_calls=2`") as caught:
        reader.ask(QUESTION, Document.load(book))
    assert outcome.code == caught.value.exit_code == 4
    assert "memagent: stopped after 2 calls: --max-calls 2" in outcome.stderr


def test_without_engine_and_endpoint_python_opens_the_embedded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NO_ENDPOINT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setitem(
        store.KNOWN,
        store.EMBEDDED,
        store.KnownModel(repository="a b", num_bytes=1, window=1, licence="none"),
    )
    with pytest.raises(
        ConfigError, match=r"cannot be fetched.*; or give an endpoint: `base_url=URL`"
    ):
        open_engine()
