"""What became of the evidence, in records and tables of an evaluation."""

import asyncio
from collections.abc import Sequence

from memagent.agent.trace import Trace
from memagent.cli.eval.output import results_text
from memagent.data.example import Evidence, Example, Passage
from memagent.engines.scripted import ScriptedEngine
from memagent.eval.methods import METHODS, MethodSettings, map_reduce
from memagent.eval.records import ItemRecord
from memagent.eval.report.rows import Entry, result_rows
from memagent.eval.report.tables import results_table as report_table
from memagent.eval.runner import Context, evaluate_examples
from memagent.types import Message, Sampling

FACTS = ("The mill was sold in 1873.", "Anna bought it.")
FILLER = " ".join(["Nothing happens here at all."] * 12)


def example() -> Example:
    text = f"{FILLER} {FACTS[0]} {FILLER} {FACTS[1]} {FILLER}"
    spans = [(text.index(fact), text.index(fact) + len(fact)) for fact in FACTS]
    return Example(
        id="mill",
        task="custom",
        question="Who bought the mill?",
        answers=("Anna",),
        documents=(Passage(text=text),),
        evidence=tuple(
            Evidence(document=0, start=start, end=end, text=fact)
            for fact, (start, end) in zip(FACTS, spans, strict=True)
        ),
    )


def script(messages: Sequence[Message], sampling: Sampling) -> str:
    """Quotes the facts of a section and forgets all but the last one."""
    prompt = messages[-1]["content"]
    if "Sources:" in prompt:
        return "Anna\nSources: 2, 3" if "[3]" in prompt else "Anna\nSources: 2"
    found = [fact for fact in FACTS if fact in prompt.split("<memory>")[0]]
    if not found:
        return "No change."
    extra = "<quote>Nothing happens here at all.</quote>" if found == [FACTS[1]] else ""
    return "".join(f"<quote>{fact}</quote>" for fact in found) + extra + found[-1]


def evaluated(method: str, **settings: object) -> ItemRecord:
    read = METHODS[method]

    async def run(example: Example, context: Context) -> Trace:
        small = {"window": 4000, "chunk_tokens": 100, "memory_tokens": 100, "answer_tokens": 60}
        context.settings = MethodSettings.parse({**small, "prompts": "keep", **settings})
        return await read(example, context)

    [record] = asyncio.run(
        evaluate_examples([example()], run, ScriptedEngine(script), title=method, seed=0)
    )
    assert record.error is None
    return record


def test_the_reader_reports_what_was_captured_retained_quoted_and_cited() -> None:
    record = evaluated("reader", evidence=True)
    assert (record.captured, record.retained, record.quoted) == (1.0, 0.5, 1.0)
    assert (record.citation_precision, record.citation_recall) == (0.5, 0.5)
    assert record.answer == "Anna"


def test_without_quotes_only_the_memory_counts() -> None:
    record = evaluated("reader")
    assert (record.captured, record.retained) == (1.0, 0.5)
    assert (record.quoted, record.citation_precision, record.citation_recall) == (None,) * 3


def test_methods_without_a_memory_report_nothing() -> None:
    assert map_reduce is METHODS["map_reduce"]
    record = evaluated("direct")
    assert (record.captured, record.retained) == (None, None)


def test_tables_show_the_columns_that_have_values() -> None:
    plain, quoting = evaluated("reader"), evaluated("reader", evidence=True)
    rows = result_rows([Entry("reader", plain), Entry("quoting", quoting)])
    head, *lines = (line.split("  ") for line in results_text(rows).splitlines())
    assert [cell.strip() for cell in head if cell.strip()][-5:] == [
        "captured",
        "retained",
        "quoted",
        "cited right",
        "cited of all",
    ]
    assert len(lines) == 2
    table = report_table(rows, ())
    assert table.records()[1]["citation_recall"] == 0.5
    assert "retained" in table.heads
    assert "quoted" not in report_table(rows[:1], ()).heads
