"""The suites of reading modes in a small form, with an oracle: what modes cost, capture, keep and cite."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.reading_modes import COUNTING, measure, oracle
from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.data.tasks.registry import open_task
from memagent.engines.scripted import ScriptedEngine
from memagent.eval.methods import MethodSettings
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Context, evaluate_examples
from tests.support.hotpot import write_hotpot

BYTES = 'length_tokenizer="bytes"'
"""Lengths that no model has to be there for."""
SMALL = (BYTES, "agent.chunk_tokens=800", "agent.memory_tokens=300")


@pytest.fixture(scope="module")
def modes() -> dict[str, list[ItemRecord]]:
    records = measure("modes", tokens=["24k"], num=1, changes=SMALL)
    return {
        title: [one for one in records if one.method == title]
        for title in dict.fromkeys(record.method for record in records)
    }


def test_every_mode_answers_every_item(modes: dict[str, list[ItemRecord]]) -> None:
    assert sorted(modes) == [
        *("evidence", "no_change", "parallel", "plain", "relevance", "stop_early")
    ]
    for title, records in modes.items():
        assert [(record.error, record.score) for record in records] == [(None, 1.0)] * 4, title


def test_all_evidence_is_captured_retained_quoted_and_cited_and_nothing_else(
    modes: dict[str, list[ItemRecord]],
) -> None:
    for title, records in modes.items():
        assert {(one.captured, one.retained) for one in records} == {(1.0, 1.0)}, title
        if title in ("plain", "no_change"):
            continue
        found = {(one.quoted, one.citation_precision, one.citation_recall) for one in records}
        assert found == {(1.0, 1.0, 1.0)}, title


def test_modes_save_calls_and_tokens(modes: dict[str, list[ItemRecord]]) -> None:
    def total(title: str, name: str) -> float:
        return sum(getattr(record, name) for record in modes[title])

    assert total("no_change", "completion_tokens") < total("plain", "completion_tokens")
    assert total("stop_early", "num_calls") < total("plain", "num_calls")
    assert total("relevance", "num_calls") < total("stop_early", "num_calls")
    assert total("evidence", "num_calls") == total("plain", "num_calls")


def test_items_that_code_counts_are_right_where_a_small_memory_loses_them() -> None:
    records = measure(
        "modes_counting",
        tokens=["24k"],
        num=4,
        changes=[BYTES, "agent.memory_tokens=48", "agent.chunk_tokens=800"],
    )
    assert {record.task for record in records} == set(COUNTING)

    def mean(title: str) -> float:
        scores = [record.score for record in records if record.method == title]
        return sum(scores) / len(scores)

    assert mean("items") == 1.0
    assert mean("items") >= mean("plain") + 0.2


def test_citations_are_the_supporting_facts_of_hotpotqa(tmp_path: Path) -> None:
    files = write_hotpot(tmp_path)
    task = open_task("hotpotqa", {"tokenizer": "bytes", "docs": 30, **files.settings})
    small = {"window": 8000, "chunk_tokens": 1500, "memory_tokens": 900, "quote_tokens": 900}

    async def read(example: Example, context: Context) -> Trace:
        context.settings = MethodSettings.parse({**small, "evidence": True, "no_change": True})
        return await oracle(example, context)

    examples = [task.example(index) for index in range(3)]
    records = asyncio.run(
        evaluate_examples(examples, read, ScriptedEngine([]), title="oracle", seed=0)
    )
    assert [(one.error, one.citation_precision, one.citation_recall) for one in records] == [
        (None, 1.0, 1.0)
    ] * 3
