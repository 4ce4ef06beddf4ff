"""Training the 1.5B reader's answers: tasks made of memories, and the agent that answers from them."""

from __future__ import annotations

import asyncio
import runpy
import time
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.evidence.paragraphs import HEADING
from memagent.agent.reader import Reader
from memagent.config import AgentConfig
from memagent.data.example import Evidence, Example, Passage, body_starts
from memagent.documents.tokenizers import ByteTokenizer
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.rewards import open_reward
from memagent.rl.types import Outcome

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "train" / "reader_1.5b"
COLLECT: dict[str, Any] = runpy.run_path(str(FOLDER / "collect_memories.py"))

MEMORIES: dict[str, Any] = runpy.run_path(str(FOLDER.parent / "memories.py"))


def example(name: str, answer: str, **values: Any) -> Example:
    return Example(id=name, question=f"Who is {name}?", answers=(answer,), **values)


def noted(name: str, answer: str, memory: str) -> Any:
    text = Passage(title="", text="A text.")
    return COLLECT["Noted"](example(name, answer, documents=(text,)), memory)


def test_memories_that_hold_the_answer_become_tasks_without_a_text() -> None:
    found = [
        noted("a", "Ann", "Here is ANN.\nAnd Bob."),
        noted("b", "Cid", "Nobody."),
        noted("c", "yes", "It may be."),
        noted("d", "Dan", " "),
    ]
    tasks = list(COLLECT["tasks"](found, seed=1))
    assert [task.id for task in tasks] == ["a/memory", "c/memory"]
    assert tasks == list(COLLECT["tasks"](found[::-1], seed=1)), (
        "the order of reading does not matter"
    )
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
        for task in COLLECT["tasks"]([*others, *first], seed=1)
        if task.id.startswith("e")
    ]
    assert not any("of Eve" in line for lines in memories for line in lines)
    added = sum(len(lines) > 1 for lines in memories)
    assert 8 <= added <= 24, "two in five"


def tasks_of(
    texts: list[str], evidence: list[str], likely: list[Any], answer: str, **agent: int
) -> list[str]:
    """Sixty memories of one question."""
    passages = tuple(Passage(title="", text=text) for text in texts)
    starts = body_starts(passages)
    gold = [
        Evidence(
            document=place,
            start=(start := texts[place].index(text)),
            end=start + len(text),
            text=text,
        )
        for place, text in enumerate(evidence)
    ]
    candidates = [(starts[place] + len(texts[place]), text, rank) for place, text, rank in likely]
    values = {
        "documents": passages,
        "evidence": tuple(gold),
        "metadata": {"candidates": candidates},
    }
    config = AgentConfig(window=2000, chunk_tokens=500, memory_tokens=80, answer_tokens=20, **agent)  # type: ignore[arg-type]
    examples = [(example(f"a{number}", answer, **values), None) for number in range(60)]
    tasks = MEMORIES["memory_tasks"](examples, config, ByteTokenizer(), seed=1)
    return [task.metadata["memory"] for task in tasks]


def test_paragraphs_stand_beside_memories_and_may_alone_hold_the_answer() -> None:
    texts = [
        "Ann is a singer of some fame. She was born in Rome.",
        "Bo is a town in the far north. It is old.",
    ]
    likely = [(1, "Bo is a town in the far north.", 0.5)]
    memories = tasks_of(texts, ["She was born in Rome."], likely, "Rome", paragraph_tokens=300)
    parts = [memory.partition(f"\n\n{HEADING}\n") for memory in memories]
    beside = [(notes, paragraphs) for notes, _, paragraphs in parts if paragraphs]
    assert 40 <= len(beside) <= 56, "four in five"
    assert all(f"Document 1:\n{texts[0]}" in paragraphs for _, paragraphs in beside)
    assert all(
        ("Bo is a town" in notes) == (texts[1] in paragraphs) for notes, paragraphs in beside
    )
    vague = [notes for notes, _ in beside if "Rome" not in notes]
    assert 4 <= len(vague) <= 20, "some of three in ten"
    assert all("Rome" in notes for notes, _, paragraphs in parts if not paragraphs)


def test_memories_of_tasks_have_the_evidence_among_beginnings_of_likely_paragraphs() -> None:
    texts = [
        "Ann was born in Rome. She sang.",
        "Rome is old.",
        "Bo is a town. Bo has one wall.",
        "Cy.",
    ]
    likely = [(2, "Bo has one wall.", 0.5)]
    found = tasks_of(texts, ["Ann was born in Rome.", "Rome is old."], likely, "Rome")
    memories = [memory.splitlines() for memory in found]
    assert len(memories) == 60
    assert all(set(lines) & {texts[0], "Ann was born in Rome.", texts[1]} for lines in memories)
    assert not any("Cy." in lines for lines in memories), "nothing in it is likely"
    misleading = [set(lines) & {"Bo is a town.", texts[2]} for lines in memories]
    assert {frozenset(some) for some in misleading} == {
        frozenset(),
        frozenset({"Bo is a town."}),
        frozenset({texts[2]}),
    }
    assert len({tuple(lines) for lines in memories if len(lines) == 3}) > 6, "in any order"


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
        reading = COLLECT["noted"](
            examples, reader, concurrency=2, until=time.monotonic() + seconds
        )
        return [one async for one in reading]

    found = asyncio.run(collect())
    assert len(found) == (3 if seconds > 0 else 0)
    assert all(one.example.answers[0] in one.memory for one in found)
