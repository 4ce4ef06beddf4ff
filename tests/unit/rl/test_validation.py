"""Validation: any agent, by the evaluation's runner, with the reward of training and intervals."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example, Passage
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, EngineError
from memagent.eval.records import ItemRecord
from memagent.eval.runner import score_interval
from memagent.rl.agents.api import Agent, open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.rewards import Reward, open_reward
from memagent.rl.agents.session import Session
from memagent.rl.settings import ValidationSettings
from memagent.rl.types import Outcome
from memagent.rl.validation import Validation
from memagent.types import Completion, Message, Sampling, Usage
from tests.conftest import prose
from tests.support.token_engine import TokenTakingScript, in_pairs

SMALL = {"window": 4000, "chunk_tokens": 300, "memory_tokens": 100, "answer_tokens": 50}


class Knowing(BaseEngine):
    """Answers with what stands after "answer:" in the prompt; fails where it stands "broken"."""

    def __init__(self) -> None:
        self.model, self.tokenizer = "knowing", "bytes"
        self.asked: list[Sampling] = []

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        await asyncio.sleep(0.001 * (len(self.asked) % 3))
        text = messages[-1]["content"]
        if "broken" in text:
            raise EngineError("the line is dead")
        said = text.partition("answer:")[2].split()
        return Completion(
            text=rf"It is \boxed{{{said[0] if said else 'unknown'}}}.",
            finish_reason="stop",
            usage=Usage(calls=1, prompt_tokens=len(text), completion_tokens=7),
        )

    async def aclose(self) -> None:
        pass


def example(number: int, **changes: Any) -> Example:
    values: dict[str, Any] = {
        "id": f"e{number}",
        "task": "test/ask",
        "question": f"answer: {number} What is it?",
        "answers": (str(number),),
        "documents": (),
    }
    return Example(**{**values, **changes})


def wrong(number: int, **changes: Any) -> Example:
    return example(number, answers=("something else",), **changes)


async def ask(task: Example, client: Client) -> Outcome:
    reply = await client.chat.completions.create(
        messages=[{"role": "user", "content": task.question}], temperature=0.9, max_tokens=30
    )
    said = reply.choices[0].message.content
    return Outcome(answer=said, metrics={"length": len(said)}, record={"said": said})


def validation(
    examples: Sequence[Example], agent: Agent = ask, reward: Reward | None = None, **settings: Any
) -> Validation:
    parsed = ValidationSettings.parse({"tasks": [{"tasks": ["ruler/vt"]}], **settings})
    return Validation(
        parsed, agent, reward or open_reward("strict"), examples, seed=4, max_tokens=50
    )


async def test_rewards_are_averaged_with_their_interval() -> None:
    engine = Knowing()
    examples = [example(number) for number in range(6)] + [wrong(6), wrong(7)]
    result = await validation(examples).run(engine)
    metrics = result.metrics
    assert metrics["reward"] == 0.75
    # Wilson's interval for 6 of 8
    assert metrics["reward_low"] == pytest.approx(0.4093, abs=1e-4)
    assert metrics["reward_high"] == pytest.approx(0.9285, abs=1e-4)
    assert metrics["num_examples"] == 8
    assert metrics["num_failed"] == 0
    assert metrics["agent/calls"] == 1
    assert metrics["agent/length"] == len(r"It is \boxed{0}.")
    assert metrics["agent/sampled_tokens"] == 7
    assert metrics["test/ask/reward"] == 0.75


async def test_the_temperature_of_the_run_overrides_the_agent() -> None:
    engine = Knowing()
    await validation([example(1)], temperature=0.25).run(engine)
    assert [sampling.temperature for sampling in engine.asked] == [0.25]
    assert [sampling.max_tokens for sampling in engine.asked] == [30]


async def test_records_come_in_one_order_and_can_be_written() -> None:
    examples = [example(number, num_tokens=number * 7 % 5) for number in range(9)]
    first, again = [await validation(examples).run(Knowing()) for _ in range(2)]
    assert [record["id"] for record in first.records] == [f"e{number}" for number in range(9)]
    assert [without_times(record) for record in first.records] == [
        without_times(record) for record in again.records
    ]
    record = json.loads(json.dumps(first.records[3]))
    assert record["answer"] == r"It is \boxed{3}."
    assert record["score"] == 1.0
    assert record["grader"] == "reward"
    assert record["metadata"]["method"]["record"] == {"said": r"It is \boxed{3}."}
    assert ItemRecord.from_dict(record).task == "test/ask"
    assert [step["kind"] for step in record["trace"]["steps"]] == ["answer"]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if name not in ("seconds", "trace")}
    return kept | {"replies": [step["reply"] for step in record["trace"]["steps"]]}


async def test_a_failed_item_counts_as_zero_in_all_rewards() -> None:
    examples = [example(number) for number in range(3)]
    examples.append(example(3, question="broken"))
    result = await validation(examples, graders=("lenient",)).run(Knowing())
    assert result.metrics["num_failed"] == 1
    assert result.metrics["reward"] == result.metrics["lenient"] == 0.75
    assert result.metrics["agent/length"] == len(r"It is \boxed{0}.")
    (failed,) = [record for record in result.records if record["status"] == "failed"]
    assert failed["trace"]["steps"] == []
    assert (failed["error"], failed["score"]) == ("the line is dead", 0.0)


async def test_an_agent_or_a_reward_that_raises_fails_its_item_only() -> None:
    async def agent(task: Example, client: Client) -> Outcome:
        if task.id == "e0":
            raise RuntimeError("no idea")
        return "nothing" if task.id == "e1" else await ask(task, client)  # type: ignore[return-value]

    async def reward(task: Example, outcome: Outcome) -> float:
        if task.id == "e2":
            raise ValueError("cannot tell")
        return 0.5

    result = await validation([example(n) for n in range(4)], agent, reward).run(Knowing())
    assert [record["error"] for record in result.records] == [
        "RuntimeError: no idea",
        "the agent returned str; return Outcome(answer=TEXT)",
        "ValueError: cannot tell",
        None,
    ]
    assert result.metrics["reward"] == 0.125
    num_steps = [len(record["trace"]["steps"]) for record in result.records]
    assert num_steps == [0, 0, 1, 1], "calls of a failed item are kept"


async def test_an_engine_that_never_answers_ends_the_validation() -> None:
    with pytest.raises(EngineError, match="the line is dead"):
        await validation([example(n, question="broken") for n in range(6)]).run(Knowing())


async def test_tasks_and_lengths_have_their_own_rewards() -> None:
    examples = [
        example(0, task="a", target_tokens=100),
        wrong(1, task="a", target_tokens=200),
        wrong(2, task="a", target_tokens=200),
        example(3, task="b", target_tokens=100),
    ]
    metrics = (await validation(examples).run(Knowing())).metrics
    assert metrics["reward"] == 0.5
    assert metrics["a/reward"] == pytest.approx(1 / 3)
    assert (metrics["a/100/reward"], metrics["a/200/reward"], metrics["b/reward"]) == (1, 0, 1)
    assert "b/100/reward" not in metrics
    assert 0 < metrics["b/reward_low"] < 1


async def test_the_memory_agent_is_validated_as_it_is_trained() -> None:
    text = prose(15) + " The answer: 42 is known. " + prose(5, seed=1)
    asked = example(1, question="What?", answers=("unknown",), documents=(Passage(text=text),))
    result = await validation([asked], open_agent("memory", SMALL)).run(Knowing())
    assert result.metrics["num_failed"] == 0, result.records[0]["error"]
    assert result.metrics["agent/sections"] >= 3
    assert result.metrics["agent/calls"] == result.metrics["agent/sections"] + 1
    assert result.records[0]["num_calls"] == result.metrics["agent/calls"]
    *reads, answer = result.records[0]["trace"]["steps"]
    assert len(reads) == result.metrics["agent/sections"]
    assert {step["memory"] for step in reads} == {r"It is \boxed{unknown}.", r"It is \boxed{42}."}
    assert [step["section"]["start"] for step in reads[1:]] == [
        step["section"]["end"] for step in reads[:-1]
    ]
    assert (answer["kind"], answer["usage"]["completion_tokens"]) == ("answer", 7)


async def test_a_users_reward_runs_in_the_pool_that_is_in_use(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\ndef score(task, outcome):\n    return float(os.getpid() != {os.getpid()})\n"
    )
    with WorkerPool(1) as pool:
        pool.use()
        result = await validation([example(1)], reward=open_reward(f"{file}:score")).run(Knowing())
    assert result.metrics["reward"] == 1.0


def test_missing_examples_and_unknown_graders_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"no examples; raise `validation\.num`"):
        validation([])
    with pytest.raises(ConfigError, match="did you mean lenient"):
        validation([example(1)], graders=("leniend",))


async def test_several_attempts_at_a_question_are_one_observation() -> None:
    """Even seeds are right: of four attempts at each question some are."""
    engine = Knowing()
    seeds: dict[str, list[int]] = {}

    one_by_one = asyncio.Lock()

    async def agent(task: Example, client: Client) -> Outcome:
        async with one_by_one:
            said = (await ask(task, client)).answer
            sampling = engine.asked[-1]
        assert sampling.seed is not None
        seeds.setdefault(task.id, []).append(sampling.seed)
        return Outcome(answer=said if len(seeds[task.id]) % 2 else "wrong")

    examples = [example(0, task="a"), example(1, task="b")]
    settings = {"samples": 4, "temperature": 1.0, "top_p": 0.7}
    result = await validation(examples, agent, **settings).run(engine)
    metrics = result.metrics
    assert (metrics["num_examples"], metrics["num_attempts"]) == (2, 8)
    assert metrics["reward"] == metrics["a/reward"] == metrics["pass_at_1"] == 0.5
    assert metrics["best_reward"] == metrics["pass_at_4"] == 1.0
    assert metrics["pass_at_2"] == pytest.approx(1 - 1 / 6)
    assert {sampling.top_p for sampling in engine.asked} == {0.7}
    assert all(len(set(some)) == 4 for some in seeds.values()), "each attempt has its own seed"
    of_two = score_interval([0.5, 0.5])
    assert (metrics["reward_low"], metrics["reward_high"]) == (of_two.low, of_two.high)
    assert [record["id"] for record in result.records] == ["e0"] * 4 + ["e1"] * 4


def test_several_attempts_need_a_temperature() -> None:
    with pytest.raises(ConfigError, match=r"`samples=4` would all be the same at `temperature=0`"):
        validation([example(1)], samples=4)


async def test_a_conversation_continues_the_sampled_tokens_as_in_training() -> None:
    """The engine samples tokens that its text would not be encoded to."""

    async def talk(task: Example, client: Client) -> Outcome:
        messages = [{"role": "user", "content": task.question}]
        for _ in range(2):
            completion = await client.chat.completions.create(messages=messages, max_tokens=50)
            reply = completion.choices[0].message.content
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "Go on."},
            ]
        return Outcome(answer=reply)

    def engine() -> TokenTakingScript:
        return TokenTakingScript(lambda messages, sampling: "Abcd", drift=True)

    trained, validated = engine(), engine()
    session = Session(trained, task_id="e1", index=0, seed=4)
    await talk(example(1), Client(session))
    result = await validation([example(1)], talk).run(validated)
    assert result.metrics["num_failed"] == 0
    assert validated.prompts == trained.prompts
    assert tuple(in_pairs("Abcd")) == validated.prompts[1][len(trained.prompts[0]) :][:2]
