"""Laws of evidence, early stops and orders, over random texts and replies."""

import json
import re
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.agent.budget import measure_budget
from memagent.agent.memory import rewrite
from memagent.agent.prompts import PROMPT_SETS, open_prompts, prompts_for
from memagent.agent.reader import Reader
from memagent.agent.trace import Section, Step, Trace
from memagent.cli.ask_output import print_answers
from memagent.config import AgentConfig
from memagent.documents.chunking import split
from memagent.documents.document import Document
from memagent.documents.tokenizers import ByteTokenizer
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import EmptyAnswer
from memagent.types import Message, Sampling

pieces = st.sampled_from(
    [
        "The mill was sold in 1873.",
        "the MILL  was\nsold",
        "Ada | 14 | Ada sold 14 crates.",
        "<quote>",
        "</quote>",
        "<item>",
        "</item>",
        "<enough/>",
        "<memory>",
        "<think>",
        "No change.",
        "Sources: 1, 2",
        "[1]",
        "\\boxed{1873}",
        "\n\n",
        "漢字。",
        " ",
        "x" * 30,
    ]
)
texts = st.lists(pieces, min_size=1, max_size=60).map(" ".join).filter(str.strip)
replies = st.lists(
    st.lists(pieces, max_size=12).map(" ".join) | st.text(max_size=60), min_size=1, max_size=6
)
modes = st.fixed_dictionaries(
    {
        "no_change": st.booleans(),
        "evidence": st.booleans(),
        "items": st.just(False),
        "stop_early": st.booleans(),
        "order": st.sampled_from(["text", "relevance"]),
    }
) | st.fixed_dictionaries({"items": st.just(True), "no_change": st.booleans()})

quickly = settings(max_examples=80, deadline=None)


def config_of(**values: object) -> AgentConfig:
    small = {"chunk_tokens": 64, "memory_tokens": 60, "answer_tokens": 40, "quote_tokens": 60}
    return AgentConfig.parse({"window": 4000, **small, **values})


def read(
    text: str, said: Sequence[str], config: AgentConfig
) -> tuple[Trace, ScriptedEngine] | None:
    """A reading in which the model says these things in turn; None where it has no answer."""
    turn = iter(range(10**6))

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        reply = said[next(turn) % len(said)]
        num_prompt = ByteTokenizer().count_messages(messages)
        assert num_prompt + sampling.max_tokens <= config.window
        return reply

    engine = ScriptedEngine(script)
    reader = Reader(engine, tokenizer=ByteTokenizer(), config=config)
    try:
        return reader.ask("Who sold the mill?", text), engine
    except EmptyAnswer:
        return None


def same_but_time(step: Step) -> dict[str, object]:
    return {**json.loads(step.to_json()), "started": 0, "seconds": 0, "usage": None}


@quickly
@given(text=texts, said=replies, prompts=st.sampled_from(sorted(PROMPT_SETS)))
def test_without_options_a_reading_is_the_plain_loop_byte_for_byte(
    text: str, said: list[str], prompts: str
) -> None:
    config = config_of(prompts=prompts)
    wording = open_prompts(prompts)
    assert prompts_for(config) is wording
    found = read(text, said, config)
    if found is None:
        return
    trace, engine = found
    tokenizer = ByteTokenizer()
    memory, sent = "", []
    for chunk in split(Document.from_text(text), tokenizer, chunk_tokens=64):
        messages = wording.read_messages(
            question="Who sold the mill?",
            section=chunk.text,
            memory=memory,
            section_number=chunk.index + 1,
            memory_tokens=60,
        )
        sent.append(messages)
        step = trace.steps[chunk.index]
        new = rewrite(
            memory,
            tokenizer.count(memory),
            wording.change_of(step.reply),
            tokenizer,
            memory_tokens=60,
        )
        flags = (["memory_cut"] if new.was_cut else []) + (["memory_kept"] if new.was_kept else [])
        plain = Step(
            kind="read",
            index=chunk.index,
            reply=step.reply,
            memory=new.text,
            section=Section.of(chunk),
            reasoning=step.reasoning,
            flags=tuple(flags),  # type: ignore[arg-type]
        )
        assert same_but_time(step) == same_but_time(plain)
        memory = new.text
    assert engine.prompts[:-1] == sent
    keys = {"kind", "index", "reply", "memory", "section", "reasoning", "flags", "usage"}
    keys |= {"num_attempts", "started", "seconds"}
    assert all(set(step) == keys for step in trace.to_dict()["steps"])


