"""Questions that a model makes up, and readings that a reader wrote itself: what becomes a lesson."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from memagent.agent.reader import Reader
from memagent.data.example import Evidence, Example, Passage
from memagent.engines.scripted import ScriptedEngine
from memagent.tokens.tokenizers import open_tokenizer
from memagent.types import Message, Sampling
from recipes.collect_readings import READING, conversations, right_reading
from recipes.generate_questions import (
    asked,
    fact_records,
    is_told,
    lines_of,
    names_in,
    question_lessons,
)
from recipes.questions import Paragraph, Pool, Question

ANNA = Paragraph(
    title="Anna Berg", sentences=("Anna Berg is a lyric poet.", "She was born in Old Harbour Town.")
)
TOWN = Paragraph(
    title="Old Harbour Town",
    sentences=("Old Harbour Town is a port in Norway.", "It has 900 people."),
)
CARL = Paragraph(title="Carl Lund", sentences=("Carl Lund is a lyric poet from Oslo.",))


def record_of(*paragraphs: Paragraph) -> dict[str, Any]:
    return {
        "id": "generated-1",
        "paragraphs": [{"title": p.title, "sentences": list(p.sentences)} for p in paragraphs],
        "supporting": [[p.title, 0] for p in paragraphs],
    }


def test_facts_are_of_paragraphs_that_name_each_other_or_whose_subjects_are_of_one_kind() -> None:
    pool = Pool([ANNA, TOWN, CARL], banned=set())
    found = list(fact_records(pool, 10, random.Random(1)))
    pairs = {frozenset(one["title"] for one in record["paragraphs"]) for record in found}
    assert pairs == {
        frozenset(("Anna Berg", "Old Harbour Town")),
        frozenset(("Anna Berg", "Carl Lund")),
    }
    [link] = [record for record in found if record["paragraphs"][1]["title"] == TOWN.title]
    assert lines_of(link)[0] == "Anna Berg: She was born in Old Harbour Town."
    for banned in ("Anna Berg", "Old Harbour Town", "Carl Lund"):
        pool = Pool([ANNA, TOWN, CARL], banned={banned})
        assert not any(
            banned in line
            for one in fact_records(pool, 10, random.Random(1))
            for line in lines_of(one)
        )


def test_names_are_rows_of_capitals_and_their_parts() -> None:
    assert names_in("it lies in the Bay of Biscay Area, by day") == {
        "Bay of", "Bay of Biscay", "Bay of Biscay Area", "of Biscay", "of Biscay Area", "Biscay Area",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "answers"),
    [
        ("Question: Where is the home of Anna Berg?\nAnswer: Norway", ["Norway"]),
        ("Question: Are both about ports?\nAnswer: no", ["no"]),
        ("Question: Is it a port in Norway or Sweden?\nAnswer: Norway", ["Norway"]),
        ("Question: Where is the port in Norway?\nAnswer: Norway", None),
        ("Question: Where is it?\nAnswer: Denmark", None),
        ("Question: Tell where it is.\nAnswer: Norway", None),
        ("Where is it?\nNorway", None),
        ("Question: Where is it?\nAnswer: Norway\nQuestion: And then?", None),
    ],
)
def test_a_reply_is_a_question_when_the_facts_and_not_its_words_hold_the_answer(
    reply: str, answers: list[str] | None
) -> None:
    found = asked(record_of(ANNA, TOWN), reply)
    assert (found and found["answers"]) == answers


def test_lessons_go_from_the_facts_to_the_question_and_only_where_its_names_are_told() -> None:
    gold = Paragraph(title="Anna Berg", sentences=ANNA.sentences, support=(1,))
    question = Question(
        id="q",
        text="Where was Anna born?",
        answers=("Old Harbour Town",),
        gold=(gold,),
        hard=(),
        is_titled=True,
    )
    assert is_told(question)
    [line] = question_lessons([question], seed=1)
    prompt, reply = json.loads(line)["messages"]
    assert "\nAnna Berg: She was born in Old Harbour Town.\n" in prompt["content"]
    assert reply["content"] == "Question: Where was Anna born?\nAnswer: Old Harbour Town"
    assert not is_told(replace(question, text="Where was Eve born?"))


def test_a_right_reading_with_all_evidence_becomes_lessons() -> None:
    sentence = "Anna Berg lives in Oslo."
    text = sentence + " Nothing else happens here." * 40
    example = Example(
        id="e", task="questions", question="Where does Anna live?", answers=("Oslo",), grader="strict",
        documents=(Passage(title="", text=text),),
        evidence=(Evidence(document=0, start=0, end=len(sentence), text=sentence),),
    )  # fmt: skip
    notes = iter(["It rains.", f"{sentence} It rains.", sentence, f"{sentence}\nIt rains."])
    answers = iter(["Oslo", "Bergen", "Oslo", "Oslo"])

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        if "<section>" not in prompt:
            return rf"\boxed{{{next(answers)}}}"
        return next(notes) if sentence in prompt.partition("<memory>")[0] else "No change."

    config = READING.model_copy(update={"chunk_tokens": 512, "concurrency": 1})
    reader = Reader(ScriptedEngine(script), tokenizer=open_tokenizer("bytes"), config=config)
    steps = asyncio.run(right_reading(example, reader, 4))
    assert steps is not None
    assert steps[-1].memory == sentence
    found = list(conversations(example, steps, reader))
    assert [one.kind for one in found] == ["read"] * (len(found) - 1) + ["answer"]
    assert [one.messages[-1]["content"] for one in found] == [step.reply for step in steps]
    assert f"<memory>\n{sentence}\n</memory>" in found[1].messages[0]["content"]
    assert example.question in found[-1].messages[0]["content"]
    assert asyncio.run(right_reading(example, reader, 0)) is None
