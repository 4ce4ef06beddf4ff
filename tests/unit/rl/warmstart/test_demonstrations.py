"""Demonstrations: the agents' own prompts, replies that earn the reward, and files of conversations."""

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example, Passage
from memagent.data.tasks.arithmetic import problem
from memagent.data.tasks.registry import open_task
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, DataError, MemagentError
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.rewards import open_reward
from memagent.rl.agents.session import Session
from memagent.rl.types import Outcome
from memagent.rl.warmstart.conversations import Conversation, read_conversations
from memagent.rl.warmstart.lessons import demonstrations_for, texts_for
from memagent.rl.warmstart.traces import TraceRefused
from memagent.tokens.tokenizers import ByteTokenizer
from memagent.types import Message

BYTES = ByteTokenizer()
READING = {"window": 2000, "chunk_tokens": 120, "memory_tokens": 90, "answer_tokens": 40}
COLOURS = open_task("small/colours", {"sentences": 30, "others": 3, "tokenizer": "bytes"})
CASES: list[tuple[str, dict[str, Any], Example]] = [
    *(("calculator", {}, problem(index, seed=1)) for index in range(8)),
    *(("memory", READING, COLOURS.example(index)) for index in range(8)),
    *(
        ("memory", {**READING, "mode": "parallel", "window": 3000}, COLOURS.example(index))
        for index in range(8)
    ),
    ("single", {"system": "Be brief."}, COLOURS.example(0)),
]


def replayed(
    agent: str, settings: dict[str, Any], example: Example, shown: list[Conversation]
) -> tuple[list[list[Message]], Outcome]:
    """What the agent sends when the model replies as shown, and what comes of it."""
    replies = [
        message["content"]
        for one in shown
        for message in one.messages
        if message["role"] == "assistant"
    ]
    engine = ScriptedEngine(replies)
    engine.tokenizer = "bytes"
    session = Session(engine, task_id="t", index=0, seed=0, needs_tokens=False)

    async def run() -> Outcome:
        return await open_agent(agent, settings)(example, Client(session))

    return engine.prompts, asyncio.run(run())


@pytest.mark.parametrize(("agent", "settings", "example"), CASES)
def test_prompts_are_those_of_the_agent_and_replies_earn_the_reward(
    agent: str, settings: dict[str, Any], example: Example
) -> None:
    shown = demonstrations_for(agent, settings, tokenizer=BYTES)(example)
    prompts, outcome = replayed(agent, settings, example, shown)
    sent = [
        list(one.messages[:place])
        for one in shown
        for place, message in enumerate(one.messages)
        if message["role"] == "assistant"
    ]
    assert sent == prompts
    assert {one.id for one in shown} == {example.id}
    reward = open_reward("strict")
    assert asyncio.run(reward(example, outcome)) == 1.0


PARALLEL = {
    "mode": "parallel",
    "window": 6000,
    "chunk_tokens": 1000,
    "memory_tokens": 400,
    "answer_tokens": 200,
}


def test_what_the_first_fact_leads_to_is_noted_in_the_second_round_of_parallel_reading() -> None:
    task = open_task("beyond/two_hop", {"tokens": 8000, "tokenizer": "bytes", "seed": 2})
    example = task.example(0)
    shown = demonstrations_for("memory", PARALLEL, tokenizer=BYTES)(example)
    prompts, outcome = replayed("memory", PARALLEL, example, shown)
    assert prompts == [list(one.messages[:-1]) for one in shown]
    assert outcome.trace is not None
    first, second = (step for step in outcome.trace.steps if step.kind == "merge")
    assert (first.missing, second.missing) == ("what the memory leads to", None)
    assert outcome.metrics["rounds"] == 2
    notes = [step for step in outcome.trace.steps if step.kind == "read" and step.memory]
    assert [step.round for step in notes] == [1, 2]
    assert asyncio.run(open_reward("strict")(example, outcome)) == 1.0


def test_the_calculator_is_asked_and_its_result_is_the_answer() -> None:
    example = problem(0, seed=7)
    (shown,) = demonstrations_for("calculator", tokenizer=BYTES)(example)
    assert [message["role"] for message in shown.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    request, result, said = (message["content"] for message in shown.messages[2:])
    assert request == f"<calc>{example.metadata['expression']}</calc>"
    assert result == example.answers[0]
    assert said == f"\\boxed{{{result}}}"


def test_all_answers_are_demonstrated_where_all_are_required() -> None:
    example = Example(
        id="e", task="t", question="Which?", answers=("a", "b"), match="all", documents=()
    )
    (shown,) = demonstrations_for("single", tokenizer=BYTES)(example)
    assert shown.messages[-1]["content"] == "\\boxed{a, b}"


@pytest.mark.parametrize(
    ("agent", "settings", "example", "reason"),
    [
        ("mine.py:agent", {}, problem(0, seed=0), "use files of conversations for its warm start"),
        ("calculater", {}, problem(0, seed=0), "did you mean calculator"),
        ("calculator", {"max_turn": 2}, problem(0, seed=0), "did you mean max_turns"),
        ("calculator", {"max_turns": 1}, problem(0, seed=0), "takes 2 replies.*raise `max_turns`"),
        ("calculator", {"max_tokens": 8}, problem(0, seed=0), "`max_tokens=8`.*raise `max_tokens`"),
        ("calculator", {}, COLOURS.example(0), "no expression in its metadata"),
        (
            "single",
            {},
            Example(id="e", task="t", question="?", answers=(), documents=(Passage(text="a"),)),
            "no accepted answer",
        ),
        ("memory", {**READING, "memory_tokens": 9}, COLOURS.example(0), "raise `memory_tokens`"),
    ],
)
def test_examples_that_cannot_be_demonstrated_are_refused_in_one_line(
    agent: str, settings: dict[str, Any], example: Example, reason: str
) -> None:
    with pytest.raises(MemagentError, match=reason) as caught:
        demonstrations_for(agent, settings, tokenizer=BYTES)(example)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("agent", "settings", "example"), [CASES[0], CASES[8], CASES[-1]])