@quickly
@given(text=texts, said=replies, mode=modes)
def test_no_source_is_printed_that_the_text_does_not_have(
    text: str, said: list[str], mode: dict[str, object]
) -> None:
    found = read(text, said, config_of(**mode))
    if found is None:
        return
    trace, _ = found
    for quote in trace.ledger:
        assert text[slice(*quote.span)] == quote.text
    for citation in trace.citations:
        assert citation.quote.text in text
        assert citation.quote in trace.ledger
    assert all(not quote.places for quote in trace.rejected_quotes)
    assert Trace.from_json(trace.to_json()) == trace


def test_printed_sources_are_those_of_the_trace(capsys) -> None:  # type: ignore[no-untyped-def]
    said = [
        "<quote>the mill  was SOLD</quote><quote>a lie</quote>It was sold.",
        "Yes.\nSources: 1, 2",
    ]
    found = read("Then the mill\nwas sold.", said, config_of(evidence=True))
    assert found is not None
    print_answers([found[0]], as_json=False)
    assert capsys.readouterr().out == 'Yes.\n\n[1] text [5:22]: "the mill\nwas sold"\n'


@quickly
@given(text=texts, said=replies, mode=modes)
def test_every_character_is_read_once_or_the_trace_says_that_it_was_not_read(
    text: str, said: list[str], mode: dict[str, object]
) -> None:
    found = read(text, said, config_of(**mode))
    if found is None:
        return
    trace, _ = found
    spans = [(step.section.start, step.section.end) for step in trace.steps if step.section]
    covered = sorted([*spans, *trace.unread])
    assert [start for start, _ in covered] == [0, *(end for _, end in covered[:-1])]
    assert covered[-1][1] == len(text)
    assert bool(trace.unread) == ("stopped_early" in trace.steps[-1].flags)
    if not mode.get("stop_early"):
        assert trace.unread == ()


@quickly
@given(text=texts, said=replies, mode=modes, stop=st.integers(0, 6))
def test_a_reading_resumes_at_every_step_with_the_same_prompts(
    text: str, said: list[str], mode: dict[str, object], stop: int
) -> None:
    config = config_of(**mode)
    found = read(text, said, config)
    if found is None:
        return
    trace, engine = found
    finished = trace.steps[:stop]
    turn = iter(range(len(finished), 10**6))
    again = ScriptedEngine(lambda messages, sampling: said[next(turn) % len(said)])
    reader = Reader(again, tokenizer=ByteTokenizer(), config=config)

    async def rest() -> list[Step]:
        return [step async for step in reader.steps(trace.question, text, finished=finished)]

    import asyncio

    steps = asyncio.run(rest())
    assert again.prompts == engine.prompts[len(finished) :]
    assert [same_but_time(step) for step in steps] == [
        same_but_time(step) for step in trace.steps[len(finished) :]
    ]


@quickly
@given(section=st.lists(pieces, max_size=30).map(" ".join))
def test_a_text_shows_the_model_no_mark_of_the_format(section: str) -> None:
    config = config_of(evidence=True, stop_early=True)
    found = read(section or "x", ["x"], config)
    assert found is not None
    mark = re.compile(r"<\s*/?\s*(quote|item|enough|think)\b", re.IGNORECASE)
    for prompt in found[1].prompts[:-1]:
        shown = prompt[-1]["content"].split("<section", 1)[1].split("</section>")[0]
        assert not mark.search(shown)


def test_the_room_for_quotes_is_part_of_the_budget() -> None:
    plain, quoting = config_of(), config_of(evidence=True, stop_early=True)
    question, tokenizer = "Who?", ByteTokenizer()
    before = measure_budget(question, plain, prompts_for(plain), tokenizer)
    after = measure_budget(question, quoting, prompts_for(quoting), tokenizer)
    assert (before.ledger, after.ledger) == (0, 1024)
    assert after.read_reply == before.read_reply + 60 + 12
