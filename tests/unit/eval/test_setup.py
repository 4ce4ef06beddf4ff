"""Opening evaluations: from Python and from the command line, which give the same records."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memagent import trust
from memagent.agent.model_call import LimitSettings
from memagent.agent.work import remember
from memagent.cli.main import run as run_command
from memagent.data.example import Example, Origin
from memagent.data.formats.files import write_examples
from memagent.engines.addresses import endpoint_from, origin
from memagent.engines.base import EngineChoice, open_engine
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, EngineRefused, MemagentError, RunError
from memagent.eval.forecast import EvalForecast
from memagent.eval.records import KIND, ItemRecord, read_items
from memagent.eval.setup import (
    EvalRequest,
    check_same,
    evaluate,
    length_name,
    make_request,
    open_evaluation,
    stored_request,
)
from memagent.eval.suites import Suite, SuiteTasks
from memagent.runs import read_manifest
from memagent.tokens.tokenizers import ByteTokenizer
from memagent.types import Completion, Message, Prices, Sampling, Usage

SIZES = {"window": 5000, "chunk_tokens": 1000, "memory_tokens": 300, "answer_tokens": 100}
TIMES = ("seconds", "started")


def suite_of(*methods: str, num: int = 3, **values: Any) -> Suite:
    tasks = {"tasks": ["beyond/two_hop", "ruler/niah_single_1"], "tokens": [1500], "num": num}
    chosen = [{"name": name} for name in methods or ("reader", "direct")]
    shared = {"agent": SIZES, "methods": chosen, "num": num, "tokenizer": "bytes"}
    return Suite.parse({"tasks": [tasks], **shared, **values})


def options_of(suite: Suite) -> list[str]:
    """The same evaluation as options of the command."""
    (task,) = suite.tasks
    given = [f"--set={name}={value}" for name, value in suite.agent.items()]
    given += [f"--set=tokenizer={suite.tokenizer}"]
    given += [f"--task={name}" for name in task.tasks] + [f"--num={suite.num}", "--lengths=1500"]
    return given + [f"--method={method.name}" for method in suite.methods]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def records_of(run: Path) -> list[Any]:
    found = sorted(read_items(run), key=lambda one: (one.task, one.method, one.index))
    return [without_times(record.to_dict()) for record in found]


# --- two doors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"length_tokenizer": "estimate"}])
def test_python_and_the_command_line_give_the_same_records_and_manifest(
    tmp_path: Path, settings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_of("reader", "direct", "map_reduce", **settings)
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    asyncio.run(
        evaluate(
            suite,
            "scripted",
            run_dir=tmp_path / "python",
            limits=LimitSettings(price_in=2.0, price_out=4.0),
        )
    )
    flags += ["--engine=scripted", "--set=price_in=2", "--set=price_out=4", "--quiet"]
    command = ["eval", *options_of(suite), *flags]
    code = run_command([*command, f"--run-dir={tmp_path / 'command'}"])
    assert code == 0, capsys.readouterr().err
    assert records_of(tmp_path / "python") == records_of(tmp_path / "command")
    assert len(records_of(tmp_path / "python")) == 2 * 3 * 3
    manifests = [read_manifest(tmp_path / name) for name in ("python", "command")]
    assert {**manifests[0], "created": ""} == {**manifests[1], "created": ""}


def test_an_open_engine_gives_the_records_of_its_name_and_stays_open(tmp_path: Path) -> None:
    suite = suite_of("reader")
    engine = open_engine("scripted")
    asyncio.run(evaluate(suite, engine, run_dir=tmp_path / "open"))
    asyncio.run(evaluate(suite, "scripted", run_dir=tmp_path / "named"))
    assert records_of(tmp_path / "open") == records_of(tmp_path / "named")
    open_one, named = (read_manifest(tmp_path / name) for name in ("open", "named"))
    assert open_one["identity"] == named["identity"]
    assert "command" not in open_one
    with pytest.raises(ConfigError, match="started from Python with an open engine"):
        stored_request(tmp_path / "open")


def test_a_known_local_model_counts_lengths_by_its_short_name() -> None:
    """Its tokenizer is a folder of this machine, which no run should depend on."""
    suite = suite_of("direct")

    def counted_by(model: str) -> str | None:
        return length_name(suite, ScriptedEngine(["x"], model=model), ByteTokenizer())

    assert counted_by("smollm2-135m") == "smollm2-135m"
    assert counted_by("lab/other") == "bytes"


def test_without_a_run_directory_nothing_is_written_and_records_arrive_one_by_one() -> None:
    seen: list[ItemRecord] = []
    found = asyncio.run(evaluate(suite_of("direct"), "scripted", on_record=seen.append))
    assert [(record.task, record.index) for record in found] == [
        *(("beyond/two_hop", index) for index in range(3)),
        *(("ruler/niah_single_1", index) for index in range(3)),
    ]
    assert {len(record.trace["steps"]) for record in seen} == {1}
    assert {json.dumps(record.trace) for record in found} == {"{}"}
    assert {record.key for record in seen} == {record.key for record in found}


# --- resuming -------------------------------------------------------------------------------------


def test_the_same_call_resumes_the_run_and_another_evaluation_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asyncio.run(evaluate(suite_of("direct", num=2), "scripted", run_dir=run))
    before = (run / "steps.jsonl").read_bytes()
    seen: list[ItemRecord] = []
    found = asyncio.run(
        evaluate(suite_of("direct", num=2), "scripted", run_dir=run, on_record=seen.append)
    )
    assert (len(found), seen) == (4, [])
    assert (run / "steps.jsonl").read_bytes() == before
    with pytest.raises(RunError, match=r"cannot resume .*: num was 2, now 3; start a new run"):
        asyncio.run(evaluate(suite_of("direct", num=3), "scripted", run_dir=run))


@pytest.mark.parametrize("changed", ["read", "answer", "note", "merge"])
def test_a_run_is_not_resumed_with_other_templates(changed: str, tmp_path: Path) -> None:
    templates = tmp_path / "prompts.toml"
    wording = {
        "read": "{question}\\n{section}\\n{memory}",
        "answer": "{question}\\n{memory}",
        "note": "{section}\\n{question}\\n{memory}",
        "merge": "{notes}\\n{question}\\n{memory}",
    }

    def asked() -> list[ItemRecord]:
        templates.write_text("".join(f'{name} = "{text}"\n' for name, text in wording.items()))
        agent = {**SIZES, "mode": "parallel", "prompts": str(templates)}
        suite = suite_of("reader", num=1, agent=agent)
        return asyncio.run(evaluate(suite, "scripted", run_dir=tmp_path / "run"))

    assert asked() == asked()
    wording[changed] += " now"
    with pytest.raises(RunError, match=r"cannot resume .*(prompts|merging) was"):
        asked()


def test_a_stored_request_keeps_suite_engine_and_limits(tmp_path: Path) -> None:
    request = make_request(
        suite_of("direct", num=1), "scripted", concurrency=3, limits=LimitSettings(max_calls=9)
    )

    async def run() -> None:
        async with open_evaluation(request, run_dir=tmp_path / "run") as evaluation:
            await evaluation.evaluate()

    asyncio.run(run())
    assert stored_request(tmp_path / "run") == request
    resumed = make_request(
        request.suite,
        resumed=request,
        limits=LimitSettings(max_calls=20, price_in=1.0, price_out=2.0),
    )
    assert (resumed.engine, resumed.concurrency) == (request.engine, 3)
    assert resumed.limits == LimitSettings(max_calls=20, price_in=1.0, price_out=2.0)


def test_another_identity_is_refused_and_named(tmp_path: Path) -> None:
    stored = {"kind": KIND, "identity": {"model": "a", "seed": 1}}
    check_same(stored, {"model": "a", "seed": 1}, tmp_path)
    with pytest.raises(RunError, match='model was "a", now "b"; start a new run'):
        check_same(stored, {"model": "b", "seed": 1}, tmp_path)
    nested = {"kind": KIND, "identity": {"methods": {"reader": {"window": 5}}}}
    with pytest.raises(RunError, match=r"methods.reader.window was 5, now 6; start"):
        check_same(nested, {"methods": {"reader": {"window": 6}}}, tmp_path)
    with pytest.raises(RunError, match="kind 'ask'"):
        check_same({"kind": "ask"}, {}, tmp_path)


def test_a_run_whose_first_call_is_refused_is_not_kept(tmp_path: Path) -> None:
    class Refusing(ScriptedEngine):
        async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
            raise EngineRefused("the endpoint refused the key")

    with pytest.raises(EngineRefused):
        asyncio.run(evaluate(suite_of("direct"), Refusing(["x"]), run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# --- engines --------------------------------------------------------------------------------------


def test_the_suites_engine_settings_are_for_its_own_kind_of_engine() -> None:
    settings = {"base_url": "http://a/v1", "timeout": 5, "concurrency": 7}
    suite = suite_of("direct", engine="openai:m", engine_settings=settings)
    own = make_request(suite).engine
    assert (own.spec, dict(own.settings)) == ("openai:m", {**settings, "api_key": "none"})  # type: ignore[union-attr]
    other = make_request(suite, "scripted")
    assert (dict(other.engine.settings), other.concurrency) == ({}, 7)  # type: ignore[union-attr]
    given = make_request(suite, engine_settings={"timeout": 9, "concurrency": 2})
    changed = {"timeout": 9, "concurrency": 2, "api_key": "none"}
    assert dict(given.engine.settings) == {**settings, **changed}  # type: ignore[union-attr]


def test_yarn_stretches_engines_that_are_opened_here_only() -> None:
    suite = suite_of("direct", "yarn")
    local = make_request(suite, "local:lab/model")
    engines = [local.engine_of(method) for method in suite.methods]
    assert [dict(engine.settings) for engine in engines] == [{}, {"yarn_factor": 4.0}]  # type: ignore[union-attr]
    endpoint = make_request(suite, "openai:m", engine_settings={"base_url": "http://a/v1"})
    assert endpoint.engine_of(suite.methods[0]) == endpoint.engine_of(suite.methods[1])
    with pytest.raises(ConfigError, match="direct and yarn need vLLM with different settings"):
        make_request(suite, "vllm:lab/model")


def test_engine_settings_of_a_method_need_an_engine_that_is_opened_here() -> None:
    methods = [{"name": "direct", "engine_settings": {"timeout": 3}}]
    suite = Suite.parse({"tasks": [{"tasks": ["ruler/vt"]}], "methods": methods})
    with pytest.raises(ConfigError, match="direct has `engine_settings`; name the engine"):
        make_request(suite, ScriptedEngine(["x"]))


def test_methods_with_the_same_engine_share_one_limit_on_calls() -> None:
    async def gates() -> tuple[int, int]:
        request = make_request(suite_of("reader", "direct", num=1), "scripted", concurrency=2)
        async with open_evaluation(request) as evaluation:
            return len(evaluation.methods), len({id(one.gate) for one in evaluation.methods})

    assert asyncio.run(gates()) == (2, 1)


class Local(ScriptedEngine):
    """Runs here and works on many calls at once."""

    runs_here = True

    def __init__(self, calls_at_once: int) -> None:
        super().__init__(["x"])
        self.calls_at_once = calls_at_once


def test_a_model_on_a_gpu_is_sent_more_calls_at_once() -> None:
    request = make_request(suite_of("direct", num=1), ScriptedEngine(["x"]))
    assert [request.concurrency_of(Local(num)) for num in (64, 1024)] == [16, 256]
    assert request.concurrency_of(ScriptedEngine(["x"])) == 16
    set_by_user = make_request(suite_of("direct", num=1), ScriptedEngine(["x"]), concurrency=7)
    assert set_by_user.concurrency_of(Local(1024)) == 7


# --- plans ----------------------------------------------------------------------------------------


class Planned(NamedTuple):
    forecast: EvalForecast
    seconds: float | None
    model: str


async def planned(suite: Suite, engine: Any = "scripted", **settings: Any) -> Planned:
    request = make_request(suite, engine, **settings)
    async with open_evaluation(request, is_dry=True) as evaluation:
        assert evaluation.forecast is not None
        gate = evaluation.methods[0].gate
        return Planned(evaluation.forecast, evaluation.forecast.seconds(gate), gate.engine.model)


class Exact(ScriptedEngine):
    """Reports the prompt tokens that the byte tokenizer counts."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        reply = await super().complete(messages, sampling)
        num = ByteTokenizer().count_messages(messages)
        return replace(reply, usage=Usage(calls=1, prompt_tokens=num, completion_tokens=1))


