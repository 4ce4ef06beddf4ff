"""The runner in this process: concurrency, failures of the engine and of items, logged calls."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.model_call import Limits
from memagent.agent.trace import Step, Trace
from memagent.data.example import Example
from memagent.engines.base import BaseEngine
from memagent.errors import ClusterError, EngineError, LimitReached, MachineError
from memagent.eval.calls import EngineGate
from memagent.eval.items import EvalPlan, ExamplePool, plan_items
from memagent.eval.methods import Context, MethodSettings, open_method
from memagent.eval.records import KIND, ItemRecord, read_items
from memagent.eval.runner import Evaluation, OpenMethod, evaluate_examples
from memagent.eval.setup import open_run
from memagent.eval.suites import Suite
from memagent.runs import Run
from memagent.tokens.tokenizers import ByteTokenizer
from memagent.types import Completion, Message, Sampling, Usage

SIZES = {"window": 5000, "chunk_tokens": 1000, "memory_tokens": 300, "answer_tokens": 100}
MESSAGES: list[Message] = [{"role": "user", "content": "Who?"}]


class Counting(BaseEngine):
    """Gives every prompt the same reply, after a moment; the calls in `fails` fail."""

    def __init__(
        self,
        *,
        fails: Sequence[int] = (),
        seconds: float = 0.0,
        kind: type[EngineError] = EngineError,
    ) -> None:
        self.model, self.tokenizer = "counting", "bytes"
        self.num_calls = self.num_in_flight = self.most_in_flight = 0
        self._fails = frozenset(fails)
        self._seconds = seconds
        self._kind = kind

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self.num_calls += 1
        number = self.num_calls
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        await asyncio.sleep(self._seconds)
        self.num_in_flight -= 1
        if number in self._fails:
            raise self._kind(f"call {number} failed")
        return Completion(text=f"reply {sampling.seed}", usage=Usage(calls=1, prompt_tokens=7))

    async def aclose(self) -> None:
        pass


def make(num: int = 6) -> EvalPlan:
    tasks = {"tasks": ["beyond/two_hop"], "tokens": [1500], "num": num}
    return plan_items(Suite.parse({"tasks": [tasks]}), length_tokenizer="bytes")


def evaluate(
    engine: BaseEngine,
    plan: EvalPlan,
    *,
    methods: Sequence[str] = ("direct",),
    run: Run | None = None,
    concurrency: int = 2,
    settings: MethodSettings | None = None,
    **more: Any,
) -> list[ItemRecord]:
    async def records() -> list[ItemRecord]:
        gate = EngineGate(engine, concurrency=concurrency)
        opened = [
            OpenMethod(
                title=name,
                function=open_method(name),
                settings=settings or MethodSettings.parse(SIZES),
                gate=gate,
                tokenizer=ByteTokenizer(),
            )
            for name in methods
        ]
        with ExamplePool(plan, processes=0) as pool:
            evaluation = Evaluation(
                plan, pool, opened, seed=3, run=run, concurrency=concurrency, **more
            )
            return await evaluation.evaluate()

    return asyncio.run(records())


def new_run(folder: Path) -> Run:
    return Run.create(folder, {"kind": KIND, "identity": {}})


@pytest.mark.parametrize(("num_tokens", "in_flight"), [(1500, 97), (3_670_016, 69), (10**8, 25)])
def test_fewer_long_texts_are_in_flight(num_tokens: int, in_flight: int) -> None:
    plan = make(1)
    long = replace(plan, items=(replace(plan.items[0], num_tokens=num_tokens),))
    with ExamplePool(plan, processes=0) as pool:
        assert Evaluation(long, pool, [], seed=1, concurrency=64)._max_in_flight == in_flight


# --- items ----------------------------------------------------------------------------------------


def test_calls_of_all_items_and_methods_share_one_limit() -> None:
    engine = Counting(seconds=0.002)
    found = evaluate(engine, make(8), methods=("direct", "map_reduce", "reader"), concurrency=3)
    assert len(found) == 24
    assert engine.most_in_flight == 3
    assert engine.num_calls == sum(record.num_calls for record in found)


def test_each_sample_of_a_question_has_its_own_seed_and_record() -> None:
    once = evaluate(Counting(), make(3), methods=("direct", "reader"))
    found = evaluate(Counting(), make(3), methods=("direct", "reader"), samples=4)
    assert len(found) == 24
    assert [record.sample for record in found] == 6 * [0, 1, 2, 3]
    assert len({record.key for record in found}) == 24
    assert len({record.seed for record in found}) == 12  # the same for both methods
    first = [record for record in found if record.sample == 0]
    assert [record.answer for record in first] == [record.answer for record in once]
    assert {record.answer for record in found} == {f"reply {record.seed}" for record in found}


def test_a_run_with_samples_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    whole = evaluate(Counting(), make(3), samples=3)
    engine = Counting()
    with new_run(tmp_path / "run") as run, pytest.raises(LimitReached):
        evaluate(engine, make(3), samples=3, run=run, limits=Limits(max_calls=4))
    with open_run(tmp_path / "run", {}) as run:
        found = evaluate(engine, make(3), samples=3, run=run)
    assert engine.num_calls == 9
    assert [(one.key, one.answer) for one in found] == [(one.key, one.answer) for one in whole]


def test_a_call_that_fails_is_the_items_fault_if_the_engine_still_answers() -> None:
    found = evaluate(Counting(fails=[2, 5]), make(6))
    assert sorted(record.status for record in found) == ["failed"] * 2 + ["ok"] * 4
    failed = [record for record in found if record.status == "failed"]
    assert {record.error for record in failed} == {"call 2 failed", "call 5 failed"}
    assert {(record.score, record.num_calls) for record in failed} == {(0.0, 0)}


def test_the_last_item_may_fail_too(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        evaluate(Counting(fails=[6]), make(6), run=run)
    found = list(read_items(tmp_path / "run"))
    assert [record.status for record in found].count("failed") == 1
    assert len(found) == 6


def test_an_engine_that_never_answers_stops_the_run_and_blames_no_item(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run:
        with pytest.raises(EngineError, match="failed"):
            evaluate(Counting(fails=range(1, 1000)), make(60), run=run)
        assert run.discard_if_empty()


def test_an_outage_after_answers_keeps_what_was_answered(tmp_path: Path) -> None:
    engine = Counting(fails=range(11, 1000))
    with new_run(tmp_path / "run") as run, pytest.raises(EngineError):
        evaluate(engine, make(60), run=run)
    assert [record.status for record in read_items(tmp_path / "run")] == ["ok"] * 10
    assert engine.num_calls < 40  # not all of the 60 are tried in vain


def test_an_outage_at_the_very_end_or_after_a_restart_blames_no_item_either(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as run, pytest.raises(EngineError):
        evaluate(Counting(fails=range(5, 100)), make(9), run=run)
    assert len(list(read_items(tmp_path / "run"))) == 4
    with open_run(tmp_path / "run", {}) as run, pytest.raises(EngineError):
        evaluate(Counting(fails=range(1, 100)), make(5), run=run)
    assert len(list(read_items(tmp_path / "run"))) == 4
    with open_run(tmp_path / "run", {}) as run:
        found = evaluate(Counting(), make(9), run=run)
    assert [record.status for record in found] == ["ok"] * 9


@pytest.mark.parametrize("kind", [MachineError, ClusterError])
def test_a_machine_that_fails_stops_the_run_after_a_few_calls(
    kind: type[MachineError], tmp_path: Path
) -> None:
    engine = Counting(fails=range(11, 1000), kind=kind, seconds=0.001)
    with new_run(tmp_path / "run") as run, pytest.raises(kind, match="failed"):
        evaluate(engine, make(200), run=run, concurrency=64)
    assert engine.num_calls <= 10 + 97, "what was in flight, and nothing after it"
    again = Counting()
    with open_run(tmp_path / "run", {}) as run:
        found = evaluate(again, make(200), run=run, concurrency=64)
    assert [record.status for record in found] == ["ok"] * 200
    assert again.num_calls == 190, "what was answered is on disk"


def test_items_that_failed_with_the_machine_are_no_wrong_answers_and_asked_again(
    tmp_path: Path,
) -> None:
    whole = evaluate(Counting(), make(12))
    engine = Counting(fails=[3, 4, 7], kind=MachineError)
    with new_run(tmp_path / "run") as run, pytest.raises(MachineError, match="call 7 failed"):
        evaluate(engine, make(12), run=run)
    assert engine.num_calls == 12, "the engine answers again, so the others are asked"
    assert [record.status for record in read_items(tmp_path / "run")] == ["ok"] * 9
    again = Counting()
    with open_run(tmp_path / "run", {}) as run:
        found = evaluate(again, make(12), run=run)
    assert again.num_calls == 3
    assert [(one.key, one.answer) for one in found] == [(one.key, one.answer) for one in whole]


def test_what_an_item_had_read_before_the_machine_failed_is_not_read_again(tmp_path: Path) -> None:
    alone = Counting()
    evaluate(alone, make(1), methods=["reader"])
    assert alone.num_calls > 2
    with new_run(tmp_path / "run") as run, pytest.raises(MachineError):
        evaluate(Counting(fails=[3], kind=MachineError), make(1), methods=["reader"], run=run)
    rest = Counting()
    with open_run(tmp_path / "run", {}) as run:
        (record,) = evaluate(rest, make(1), methods=["reader"], run=run)
    assert (record.status, rest.num_calls) == ("ok", alone.num_calls - 2)


def test_an_item_of_its_own_fault_is_written_beside_those_that_failed_with_the_machine(
    tmp_path: Path,
) -> None:
    class Mixed(Counting):
        async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
            self._kind = MachineError if self.num_calls == 2 else EngineError
            return await super().complete(messages, sampling)

    with new_run(tmp_path / "run") as run, pytest.raises(MachineError, match="call 3 failed"):
        evaluate(Mixed(fails=[3, 5]), make(8), run=run, concurrency=1)
    found = list(read_items(tmp_path / "run"))
    assert sorted(record.status for record in found) == ["failed"] + ["ok"] * 6
    assert [record.error for record in found if record.error] == ["call 5 failed"]


def test_a_limit_lets_calls_in_flight_finish_and_starts_no_more(tmp_path: Path) -> None:
    engine = Counting(seconds=0.001)
    with new_run(tmp_path / "run") as run, pytest.raises(LimitReached):
        evaluate(engine, make(10), run=run, limits=Limits(max_calls=4))
    assert engine.num_calls == 4
    assert len(list(read_items(tmp_path / "run"))) == 4
    with open_run(tmp_path / "run", {}) as run, pytest.raises(LimitReached):
        evaluate(engine, make(10), run=run, limits=Limits(max_calls=6))
    assert engine.num_calls == 6
    with open_run(tmp_path / "run", {}) as run:
        assert len(evaluate(engine, make(10), run=run)) == 10
    assert engine.num_calls == 10


# --- replies that are known ----------------------------------------------------------------------


class Certain(Counting):
    """Replies with a line of its own to each prompt, and reports how certain it is: least of the second."""

    def __init__(self, prompts: Sequence[str] = ()) -> None:
        super().__init__()
        self.prompts = list(prompts)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self.prompts.append(messages[-1]["content"])
        number = len(self.prompts)
        reply = await super().complete(messages, sampling)
        logprobs = (-9.0 if number == 2 else -1.0, -0.1)
        return replace(reply, text=f"{number} {'x' * 70}", logprobs=logprobs)


def test_a_resumed_reading_drops_the_line_that_it_would_have_dropped(tmp_path: Path) -> None:
    settings = MethodSettings.parse(
        {**SIZES, "chunk_tokens": 250, "memory_tokens": 160, "prompts": "add"}
    )
    reading: dict[str, Any] = {"methods": ["reader"], "settings": settings}
    whole, stopped = Certain(), Certain()
    evaluate(whole, make(1), **reading)
    with new_run(tmp_path / "run") as run, pytest.raises(LimitReached):
        evaluate(stopped, make(1), run=run, limits=Limits(max_calls=3), **reading)
    resumed = Certain(stopped.prompts)
    with open_run(tmp_path / "run", {}) as run:
        evaluate(resumed, make(1), run=run, **reading)
    assert resumed.prompts == whole.prompts
    assert resumed.num_calls == whole.num_calls - 3


# --- examples in memory ---------------------------------------------------------------------------


def in_memory(index: int, *, task: str = "mine", num_tokens: int = 0) -> Example:
    return Example(
        id=f"{task}{index}",
        task=task,
        question="Who?",
        answers=("reply",),
        documents=(),
        num_tokens=num_tokens,
    )


async def test_examples_in_memory_are_asked_longest_first_and_returned_in_order() -> None:
    asked: list[str] = []

    async def method(example: Example, context: Context) -> Trace:
        asked.append(example.id)
        await context.call(MESSAGES)
        return context.trace()

    examples = [in_memory(0), in_memory(1, num_tokens=9), in_memory(0, task="also", num_tokens=5)]
    found = await evaluate_examples(
        examples, method, Counting(), title="own", seed=1, grader="recall"
    )
    assert asked == ["mine1", "also0", "mine0"]
    assert [record.id for record in found] == ["also0", "mine0", "mine1"]
    assert [record.index for record in found] == [0, 0, 1]
    assert {(record.method, record.grader, record.score) for record in found} == {
        ("own", "recall", 1.0)
    }


async def test_a_wave_starts_when_the_one_before_is_done() -> None:
    in_flight: set[str] = set()
    together: list[int] = []

    async def method(example: Example, context: Context) -> Trace:
        in_flight.add(example.id)
        await context.call(MESSAGES)
        await asyncio.sleep(0.001 * int(example.id[-1]))
        together.append(len(in_flight))
        in_flight.remove(example.id)
        return context.trace()

    found = await evaluate_examples(
        [in_memory(index) for index in range(7)],
        method,
        Counting(),
        title="own",
        seed=1,
        concurrency=3,
        in_waves=True,
    )
    assert [record.id for record in found] == [f"mine{index}" for index in range(7)]
    assert together == [3, 2, 1, 3, 2, 1, 1]


async def test_a_method_may_grade_itself() -> None:
    async def method(example: Example, context: Context) -> Trace:
        await context.call(MESSAGES)
        context.score = -0.5
        return context.trace()

    (record,) = await evaluate_examples(
        [in_memory(0)], method, Counting(), title="own", seed=1, grader="by the method"
    )
    assert (record.score, record.grader, record.extracted) == (-0.5, "by the method", None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("score", float("nan"), "own has the score nan; it must be a finite number"),
        ("score", "good", "own has the score 'good'; it must be a finite number"),
        (
            "notes",
            {"found": {1, 2}},
            "notes of the method own must be plain JSON: Object of type set",
        ),
    ],
)
async def test_a_score_or_note_that_a_file_cannot_hold_fails_its_item_only(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    async def method(example: Example, context: Context) -> Trace:
        await context.call(MESSAGES)
        if example.id == in_memory(0).id:
            setattr(context, field, value)
        return context.trace()

    with new_run(tmp_path / "run") as run:
        await evaluate_examples(
            [in_memory(0), in_memory(1)], method, Counting(), title="own", seed=1, run=run
        )
    bad, good = sorted(read_items(tmp_path / "run"), key=lambda record: record.index)
    assert (bad.status, bad.score, good.status) == ("failed", 0.0, "ok")
    assert message in (bad.error or "")


async def test_a_method_that_awaits_what_it_has_cancelled_fails_its_item_only() -> None:
    async def method(example: Example, context: Context) -> Trace:
        if example.id == "bad":
            own = asyncio.ensure_future(asyncio.sleep(60))
            own.cancel()
            await own
        await context.call(MESSAGES)
        return context.trace()

    examples = [Example(id=name, question="Who?", answers=("a",)) for name in ("bad", "good")]
    bad, good = await evaluate_examples(examples, method, Counting(), title="own", seed=1)
    assert (bad.status, bad.score) == ("failed", 0.0)
    assert bad.error is not None
    assert bad.error.startswith("CancelledError")
    assert good.status == "ok"


async def test_a_record_has_the_trace_that_the_method_returns() -> None:
    step = Step(kind="answer", index=0, reply="a reply", memory="kept", usage=Usage(calls=3))
    seen: list[ItemRecord] = []

    async def method(example: Example, context: Context) -> Trace:
        return replace(context.trace(), steps=(step,))

    (record,) = await evaluate_examples(
        [in_memory(0)], method, Counting(), title="own", seed=1, on_record=seen.append
    )
    assert (record.answer, record.num_calls, record.trace) == ("a reply", 3, {})
    assert seen[0].trace["steps"] == [json.loads(step.to_json())]
    assert replace(seen[0], trace={}) == record
