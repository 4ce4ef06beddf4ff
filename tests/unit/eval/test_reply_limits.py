"""Limits on the length of answers: what is graded, what is generated, what is recorded."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.registry import open_task
from memagent.engines.scripted import ScriptedEngine
from memagent.eval.records import ItemRecord, read_items
from memagent.eval.runner import Context, Trace, evaluate_examples
from memagent.eval.setup import evaluate
from memagent.eval.suites import Suite
from memagent.rl.agents.rewards import open_reward
from memagent.rl.types import Outcome
from memagent.types import Message, Sampling

THINKING = "I go through the text word by word and count each of them. " * 10


def every_word(messages: Sequence[Message], sampling: Sampling) -> str:
    """A list of all coded words of the text, in a box."""
    words = sorted(set(re.findall(r"\b[a-z]{6}\b", text_of(messages))))
    return f"{THINKING}\\boxed{{{', '.join(words)}}}"


def most_frequent(messages: Sequence[Message], sampling: Sampling) -> str:
    """The right answer, after long reasoning."""
    words = re.findall(r"\b[a-z]{6}\b", text_of(messages))
    ranked = sorted(set(words), key=lambda word: -words.count(word))
    return f"{THINKING}\\boxed{{{', '.join(ranked[:3])}}}"


def text_of(messages: Sequence[Message]) -> str:
    return messages[-1]["content"].partition("<section>")[2].partition("</section>")[0]


def fwe(**more: Any) -> dict[str, Any]:
    return {
        "num": 2,
        "length_tokenizer": "bytes",
        "agent": {"window": 200_000},
        "methods": [{"name": "direct"}],
        "tasks": [{"tasks": ["ruler/fwe"], "tokens": ["32k"]}],
        **more,
    }


def records_of(script: Callable[..., str], suite: dict[str, Any], **more: Any) -> list[ItemRecord]:
    return asyncio.run(evaluate(Suite.parse(suite), ScriptedEngine(script), **more))


def test_a_list_of_all_words_no_longer_scores_and_the_record_says_why(tmp_path: Path) -> None:
    records = records_of(every_word, fwe(), run_dir=tmp_path / "run")
    assert all(record.score < 1.0 for record in records)
    stored = list(read_items(tmp_path / "run"))
    assert [record.graded_tokens for record in stored] == [50, 50]
    assert all((record.answer_tokens or 0) > 100 for record in stored)
    assert all(record.is_over_limit for record in stored)


def test_a_model_that_reasons_first_still_scores() -> None:
    for record in records_of(most_frequent, fwe()):
        assert (record.score, record.is_over_limit, record.answer_tokens) == (1.0, False, 8)


def test_the_limit_can_be_set_and_switched_off() -> None:
    off = records_of(every_word, fwe(reply_limit="off"))
    assert [(r.score, r.graded_tokens, r.answer_tokens) for r in off] == [(1.0, None, None)] * 2
    wide = fwe(tasks=[{"tasks": ["ruler/fwe"], "tokens": ["32k"], "max_answer_tokens": 900}])
    assert [r.score for r in records_of(every_word, wide)] == [1.0, 1.0]


def test_a_limit_on_generated_tokens_is_the_limit_of_the_answer_call() -> None:
    limits: list[int] = []

    def reply(messages: Sequence[Message], sampling: Sampling) -> str:
        limits.append(sampling.max_tokens)
        return "no idea"

    reader = fwe(
        reply_limit="generated",
        methods=[{"name": "reader", "settings": {"chunk_tokens": 100_000}}, {"name": "direct"}],
        tasks=[{"tasks": ["ruler/fwe", "ruler/niah_single_1"], "tokens": ["4k"]}],
        num=1,
    )
    records = records_of(reply, reader)
    assert sorted(limits) == [50, 50, 128, 128, 1024, 1024]
    assert {(r.task, r.generated_tokens, r.graded_tokens) for r in records} == {
        ("ruler/fwe", 50, None),
        ("ruler/niah_single_1", 128, None),
    }


def test_a_run_does_not_resume_with_another_limit(tmp_path: Path) -> None:
    records_of(every_word, fwe(num=1), run_dir=tmp_path / "run")
    with pytest.raises(Exception, match=r"cannot resume .*: reply_limit was null, now \"off\""):
        records_of(every_word, fwe(num=1, reply_limit="off"), run_dir=tmp_path / "run")


def test_training_and_its_validation_apply_the_same_limit() -> None:
    example = open_task("ruler/fwe", {"tokens": 32768, "tokenizer": "bytes"}).example(0)
    words = sorted(set(re.findall(r"\b[a-z]{6}\b", example.text())))
    listed = f"\\boxed{{{', '.join(words)}}}"
    reward = open_reward("recall")
    assert asyncio.run(reward(example, Outcome(answer=listed))) < 1.0
    right = f"{THINKING}\\boxed{{{', '.join(example.answers)}}}"
    assert asyncio.run(reward(example, Outcome(answer=right))) == 1.0

    @dataclass
    class Task:
        task: dict[str, str] = field(default_factory=dict)  # a user's, and no name
        answers: tuple[str, ...] = ("Paris",)
        match: str = "any"

    boxed = Outcome(answer="\\boxed{PARIS}")
    assert asyncio.run(open_reward("original_reward")(Task(), boxed)) == 1.0

    async def method(example: Example, context: Context) -> Trace:
        await context.call([{"role": "user", "content": "Which?"}])
        return context.trace()

    engine = ScriptedEngine(lambda messages, sampling: listed)
    (record,) = asyncio.run(evaluate_examples([example], method, engine, title="agent", seed=1))
    assert record.score < 1.0
    assert record.graded_tokens == 50