async def test_calls_and_tokens_of_a_forecast_are_those_of_the_run() -> None:
    methods = ("reader", "refine", "direct", "map_reduce", "bm25")
    suite = suite_of(*methods, length_tokenizer="bytes", samples=2)
    tasks = [task.model_copy(update={"tokens": [1500, 9000]}) for task in suite.tasks]
    suite = suite.model_copy(update={"tasks": tasks})
    forecast = (await planned(suite, Exact(lambda *_: "x"))).forecast
    records = await evaluate(suite, Exact(lambda *_: "x"))
    assert sum(forecast.cells.values()) * 2 * len(methods) == len(records)
    for name in methods:
        own = [record for record in records if record.method == name]
        work = forecast.of_method(name)
        assert work.num_calls == pytest.approx(sum(one.num_calls for one in own), rel=0.1), name
        used = sum(one.prompt_tokens for one in own)
        if name == "bm25":  # how many passages share a word with the question is not known
            assert work.prompt_tokens >= used
        else:
            assert work.prompt_tokens == pytest.approx(used, rel=0.1), name
    low, high = forecast.total.cost(Prices(prompt=1.0, completion=2.0))
    assert low == pytest.approx(round(forecast.total.prompt_tokens) / 1e6)
    most = round(forecast.total.prompt_tokens + forecast.total.max_memory_tokens)
    assert high == pytest.approx((most + 2 * forecast.total.max_completion_tokens) / 1e6)


