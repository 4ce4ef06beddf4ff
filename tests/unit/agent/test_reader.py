"""The loop: which calls are made with what, and what becomes of the replies."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import pytest

from memagent import Document, Reader, Step, Trace, open_engine
from memagent.agent.model_call import Limits
from memagent.agent.trace import call_seconds
from memagent.agent.work import plan_reading
from memagent.config import AgentConfig, ReadingSettings
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import (
    BudgetError,
    ConfigError,
    DocumentError,
    EngineError,
    LimitReached,
)
from memagent.replies import Replies
from memagent.types import Completion, Message, Sampling, Usage
from tests.conftest import prose
from tests.support.timing import settle

SETTINGS = {"window": 3000, "chunk_tokens": 200, "memory_tokens": 100, "answer_tokens": 60}
TEXT = "one two three four\n" * 30  # 570 bytes: three sections


def reader_of(script: object, **settings: object) -> Reader:
    engine = ScriptedEngine(script)  # type: ignore[arg-type]
    return Reader(engine, tokenizer="bytes", **{**SETTINGS, **settings})


def prompts_of(reader: Reader) -> list[str]:
    assert isinstance(reader.engine, ScriptedEngine)
    return [messages[-1]["content"] for messages in reader.engine.prompts]


def test_each_section_is_read_once_and_the_answer_comes_last() -> None:
    reader = reader_of(["m1", "m2", "m3", "the answer"])
    trace = reader.ask("what?", TEXT)
    assert trace.answer == "the answer"
    assert [(step.kind, step.index) for step in trace.steps] == [
        ("read", 0),
        ("read", 1),
        ("read", 2),
        ("answer", 3),
    ]
    assert "".join(TEXT[s.section.start : s.section.end] for s in trace.steps if s.section) == TEXT
    assert trace.num_chunks == 3


def test_each_memory_replaces_the_one_before() -> None:
    reader = reader_of(["first memory", "second memory", "third memory", "done"])
    trace = reader.ask("what?", TEXT)
    first, second, third, answer = prompts_of(reader)
    assert "(empty)" in first
    assert "first memory" in second
    assert "second memory" in third
    assert "first memory" not in third
    assert "third memory" in answer
    assert [step.memory for step in trace.steps] == [
        "first memory",
        "second memory",
        "third memory",
        "third memory",
    ]


def test_memory_and_answer_have_limits_of_their_own() -> None:
    limits: list[int] = []

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        limits.append(sampling.max_tokens)
        return "m"

    reader_of(script, reasoning_tokens=7).ask("what?", TEXT)
    assert limits == [107, 107, 107, 67]


def test_reasoning_is_kept_in_the_trace_and_out_of_the_memory() -> None:
    reader = reader_of(["<think>hm, hm</think>fact", "m2", "m3", "<think>so</think>answer"])
    trace = reader.ask("what?", TEXT)
    assert trace.steps[0].memory == "fact"
    assert trace.steps[0].reasoning == "<think>hm, hm</think>fact"
    assert trace.answer == "answer"
    assert not any("hm, hm" in prompt for prompt in prompts_of(reader))


def test_a_reply_that_is_all_reasoning_keeps_the_memory() -> None:
    reader = reader_of(["fact", "<think>too long", "fact again", "answer"])
    trace = reader.ask("what?", TEXT)
    assert [step.memory for step in trace.steps[:3]] == ["fact", "fact", "fact again"]
    assert trace.steps[1].flags == ("memory_kept",)


def test_a_reply_that_says_no_change_keeps_the_memory_byte_for_byte() -> None:
    reader = reader_of(["No change.", "fact  one", "**no change**", "answer"], prompts="keep")
    trace = reader.ask("what?", TEXT)
    assert [step.memory for step in trace.steps[:3]] == ["", "fact  one", "fact  one"]
    assert [step.flags for step in trace.steps[:3]] == [("memory_kept",), (), ("memory_kept",)]
    assert [step.reply for step in trace.steps[:3]] == ["No change.", "fact  one", "**no change**"]
    assert "(empty)" in prompts_of(reader)[1]
    assert "fact  one" in prompts_of(reader)[3]


def test_replies_are_added_to_the_memory_where_the_prompts_say_so() -> None:
    replies = ["fact one", "fact two\nfact one", "New memory:\nfact three", "answer"]
    trace = reader_of(replies, prompts="add").ask("what?", TEXT)
    assert [step.memory for step in trace.steps[:3]] == [
        "fact one",
        "fact one\nfact two",
        "fact three",
    ]
    assert [step.reply for step in trace.steps[:3]] == replies[:3]


def test_no_change_is_a_memory_like_any_other_where_the_prompt_does_not_offer_it() -> None:
    trace = reader_of(["fact", "No change.", "fact", "answer"]).ask("what?", TEXT)
    assert [step.memory for step in trace.steps[:3]] == ["fact", "No change.", "fact"]


def test_a_reply_longer_than_the_memory_is_cut_and_flagged() -> None:
    trace = reader_of(["x" * 500, "m2", "m3", "answer"]).ask("what?", TEXT)
    assert trace.steps[0].memory == "x" * 100
    assert trace.steps[0].reply == "x" * 500
    assert trace.steps[0].flags == ("memory_cut",)


class CutEngine(ScriptedEngine):
    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        return Completion(text="half a sent", finish_reason="length")


def test_replies_cut_by_the_limit_are_flagged_and_unreported_usage_is_estimated() -> None:
    reader = Reader(CutEngine([]), tokenizer="bytes", **SETTINGS)
    trace = reader.ask("what?", TEXT)
    assert {step.flags for step in trace.steps} == {("reply_cut",)}
    assert trace.usage.is_estimated
    assert trace.usage.completion_tokens == 4 * len("half a sent")


def test_an_empty_answer_is_a_failure_not_an_answer() -> None:
    with pytest.raises(EngineError, match="empty answer"):
        reader_of(["m1", "m2", "m3", ""]).ask("what?", TEXT)


def test_an_empty_question_is_refused() -> None:
    with pytest.raises(ConfigError, match="question is empty"):
        reader_of([]).ask("  ", TEXT)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(DocumentError, match="nothing to read"):
        reader_of([]).ask("what?", "")


def test_white_space_around_a_question_does_not_make_it_another(tmp_path: Path) -> None:
    first = reader_of(["m1", "m2", "m3", "a"]).ask(" what?\n", TEXT, run_dir=tmp_path / "run")
    assert reader_of([]).ask("what?", TEXT, run_dir=tmp_path / "run") == first


def test_a_budget_that_cannot_be_met_is_found_before_the_first_call() -> None:
    reader = reader_of(["m"], window=900, chunk_tokens=800)
    with pytest.raises(BudgetError):
        reader.ask("what?", TEXT)
    assert prompts_of(reader) == []


def test_steps_can_be_watched_as_they_happen() -> None:
    reader = reader_of(["m1", "m2", "m3", "a"])
    seen = []
    for step in reader.iter_steps("what?", TEXT):
        seen.append((step.index, len(prompts_of(reader))))
    assert seen == [(0, 1), (1, 2), (2, 3), (3, 4)]


async def test_the_next_call_waits_until_the_step_is_taken() -> None:
    reader = reader_of(["m1", "m2", "m3", "a"])
    steps = reader.steps("what?", TEXT)
    await anext(steps)
    await settle()
    assert len(prompts_of(reader)) == 1
    await steps.aclose()


async def test_known_replies_are_not_asked_for_again(tmp_path: Path) -> None:
    whole = await reader_of(["m1", "m2", "m3", "a"]).aask("what?", TEXT)
    with suppress(EngineError):
        async for _ in reader_of(["m1", "m2"]).steps(
            "what?", TEXT, known=Replies(tmp_path / "replies").scope("0")
        ):
            pass
    reader = reader_of(["m3", "a"])
    replies = Replies(tmp_path / "replies")
    steps = [step async for step in reader.steps("what?", TEXT, known=replies.scope("0"))]
    assert [(one.memory, one.section) for one in steps] == [
        (one.memory, one.section) for one in whole.steps
    ]
    assert [step.is_known for step in steps] == [True, True, False, False]
    assert "m2" in prompts_of(reader)[0]


def test_the_blocking_calls_work_inside_a_running_loop() -> None:
    async def notebook() -> str | None:
        return reader_of(["m1", "m2", "m3", "a"]).ask("what?", TEXT).answer

    assert asyncio.run(notebook()) == "a"


def test_several_questions_share_the_cut_and_keep_their_order() -> None:
    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        return "yes" if "first?" in messages[-1]["content"] else "no"

    traces = reader_of(script).ask_many(["first?", "second?"], TEXT)
    assert [(trace.question, trace.answer) for trace in traces] == [
        ("first?", "yes"),
        ("second?", "no"),
    ]


class TestRunDirectory:
    def test_a_reading_resumes_where_it_stopped(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError, match="only 2 replies"):
            reader_of(["m1", "m2"]).ask("what?", TEXT, run_dir=tmp_path / "run")
        trace = reader_of(["m3", "a"]).ask("what?", TEXT, run_dir=tmp_path / "run")
        assert [step.memory for step in trace.steps] == ["m1", "m2", "m3", "m3"]
        assert Trace.load(tmp_path / "run") == [trace]

    def test_asking_again_costs_nothing(self, tmp_path: Path) -> None:
        first = reader_of(["m1", "m2", "m3", "a"]).ask("what?", TEXT, run_dir=tmp_path / "run")
        assert reader_of([]).ask("what?", TEXT, run_dir=tmp_path / "run") == first

    def test_a_longer_answer_may_be_asked_for_on_resuming(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError):
            reader_of(["m1", "m2", "m3", ""]).ask("what?", TEXT, run_dir=tmp_path / "run")
        reader = reader_of(["a"], answer_tokens=90)
        assert reader.ask("what?", TEXT, run_dir=tmp_path / "run").answer == "a"

    def test_what_the_run_used_before_counts_towards_the_limits(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError):
            reader_of(["m1", "m2"]).ask("what?", TEXT, run_dir=tmp_path / "run")
        engine = ScriptedEngine(["m3", "a"])
        limited = Reader(engine, tokenizer="bytes", limits=Limits(max_calls=3), **SETTINGS)
        with pytest.raises(LimitReached, match="stopped after 3 calls"):
            limited.ask("what?", TEXT, run_dir=tmp_path / "run")


def test_a_plan_is_what_a_reading_with_an_empty_memory_sends() -> None:
    reader = reader_of(lambda messages, sampling: "<think>nothing</think>", answer_tokens=60)
    chunks = reader.chunks(Document.from_text(prose(60)))
    plan = plan_reading(reader, ["what?", "who?"], chunks)
    sent: list[int] = []
    for question in ("what?", "who?"):
        with pytest.raises(EngineError):
            reader.ask(question, chunks.document)
    assert isinstance(reader.engine, ScriptedEngine)
    sent = [reader.tokenizer.count_messages(messages) for messages in reader.engine.prompts]
    assert plan.num_calls == len(sent) == 2 * (plan.num_chunks + 1)
    assert plan.prompt_tokens == sum(sent)
    assert plan.max_completion_tokens == 2 * (plan.num_chunks * 100 + 60)
    assert plan.max_memory_tokens == 2 * plan.num_chunks * 100


def test_a_plan_of_very_many_questions_counts_the_prompts_of_a_sample() -> None:
    reader = reader_of([])
    chunks = reader.chunks(Document.from_text(TEXT))
    questions = [f"what is {number}?" for number in range(10_000, 12_345)]
    rendered: list[str] = []
    reader.tokenizer.count_messages = lambda messages: rendered.append("") or 100  # type: ignore
    reader.tokenizer.knows_template = True
    plan = plan_reading(reader, questions, chunks)
    assert (plan.num_calls, plan.prompt_tokens) == (2345 * 4, 2345 * 4 * 100)
    assert not plan.is_exact
    assert len(rendered) < 500 * 10
    few = plan_reading(reader, questions[:500], chunks)
    assert (few.num_calls, few.is_exact) == (500 * 4, True)


@pytest.mark.parametrize(("prompts", "shown"), [("keep", "red"), ("default", r"So: \boxed{red}")])
def test_the_answer_that_is_shown_is_what_stands_in_the_box_that_was_asked_for(
    prompts: str, shown: str
) -> None:
    reader = reader_of(["m1", r"So: \boxed{red}"], prompts=prompts, chunk_tokens=3000, window=8192)
    trace = reader.ask("what?", TEXT)
    assert (trace.final_answer, trace.answer) == (shown, r"So: \boxed{red}")


def test_the_time_of_calls_in_flight_at_once_counts_once() -> None:
    times = [(0.0, 4.0), (1.0, 1.0), (3.0, 2.0), (9.0, 1.0)]
    steps = [
        Step(kind="read", index=n, reply="", memory="", started=started, seconds=seconds)
        for n, (started, seconds) in enumerate(times)
    ]
    assert call_seconds(steps) == 6.0


def test_a_trace_survives_json() -> None:
    trace = reader_of(["<think>x</think>m1", "m2", "m3", "ä\u2028\n"]).ask("what?", TEXT)
    assert Trace.from_json(trace.to_json()) == trace
    for step in trace.steps:
        assert Step.from_json(step.to_json()) == step


def test_a_trace_is_short_when_printed() -> None:
    trace = reader_of(["m" * 90, "m2", "m3", "a"]).ask("what?", TEXT)
    assert repr(trace) == "Trace(question='what?', answer='a', num_steps=4, source='text')"


def test_config_and_single_settings_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Reader(ScriptedEngine([]), tokenizer="bytes", config=AgentConfig(), window=9000)


def test_an_engine_by_name_is_opened() -> None:
    reader = Reader("scripted", chunk_tokens=300)
    assert isinstance(reader.engine, ScriptedEngine)
    trace = reader.ask("Who inherits the house?", "It rained. Hedda inherits the house.")
    assert trace.answer == "Hedda inherits the house."
    assert open_engine(engine="scripted").model == "scripted"
    with pytest.raises(ConfigError, match="unknown engine 'scriptd'; did you mean scripted"):
        Reader("scriptd")


def test_the_types_of_settings_given_one_by_one_are_those_of_the_config() -> None:
    fields = {name: field.annotation for name, field in AgentConfig.model_fields.items()}
    assert get_type_hints(ReadingSettings) == fields
    assert get_type_hints(Reader.__init__)["settings"] == Unpack[ReadingSettings]


def test_a_setting_of_the_engine_is_refused_before_the_engine_is_opened() -> None:
    settings: dict[str, Any] = {"base_url": "http://localhost:1/v1"}
    with pytest.raises(ConfigError, match=r"`base_url` is a setting of the engine.*open_engine"):
        Reader("openai:none", **settings)


def test_a_path_or_a_single_question_in_the_wrong_place_is_one_line() -> None:
    reader = reader_of([])
    with pytest.raises(DocumentError, match=r"not PosixPath; read files with Document\.load"):
        reader.ask("what?", Path("book.txt"))  # type: ignore[arg-type]
    with pytest.raises(
        DocumentError, match=r"test_reader\.py is a file; read it with Document\.load"
    ):
        reader.ask("what?", __file__)
    with pytest.raises(ConfigError, match="`questions` is a list"):
        reader.ask_many("what?", TEXT)


def test_usage_adds_up() -> None:
    total = Usage(calls=1, prompt_tokens=5, completion_tokens=2) + Usage(
        calls=2, prompt_tokens=1, cached_tokens=1, is_estimated=True
    )
    assert total == Usage(
        calls=3, prompt_tokens=6, completion_tokens=2, cached_tokens=1, is_estimated=True
    )


def test_exact_sections_need_a_tokenizer_that_counts_exactly() -> None:
    engine = ScriptedEngine(["a", "b", "c", "the end"])
    with pytest.raises(ConfigError, match="`section_ends=exact` needs the tokenizer of scripted"):
        Reader(engine, section_ends="exact")
    reader = Reader(engine, tokenizer="bytes", section_ends="exact", chunk_tokens=20, window=4000)
    trace = reader.ask("Who?", "One two three four five six seven. Eight nine ten.")
    sections = [step.section for step in trace.steps if step.section]
    assert [(section.start, section.end) for section in sections] == [(0, 20), (20, 40), (40, 50)]


def test_quotes_that_are_copied_change_no_prompt_and_are_cited_from_the_memory() -> None:
    text = "The mill was sold in 1873. It rained.\n" + "Nothing happened on that day.\n" * 20
    replies = ["The mill was sold in 1873.", "No change.", "No change.", "No change.", "1873"]
    plain = reader_of(replies, prompts="keep")
    copying = reader_of(replies, prompts="keep", evidence=True, quotes="copied")
    expected, trace = plain.ask("When?", text), copying.ask("When?", text)
    assert prompts_of(copying) == prompts_of(plain)
    assert [step.memory for step in trace.steps] == [step.memory for step in expected.steps]
    [citation] = trace.citations
    assert (citation.number, citation.quote.text) == (1, "The mill was sold in 1873.")
    assert trace.steps[-1].flags == ("citations_inferred",)


def test_a_setting_without_effect_is_refused_unless_it_is_as_it_was() -> None:
    with pytest.raises(ConfigError, match="`rounds` has no effect without `mode=parallel`"):
        reader_of(["m"], rounds=2)
    assert reader_of(["m"], rounds=3).config.rounds == 3
