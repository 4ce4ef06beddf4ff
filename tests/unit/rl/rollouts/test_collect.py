"""Collections: groups as they finish, replacements, failures as data, counts, and resuming."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import pytest

from memagent.agent.trace import Trace
from memagent.data.tasks.arithmetic import problem
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import (
    ConfigError,
    DataError,
    EmptyAnswer,
    EngineError,
    EngineRefused,
    PromptTooLong,
    RunError,
)
from memagent.rl.agents.client import Client
from memagent.rl.agents.session import RunSampling
from memagent.rl.rollouts.collect import RolloutStats, check_agent, check_engine
from memagent.rl.rollouts.rollout_log import rollout_from_dict, rollout_to_dict
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Outcome, Rollout
from memagent.rl.update.advantages import group_advantages
from memagent.rl.update.metrics import group_metrics
from memagent.rl.update.rows import rows_of
from tests.support.collecting import collecting
from tests.support.jobs import Job, jobs
from tests.support.timing import settle
from tests.support.token_engine import TokenScript, random_reply


def engine(**options: Any) -> TokenScript:
    return TokenScript(random_reply, **options)


async def ask(task: Job, client: Client) -> Outcome:
    """One call; the reward is 1 for odd first digits."""
    reply = await client.chat.completions.create(messages=[{"role": "user", "content": task.id}])
    said = reply.choices[0].message.content
    return Outcome(answer=said, reward=float(int(said[0], 16) % 2), metrics={"length": len(said)})


def endless() -> Iterator[Job]:
    return (Job(id=f"job{number}") for number in count())


async def test_a_collection_yields_a_group_per_task_with_all_its_rollouts() -> None:
    groups = await collecting(jobs(3), ask, engine(), group_size=4).all()
    assert [group.task_id for group in groups] == ["job0", "job1", "job2"]
    for group in groups:
        assert [rollout.index for rollout in group.rollouts] == [0, 1, 2, 3]
        assert len({rollout.answer for rollout in group.rollouts}) == 4
    rollout = groups[0].rollouts[0]
    assert rollout.num_sampled == 13  # twelve letters and the end
    assert rollout.metrics["length"] == 12
    assert rollout.metrics["calls"] == rollout.metrics["rows"] == 1
    assert rollout.metrics["sampled_tokens"] == 13


async def test_groups_are_yielded_before_the_others_are_done() -> None:
    held = asyncio.Event()

    async def agent(task: Job, client: Client) -> Outcome:
        if task.id == "job0":
            await held.wait()
        return await ask(task, client)

    order = []
    async with collecting(jobs(3), agent, engine(), group_size=2) as groups:
        async for group in groups:
            order.append(group.task_id)
            if len(order) == 2:
                held.set()
    assert order[-1] == "job0"


async def test_the_calls_of_an_agent_are_the_trace_of_its_rollout() -> None:
    async def twice(task: Job, client: Client) -> Outcome:
        first = await ask(task, client)
        second = await ask(task, client)
        return replace(second, answer=f"{first.answer}, {second.answer}")

    (group,) = await collecting(jobs(1), twice, engine(), group_size=1).all()
    trace = group.rollouts[0].trace
    assert trace is not None
    assert [(step.kind, step.index) for step in trace.steps] == [("read", 0), ("answer", 1)]
    assert trace.answer == group.rollouts[0].answer == f"{trace.steps[0].reply}, {said(trace, 1)}"
    assert (trace.source, trace.model, trace.usage.calls) == ("job0", "token-script", 2)


def said(trace: Trace, index: int) -> str:
    """The second half of a joined answer."""
    return trace.steps[index].reply.partition(", ")[2]


def has_signal(group: Group) -> bool:
    return len({rollout.reward for rollout in group.ok}) > 1


@pytest.mark.parametrize("driver", ["free", "lockstep"])
@pytest.mark.parametrize("concurrency", [2, 64])
async def test_unwanted_groups_are_replaced_and_the_same_tasks_are_run_whatever_finishes_first(
    driver: Any, concurrency: int
) -> None:
    expected = await collecting(jobs(40), ask, engine(), group_size=2, seed=3).all()
    wanted = [group.task_id for group in expected if has_signal(group)][:6]
    drawn: list[str] = []

    def tasks() -> Iterator[Job]:
        for job in endless():
            drawn.append(job.id)
            yield job

    slow_start = engine(delay=lambda messages: 0.003 if messages[0]["content"] == "job0" else 0)
    collection = collecting(
        tasks(),
        ask,
        slow_start,
        group_size=2,
        seed=3,
        driver=driver,
        num_groups=6,
        is_wanted=has_signal,
        concurrency=concurrency,
    )
    groups = await collection.all()
    assert [group.task_id for group in groups] == wanted
    assert len(drawn) == int(wanted[-1].removeprefix("job")) + 1
    assert collection.stats.num_groups == 6
    assert collection.stats.num_unwanted == len(drawn) - 6
    assert collection.stats.num_rollouts == 2 * len(drawn)


async def test_groups_are_replaced_until_the_limit() -> None:
    collection = collecting(
        endless(),
        ask,
        engine(),
        group_size=2,
        num_groups=3,
        is_wanted=lambda group: False,
        max_unwanted=4,
    )
    assert await collection.all() == []
    assert collection.stats.num_unwanted == 7


async def test_a_rollout_that_raises_is_a_failed_one_with_the_line_of_the_error() -> None:
    async def agent(task: Job, client: Client) -> Outcome:
        outcome = await ask(task, client)
        if int(outcome.answer[1], 16) % 2:
            raise ValueError("no\ngood")
        return outcome

    collection = collecting(jobs(8), agent, engine(), group_size=2)
    rollouts = [rollout for group in await collection.all() for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if not rollout.is_ok]
    assert 0 < len(failed) < 16
    assert len(rollouts) == 16
    assert collection.stats.num_failed == len(failed)
    for rollout in failed:
        assert rollout.error is not None
        assert rollout.error.startswith("ValueError: no good (test_collect.py, line ")
        assert "\n" not in rollout.error
        assert "raise ValueError" in rollout.record["traceback"]
        assert (rollout.samples, rollout.reward, rollout.answer) == ((), 0.0, None)
        assert rollout.trace is not None
        assert [step.kind for step in rollout.trace.steps] == ["read"], "the finished call is kept"


async def brittle(task: Job, client: Client) -> Outcome:
    """Asks, and cannot use every second reply."""
    outcome = await ask(task, client)
    if int(outcome.answer[1], 16) % 2:
        raise ValueError("no JSON in the reply")
    return outcome


async def test_failures_of_the_policy_get_their_reward_and_keep_their_rows() -> None:
    groups = await collecting(jobs(8), brittle, engine(), group_size=2, failure_reward=-0.5).all()
    failed = [one for group in groups for one in group.rollouts if not one.is_ok]
    assert failed
    for rollout in failed:
        assert (rollout.failed_by, rollout.is_penalised, rollout.reward) == ("policy", True, -0.5)
        assert rollout.num_sampled == 13
        assert rollout_from_dict(rollout_to_dict(rollout)) == rollout
    mixed = next(group for group in groups if group.num_failed == 1)
    advantages = group_advantages(mixed)
    assert None not in advantages
    assert len(rows_of([mixed], ObjectiveSettings()).rows) == 2
    metrics = group_metrics(groups)
    assert metrics["num_failed"] == metrics["num_failed_policy"] == len(failed)
    rewards = [one.reward for group in groups for one in group.rollouts]
    assert metrics["reward"] == pytest.approx(sum(rewards) / 16), "failures lower it"


async def test_failures_of_the_policy_can_leave_their_group() -> None:
    groups = await collecting(jobs(8), brittle, engine(), group_size=2).all()
    failed = [one for group in groups for one in group.rollouts if not one.is_ok]
    assert {(one.failed_by, one.is_scored, one.num_sampled) for one in failed} == {
        ("policy", False, 0)
    }


@pytest.mark.parametrize(
    ("error", "failed_by"),
    [
        (PromptTooLong("the prompt has 900 tokens"), "policy"),
        (json.JSONDecodeError("no value", "x", 0), "policy"),
        (EmptyAnswer("nothing"), "policy"),
        (EngineError("the endpoint is gone"), "machine"),
        (EngineRefused("wrong key"), "machine"),
        (ConnectionResetError("the tool is gone"), "machine"),
        (httpx.ReadTimeout("the tool is slow"), "machine"),
        (BrokenProcessPool("a worker has died"), "machine"),
        (MemoryError(), "machine"),
    ],
)
async def test_failures_of_the_machine_are_not_penalised(error: Exception, failed_by: str) -> None:
    async def agent(task: Job, client: Client) -> Outcome:
        await ask(task, client)
        raise error

    async def early(task: Job, client: Client) -> Outcome:
        raise ValueError("before the first call")

    (group,) = await collecting(jobs(1), agent, engine(), group_size=2, failure_reward=0.0).all()
    assert {one.failed_by for one in group.rollouts} == {failed_by}
    assert len(group.scored) == (2 if failed_by == "policy" else 0)
    (group,) = await collecting(jobs(1), early, engine(), group_size=2, failure_reward=0.0).all()
    assert {one.failed_by for one in group.rollouts} == {"machine"}


async def test_an_outage_of_a_tool_stops_like_one_of_the_engine() -> None:
    async def agent(task: Job, client: Client) -> Outcome:
        raise ConnectionRefusedError("the tool is gone")

    with pytest.raises(EngineError, match="the tool is gone"):
        await collecting(endless(), agent, engine(), group_size=2).all()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("just text", "the agent returned str; return Outcome"),
        (Outcome(answer="x"), "the agent returns no reward; name a reward"),
        (
            Outcome(answer="x", reward=float("nan")),
            "the agent returned nan as reward; it must return",
        ),
        (Outcome(answer="x", reward=1.0, record={"x": object()}), "must be plain JSON"),
        (Outcome(answer="x", reward=1.0, trace="y"), "must be a Trace that ends with its answer"),  # type: ignore[arg-type]
        (Outcome(answer="x", reward=1.0, metrics={"x": "y"}), "str as its metric 'x'"),  # type: ignore[dict-item]
    ],
)
async def test_an_invalid_outcome_is_a_failed_rollout_with_the_remedy(
    outcome: Any, message: str
) -> None:
    async def agent(task: Job, client: Client) -> Outcome:
        await ask(task, client)
        return outcome  # type: ignore[no-any-return]

    (group,) = await collecting(jobs(1), agent, engine(), group_size=2).all()
    assert [rollout.status for rollout in group.rollouts] == ["failed", "failed"]
    assert message in (group.rollouts[0].error or "")


async def test_an_agent_without_a_call_and_one_that_exits_are_failed_rollouts() -> None:
    async def silent(task: Job, client: Client) -> Outcome:
        if task.id == "job1":
            raise SystemExit(3)
        return Outcome(answer="x", reward=1.0)

    first, second = await collecting(jobs(2), silent, engine(), group_size=1).all()
    assert first.rollouts[0].error == "the agent returned without a call of the client"
    assert (second.rollouts[0].error or "").startswith("SystemExit: 3")


async def cancelled() -> None:
    """Awaits a task of its own that was cancelled."""
    own = asyncio.ensure_future(asyncio.sleep(60))
    own.cancel()
    await own


async def test_an_agent_that_awaits_what_it_has_cancelled_is_a_failed_rollout() -> None:
    async def agent(task: Job, client: Client) -> Outcome:
        found = await ask(task, client)
        if task.id == "job0":
            await cancelled()
        return found

    first, second = await collecting(jobs(2), agent, engine(), group_size=1).all()
    assert (first.rollouts[0].status, first.rollouts[0].failed_by) == ("failed", "policy")
    assert (first.rollouts[0].error or "").startswith("CancelledError")
    assert second.rollouts[0].is_ok


async def test_an_agent_that_takes_too_long_is_a_failed_rollout() -> None:
    async def slow(task: Job, client: Client) -> Outcome:
        if task.id == "job0":
            await asyncio.sleep(60)
        if task.id == "job1":
            raise TimeoutError("its own")
        return await ask(task, client)

    groups = await collecting(jobs(3), slow, engine(), group_size=1, seconds=0.2).all()
    errors = [group.rollouts[0].error for group in groups]
    assert errors[0] == "the agent took longer than 0.2 s"
    assert (errors[1] or "").startswith("TimeoutError: its own")
    assert errors[2] is None


async def test_when_nothing_succeeds_the_collection_stops_with_the_reason() -> None:
    calls = 0

    async def broken(task: Job, client: Client) -> Outcome:
        nonlocal calls
        calls += 1
        raise KeyError("colour")

    reason = r"^all rollouts of 4 tasks in a row failed, the last with: KeyError: 'colour'"
    with pytest.raises(ConfigError, match=reason):
        await collecting(
            endless(), broken, engine(), group_size=2, concurrency=2, stop_after=4
        ).all()
    assert 8 <= calls < 16

    def dead(messages: Any, sampling: Any) -> str:
        raise EngineError("the endpoint is gone")

    with pytest.raises(EngineError, match="the last with: the endpoint is gone"):
        await collecting(endless(), ask, TokenScript(dead), group_size=2, stop_after=4).all()


async def test_single_failed_tasks_do_not_stop_a_collection() -> None:
    async def every_second(task: Job, client: Client) -> Outcome:
        if task.num_turns % 2:
            raise ValueError("no good")
        return await ask(task, client)

    collection = collecting(
        jobs(8), every_second, engine(), group_size=2, concurrency=1, stop_after=2
    )
    assert len(await collection.all()) == 8
    assert collection.stats.num_failed == 8


async def test_leaving_early_cancels_running_rollouts() -> None:
    cancelled = 0

    async def agent(task: Job, client: Client) -> Outcome:
        nonlocal cancelled
        if task.id == "job0":
            return await ask(task, client)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError

    before = len(asyncio.all_tasks())
    async with collecting(jobs(3), agent, engine(), group_size=2) as groups:
        async for group in groups:
            assert group.task_id == "job0"
            break
    assert cancelled == 4
    assert len(asyncio.all_tasks()) == before


async def test_cancelling_the_caller_cancels_all_rollouts() -> None:
    running = asyncio.ensure_future(
        collecting(jobs(3), ask, engine(delay=lambda messages: 60), group_size=2).all()
    )
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_every_finished_rollout_is_reported_with_the_counts_so_far() -> None:
    reported: list[tuple[Rollout, RolloutStats]] = []
    collection = collecting(
        jobs(2),
        ask,
        engine(),
        group_size=3,
        on_rollout=lambda rollout, stats: reported.append((rollout, stats)),
    )
    await collection.all()
    assert [stats.num_rollouts for _, stats in reported] == [1, 2, 3, 4, 5, 6]
    stats = collection.stats
    assert stats.usage.calls == 6
    assert stats.usage.completion_tokens == 6 * 13
    assert stats.sampled_tokens_per_second == pytest.approx(6 * 13 / stats.seconds)


async def test_a_stopped_collection_is_resumed_with_the_saved_rollouts() -> None:
    whole = await collecting(jobs(6), ask, engine(), group_size=3, seed=5).all()
    saved: list[str] = []
    stopped = collecting(
        jobs(6),
        ask,
        engine(delay=lambda messages: 0.001),
        group_size=3,
        seed=5,
        concurrency=1,
        on_rollout=lambda rollout, stats: saved.append(json.dumps(rollout_to_dict(rollout))),
    )
    async with stopped:
        while len(saved) < 8:
            await anext(stopped)
    assert 8 <= len(saved) < 18
    finished = [rollout_from_dict(json.loads(line)) for line in saved]
    rest = engine()
    resumed = collecting(jobs(6), ask, rest, group_size=3, seed=5, finished=finished)
    groups = await resumed.all()
    assert len(rest.prompts) == 18 - len(saved)
    assert [[plain(r) for r in g.rollouts] for g in groups] == [
        [plain(r) for r in g.rollouts] for g in whole
    ]


def plain(rollout: Rollout) -> Rollout:
    times = [name for name in rollout.metrics if name.startswith("time/")]
    kept = {name: value for name, value in rollout.metrics.items() if name not in times}
    assert rollout.trace is not None
    steps = tuple(replace(step, started=0.0, seconds=0.0) for step in rollout.trace.steps)
    return replace(rollout, metrics=kept, trace=replace(rollout.trace, steps=steps))


async def test_a_saved_rollout_is_restored_bit_for_bit_and_a_damaged_one_is_refused() -> None:
    (group,) = await collecting(jobs(1), ask, engine(), group_size=2).all()
    for rollout in group.rollouts:
        assert rollout_from_dict(json.loads(json.dumps(rollout_to_dict(rollout)))) == rollout
    values = rollout_to_dict(group.rollouts[0])
    values["samples"][0]["logprobs"].pop()
    with pytest.raises(RunError, match="a saved rollout is damaged"):
        rollout_from_dict(values)
    values = rollout_to_dict(group.rollouts[0])
    values["samples"][0]["runs"] = [[900, 913]]
    with pytest.raises(RunError, match="lies outside"):
        rollout_from_dict(values)


async def test_mistakes_in_the_request_are_one_line() -> None:
    with pytest.raises(ConfigError, match="`group_size=0` runs no rollout"):
        collecting(jobs(1), ask, engine(), group_size=0)
    with pytest.raises(ConfigError, match="there is no driver 'fre'; did you mean free"):
        collecting(jobs(1), ask, engine(), group_size=2, driver="fre")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the task id job0 occurs twice"):
        await collecting([*jobs(1), *jobs(1)], ask, engine(), group_size=2).all()


async def test_an_engine_without_tokens_is_refused_before_training() -> None:
    await check_engine(engine())
    with pytest.raises(EngineRefused, match=r"^scripted returns no token ids"):
        await check_engine(ScriptedEngine(["Hello."]))


async def test_any_engine_will_do_for_validation() -> None:
    scripted = ScriptedEngine(lambda messages, sampling: "1 it is")
    (group,) = await collecting(jobs(1), ask, scripted, group_size=1, needs_tokens=False).all()
    assert group.rollouts[0].reward == 1.0
    assert group.rollouts[0].samples == ()


# --- a trial -----------------------------------------------------------------------------------------


async def returns_text(task: Any, client: Client) -> Any:
    return (await reply_of(client)).strip()


async def returns_a_list(task: Any, client: Client) -> Any:
    return Outcome(answer=[await reply_of(client)])  # type: ignore[arg-type]


async def reports_text(task: Any, client: Client) -> Outcome:
    return Outcome(answer=await reply_of(client), metrics={"name": "x"})  # type: ignore[dict-item]


async def asks_nothing(task: Any, client: Client) -> Outcome:
    return Outcome(answer="42")


async def misspells(task: Any, client: Client) -> Outcome:
    return Outcome(answer=task.qestion)


async def is_cold(task: Any, client: Client) -> Outcome:
    return Outcome(answer=await reply_of(client, temperature=0.1))


async def dislikes_replies(task: Any, client: Client) -> Outcome:
    raise ValueError(await reply_of(client))


async def reply_of(client: Client, **options: Any) -> str:
    messages = [{"role": "user", "content": "Hello."}]
    completion = await client.chat.completions.create(messages=messages, max_tokens=20, **options)
    return completion.choices[0].message.content


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (returns_text, r"returned str; return Outcome\(answer=TEXT\) \(tried on"),
        (returns_a_list, r"returned Outcome\(answer=list\)"),
        (reports_text, "returned str as its metric 'name'"),
        (asks_nothing, "without a call of the client"),
        (misspells, "before its first call: AttributeError"),
        (is_cold, "temperature=0.1"),
    ],
)
async def test_an_agent_that_can_never_work_is_found_by_a_trial(agent: Any, message: str) -> None:
    hello = TokenScript(lambda messages, sampling: "Hi.")
    with pytest.raises(ConfigError, match=message):
        await check_agent(agent, problem(0, seed=0), hello, sampling=RunSampling())


async def test_an_agent_that_fails_because_of_a_reply_passes_its_trial() -> None:
    hello = TokenScript(lambda messages, sampling: "Hi.")
    await check_agent(dislikes_replies, problem(0, seed=0), hello, sampling=RunSampling())