def test_texts_hold_all_words_of_the_demonstrations(
    agent: str, settings: dict[str, Any], example: Example
) -> None:
    known = set(re.findall(r"[^\W\d]+", " ".join(texts_for(agent, settings, example))))
    for one in demonstrations_for(agent, settings, tokenizer=BYTES)(example):
        for message in one.messages:
            assert set(re.findall(r"[^\W\d]+", message["content"])) <= known


def test_texts_of_an_agent_in_a_file_are_those_of_the_example() -> None:
    example = COLOURS.example(0)
    texts = texts_for("mine.py:agent", {}, example)
    assert texts == [example.text(), example.question, *example.answers]


# --- files ------------------------------------------------------------------------------------------

USER, REPLY = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_conversations_are_grouped_by_example(tmp_path: Path) -> None:
    path = written(
        tmp_path / "traces.jsonl",
        {"id": "x", "task": "t", "step": 0, "kind": "read", "messages": [USER, REPLY]},
        {"id": "x", "task": "t", "step": 1, "kind": "answer", "messages": [USER, REPLY]},
        {"messages": [USER, REPLY]},
        {"messages": [USER, REPLY, USER, REPLY]},
    )
    packed = tmp_path / "traces.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    found = read_conversations(path)
    assert [len(group) for group in found] == [2, 1, 1]
    assert {one.id for one in found[0]} == {"x"}
    assert found[2][0].messages == (USER, REPLY, USER, REPLY)
    assert [len(group) for group in read_conversations(packed)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a conversation is an object"),
        ("{}", "line 2: there are no messages"),
        ('{"messages": []}', "line 2: there are no messages"),
        ('{"messages": ["hello"]}', "line 2: a message is an object with role and content"),
        ('{"messages": [{"role": "user"}]}', "line 2: a message needs a role and a text"),
        (
            '{"messages": [{"role": "user", "content": "a", "tool_calls": []}]}',
            "line 2: a message has only role and content; write tool_calls into the content",
        ),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "line 2: there is no role 'bot'"),
        (json.dumps({"messages": [USER]}), "line 2: there is no message of the assistant"),
        (json.dumps({"messages": [REPLY, USER]}), "line 2: the first message is the assistant's"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps({"messages": [USER, REPLY]}) + f"\n{line}\n")
    with pytest.raises(DataError, match=reason):
        read_conversations(path)


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text("[]")
    with pytest.raises(DataError, match="holds no conversation"):
        read_conversations(path)
    with pytest.raises(DataError, match="does not exist"):
        read_conversations(tmp_path / "missing.jsonl")


TALK = r"""
from memagent.rl.types import Outcome


async def agent(task, client):
    messages = [{"role": "user", "content": task.question}]
    plan = await client.chat.completions.create(messages=messages, max_tokens=40)
    said = plan.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    await client.chat.completions.create(messages=messages, max_tokens=40)
    fresh = [{"role": "user", "content": f"Answer from: {said}"}]
    last = await client.chat.completions.create(messages=fresh, max_tokens=40)
    return Outcome(answer=last.choices[0].message.content)


def replies(task):
    if task.id.endswith("/1"):
        return None
    return ["A plan.", "More.", f"\\boxed{{{task.answers[0]}}}"]


def few(task):
    return ["A plan."]


def text(task):
    return "A plan."


def broken(task):
    return [task.nothing]
"""


@pytest.fixture
def talk(tmp_path: Path) -> str:
    file = tmp_path / "talk.py"
    file.write_text(TALK)
    return str(file)


def test_a_users_agent_is_played_with_the_replies_of_its_own_rule(talk: str) -> None:
    example = problem(0, seed=7)
    show = demonstrations_for(f"{talk}:agent", tokenizer=BYTES, replies=f"{talk}:replies")
    first, second = show(example)
    assert [message["content"] for message in first.messages] == [
        example.question, "A plan.", "And now?", "More.",
    ]  # fmt: skip
    assert [message["content"] for message in second.messages] == [
        "Answer from: A plan.", f"\\boxed{{{example.answers[0]}}}",
    ]  # fmt: skip
    with pytest.raises(TraceRefused, match="has no replies"):
        show(problem(1, seed=7))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("few", "the agent asks for more than the 1 replies"),
        ("text", "returned str .* return a list of texts"),
        ("broken", "fails on .*AttributeError.*talk.py, line"),
        ("missing", "has no missing"),
    ],
)
def test_mistakes_in_a_users_rule_are_one_line(talk: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        demonstrations_for(f"{talk}:agent", tokenizer=BYTES, replies=f"{talk}:{function}")(
            problem(0, seed=7)
        )
    assert "\n" not in str(raised.value)