async def test_quotes_that_an_answer_is_shown_are_in_the_highest_cost_of_a_forecast() -> None:
    async def most(ledger_tokens: int) -> float:
        reading = {"evidence": True, "quote_tokens": 64, "ledger_tokens": ledger_tokens}
        suite = suite_of("reader", num=2, agent={**SIZES, **reading})
        forecast = (await planned(suite)).forecast
        return forecast.total.max_memory_tokens

    assert await most(500) - await most(100) == 4 * 400


async def test_a_dry_run_opens_every_source_and_names_what_is_missing(tmp_path: Path) -> None:
    suite = suite_of(length_tokenizer="bytes")
    absent = SuiteTasks.parse({"tasks": ["ruler/qa_1"], "tokens": [3000]})
    sources = {"squad-dev": str(tmp_path / "missing.json")}
    broken = suite.model_copy(update={"tasks": [*suite.tasks, absent], "sources": sources})
    with pytest.raises(MemagentError, match=r"missing\.json"):
        await planned(broken)
    example = Example(
        id="e",
        task="ruler/niah_single_1",
        question="?",
        answers=("1",),
        documents=None,
        origin=Origin(task="ruler/niah_single_1", settings={"tokens": -3}, index=0),
    )
    write_examples(tmp_path / "broken.jsonl", [example])
    own = SuiteTasks.parse({"files": [str(tmp_path / "broken.jsonl")]})
    with pytest.raises(ConfigError, match=r"broken\.jsonl"):
        await planned(suite.model_copy(update={"tasks": [own]}))


