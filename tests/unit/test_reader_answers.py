"""Training the 1.5B reader's answers: tasks made of memories, and the agent that answers from them."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.reader import Reader
from memagent.data.example import Example, Passage
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.rewards import open_reward
from memagent.rl.types import Outcome
from recipes.collect_memories import Noted
from recipes.collect_memories import noted as read_memories
from recipes.collect_memories import tasks as tasks_of

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "train" / "reader_1.5b"


def example(name: str, answer: str, **values: Any) -> Example:
    return Example(id=name, question=f"Who is {name}?", answers=(answer,), **values)


def noted(name: str, answer: str, memory: str) -> Any:
    text = Passage(title="", text="A text.")
    return Noted(example(name, answer, documents=(text,)), memory)


def test_memories_that_hold_the_answer_become_tasks_without_a_text() -> None:
    found = [
        noted("a", "Ann", "Here is ANN.\nAnd Bob."),
        noted("b", "Cid", "Nobody."),
        noted("c", "yes", "It may be."),
        noted("d", "Dan", " "),
    ]
    tasks = list(tasks_of(found, seed=1))
    assert [task.id for task in tasks] == ["a/memory", "c/memory"]
    assert tasks == list(tasks_of(found[::-1], seed=1)), "the order of reading does not matter"
    for task, lines in zip(tasks, (["Here is ANN.", "And Bob."], ["It may be."]), strict=True):
        kept = task.metadata["memory"].splitlines()
        assert [line for line in kept if line in lines] == lines
        assert task.passages == ()


def test_lines_of_other_questions_are_added_but_never_one_that_holds_the_answer() -> None:
    others = [noted(f"x{n}", "yes", f"Line {n} of Eve.") for n in range(20)]
    others += [noted(f"y{n}", "yes", f"Line {n} of Fay.") for n in range(20)]
    first = [noted(f"e{n}", "Eve", "It is Eve.") for n in range(40)]
    memories = [
        task.metadata["memory"].splitlines()
        for task in tasks_of([*others, *first], seed=1)
        if task.id.startswith("e")
    ]
    assert not any("of Eve" in line for lines in memories for line in lines)
    added = sum(len(lines) > 1 for lines in memories)
    assert 8 <= added <= 24, "two in five"


class Client:
    """A client with a fixed reply that keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.chat = self.completions = self

    async def create(self, **asked: Any) -> Any:
        self.asked.append(asked)
        message = type("Message", (), {"content": "Ann.\n\\boxed{Ann}"})
        choice = type("Choice", (), {"message": message, "finish_reason": "stop"})
        return type("Reply", (), {"choices": [choice]})


def test_a_task_with_a_memory_is_answered_in_one_call_with_the_prompt_of_reading() -> None:
    agent = open_agent(f"{FOLDER / 'agent.py'}:agent", {"prompts": "add", "answer_tokens": 99})
    client: Any = Client()
    task = example("a", "Ann", metadata={"memory": "Here is Ann."})
    outcome = asyncio.run(agent(task, client))
    (asked,) = client.asked
    assert outcome.answer == "Ann.\n\\boxed{Ann}"
    assert asked["max_tokens"] == 99
    assert "<memory>\nHere is Ann.\n</memory>" in asked["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("\\boxed{Ann Lee}", 1.0),
        ("\\boxed{Ann}", 1 / 3),  # half of the words, all of them right: F1 is 2/3
        ("Ann Lee", 0.5),  # without a box
        ("\\boxed{Bob}", 0.0),
    ],
)
def test_the_reward_is_the_mean_of_the_strict_grade_and_the_overlap_of_words(
    reply: str, value: float
) -> None:
    reward = open_reward(f"{FOLDER / 'agent.py'}:reward")
    task = example("a", "Ann Lee")
    assert asyncio.run(reward(task, Outcome(answer=reply))) == pytest.approx(value)


def test_the_reward_of_an_unanswerable_question_is_for_saying_so() -> None:
    reward = open_reward(f"{FOLDER / 'agent.py'}:reward")
    task = Example(id="a", question="Who?", answers=(), grader="unanswerable")
    said, invented = "\\boxed{The text does not tell.}", "\\boxed{Ann}"
    values = [asyncio.run(reward(task, Outcome(answer=one))) for one in (said, invented)]
    assert values == [1.0, 0.0]


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_the_last_memory_of_each_text_is_collected_until_the_time_is_over(seconds: float) -> None:
    async def collect() -> list[Any]:
        reader = Reader(
            "scripted", window=4096, chunk_tokens=200, memory_tokens=100, answer_tokens=50
        )
        texts = [Passage(title="", text=f"The secret of {n} is {n}7. " * 60) for n in range(3)]
        examples = [
            example(f"secret of {n}", f"{n}7", documents=(text,)) for n, text in enumerate(texts)
        ]
        reading = read_memories(examples, reader, concurrency=2, until=time.monotonic() + seconds)
        return [one async for one in reading]

    found = asyncio.run(collect())
    assert len(found) == (3 if seconds > 0 else 0)
    assert all(one.example.answers[0] in one.memory for one in found)
