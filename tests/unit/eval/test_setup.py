"""Opening evaluations: from Python and from the command line, which give the same records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.cli.main import run as run_command
from memagent.engines.base import open_engine
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, EngineRefused, RunError
from memagent.eval.items import plan_items
from memagent.eval.records import KIND, ItemRecord, read_items
from memagent.eval.setup import (
    check_same,
    estimate_calls,
    evaluate,
    make_request,
    open_evaluation,
    open_plan,
    stored_request,
)
from memagent.eval.suites import Suite, parse_suite
from memagent.runs import read_manifest
from memagent.types import Completion, Message, Sampling

SIZES = {"window": 5000, "chunk_tokens": 1000, "memory_tokens": 300, "answer_tokens": 100}
TIMES = ("seconds", "started")


def suite_of(*methods: str, num: int = 3, **values: Any) -> Suite:
    tasks = {"tasks": ["beyond/two_hop", "ruler/niah_single_1"], "tokens": [1500], "num": num}
    chosen = [{"name": name} for name in methods or ("reader", "direct")]
    shared = {"agent": SIZES, "methods": chosen, "num": num, "tokenizer": "bytes"}
    return parse_suite({"tasks": [tasks], **shared, **values})


def options_of(suite: Suite) -> list[str]:
    """The same evaluation as options of the command."""
    (task,) = suite.tasks
    given = [f"--{name.replace('_', '-')}={value}" for name, value in suite.agent.items()]
    given += [f"--tokenizer={suite.tokenizer}"]
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
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    asyncio.run(evaluate(suite, "scripted", run_dir=tmp_path / "python", price_in=2.0))
    command = ["eval", *options_of(suite), *flags, "--engine=scripted", "--price-in=2", "--quiet"]
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

    def counted_by(model: str) -> tuple[str, ...]:
        request = make_request(suite, ScriptedEngine(["x"], model=model))
        return asyncio.run(open_plan(request)).tokenizers

    assert counted_by("smollm2-135m") == ("smollm2-135m",)
    assert counted_by("lab/other") == ("bytes",)


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


def test_a_stored_request_keeps_suite_engine_and_limits(tmp_path: Path) -> None:
    request = make_request(suite_of("direct", num=1), "scripted", concurrency=3, max_calls=9)

    async def run() -> None:
        async with open_evaluation(request, run_dir=tmp_path / "run") as evaluation:
            await evaluation.evaluate()

    asyncio.run(run())
    assert stored_request(tmp_path / "run") == request
    resumed = make_request(request.suite, resumed=request, max_calls=20, price_in=1.0)
    assert (resumed.engine, resumed.concurrency) == (request.engine, 3)
    assert (resumed.max_calls, resumed.price_in, resumed.max_cost) == (20, 1.0, None)


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
    assert (own.spec, dict(own.settings)) == ("openai:m", settings)  # type: ignore[union-attr]
    other = make_request(suite, "scripted")
    assert (dict(other.engine.settings), other.concurrency) == ({}, 7)  # type: ignore[union-attr]
    given = make_request(suite, engine_settings={"timeout": 9, "concurrency": 2})
    assert dict(given.engine.settings) == {**settings, "timeout": 9, "concurrency": 2}  # type: ignore[union-attr]


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
    suite = parse_suite({"tasks": [{"tasks": ["ruler/vt"]}], "methods": methods})
    with pytest.raises(ConfigError, match="direct has `engine_settings`; name the engine"):
        make_request(suite, ScriptedEngine(["x"]))


def test_methods_with_the_same_engine_share_one_limit_on_calls() -> None:
    async def gates() -> tuple[int, int]:
        request = make_request(suite_of("reader", "direct", num=1), "scripted", concurrency=2)
        async with open_evaluation(request) as evaluation:
            return len(evaluation.methods), len({id(one.gate) for one in evaluation.methods})

    assert asyncio.run(gates()) == (2, 1)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_needs_no_engine_where_the_suite_names_a_length_tokenizer() -> None:
    suite = suite_of(length_tokenizer="bytes")
    request = make_request(suite, "openai:m", engine_settings={"base_url": "http://no.where/v1"})
    assert asyncio.run(open_plan(request)) == plan_items(request.suite)


def test_calls_are_estimated_by_method() -> None:
    suite = suite_of("reader", "refine", "direct", "map_reduce", length_tokenizer="bytes")
    plan = plan_items(suite)
    calls = {one.name: estimate_calls(plan, suite, one) for one in suite.methods}
    assert calls == {"reader": 6 * 3, "refine": 6 * 2, "direct": 6, "map_reduce": 6 * 3}