async def test_a_dry_run_starts_no_server_and_downloads_no_model() -> None:
    suite = suite_of("reader", length_tokenizer="bytes")
    opened = await planned(suite, "vllm:lab/some-model")
    assert (opened.seconds, opened.model) == (None, "lab/some-model")
    assert opened.forecast.total.num_calls == 6 * 3
    own = suite.model_copy(update={"agent": {}})
    embedded = await planned(own, "local:smollm2-135m")
    assert embedded.forecast.total.num_calls == 6 * 3  # sections of 1,024: the model's own setting
    nowhere = {"base_url": "http://127.0.0.1:9/v1"}
    assert (await planned(suite, "openai:m", engine_settings=nowhere)).seconds is None


async def test_time_is_estimated_as_the_last_run_took() -> None:
    suite = suite_of("reader", length_tokenizer="bytes")
    engine = ScriptedEngine(["x"] * 100, model="timed")
    assert (await planned(suite, engine)).seconds is None
    remember(engine, prompt_tokens=1000, call_seconds=10.0, seconds=5.0)
    opened = await planned(suite, engine)
    assert opened.seconds == pytest.approx(opened.forecast.total.prompt_tokens * 0.01 / 2)
    assert engine.prompts == [], "nothing is asked"


# --- keys of addresses that a suite names ---------------------------------------------------------

SUITES_OWN = {"base_url": "http://suite/v1"}


def stored(request: EvalRequest) -> EvalRequest:
    """As a run directory has it: without a key."""
    assert isinstance(request.engine, EngineChoice)
    settings = {**request.engine.settings}
    settings.pop("api_key")
    return replace(request, engine=replace(request.engine, settings=settings))


def key_of(engine: Any) -> str | None:
    """The key that calls of an engine would carry."""
    settings = engine.settings
    address = endpoint_from(os.environ, settings.get("base_url"), settings.get("api_key"))
    return str(address.api_key) if address.api_key is not None else None


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"MEMAGENT_API_KEY": "mine"}, "none"),
        ({"OPENAI_API_KEY": "mine"}, "none"),
        ({"MEMAGENT_API_KEY": "mine", "MEMAGENT_BASE_URL": "http://mine/v1"}, "none"),
        ({"MEMAGENT_API_KEY": "mine", "MEMAGENT_BASE_URL": "http://suite/v1"}, "mine"),
        ({"OPENAI_API_KEY": "mine", "OPENAI_BASE_URL": "http://suite/v1"}, "mine"),
    ],
)
def test_an_address_that_a_suite_names_gets_its_own_key_only(
    environment: dict[str, str], key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("MEMAGENT_API_KEY", "MEMAGENT_BASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    suite = suite_of("direct", engine="openai:m", engine_settings=SUITES_OWN)
    request = make_request(suite)
    assert key_of(request.engine) == key
    trust.remember("address", origin(SUITES_OWN["base_url"]))
    assert key_of(make_request(suite, resumed=stored(request)).engine) == key
    method = {"name": "direct", "engine_settings": SUITES_OWN}
    suite = Suite.parse(
        {"tasks": [{"tasks": ["ruler/vt"]}], "methods": [{"name": "reader"}, method]}
    )
    theirs = {"base_url": "http://users/v1", "api_key": "users"}
    request = make_request(suite, "openai:m", engine_settings=theirs)
    assert [key_of(request.engine_of(one)) for one in suite.methods] == ["users", key]


def test_the_users_own_address_keeps_the_users_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "mine")
    suite = suite_of("direct", engine="openai:m", engine_settings=SUITES_OWN)
    assert key_of(make_request(suite, engine_settings={"base_url": "http://users/v1"}).engine) == (
        "mine"
    )
    with_key = make_request(suite, engine_settings={**SUITES_OWN, "api_key": "users"})
    assert key_of(with_key.engine) == "users"
    with pytest.raises(ConfigError, match="the suite names the endpoint http://suite/v1"):
        make_request(suite, engine_settings={"api_key": "users"})
