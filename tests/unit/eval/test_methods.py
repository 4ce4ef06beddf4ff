"""Methods on scripted engines: what each shows the model, and what its trace and record say."""

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from memagent.agent.model_call import Limits
from memagent.agent.trace import Trace
from memagent.data.example import Example, Passage
from memagent.documents.document import Document
from memagent.engines.local.embedding import Embedder, unit
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import BudgetError, ConfigError, EngineError, LimitReached
from memagent.eval import prompts
from memagent.eval.methods import (
    LEFT_OUT,
    METHODS,
    Context,
    MethodSettings,
    cut_middle,
    ending,
    open_method,
    settings_for,
)
from memagent.tokens.tokenizers import ByteTokenizer, _CostsMeasured
from memagent.types import Message, Prices, Sampling

FACT = "The code of the red box is 4711."
FILLER = [f"Line {number} tells of nothing at all." for number in range(60)]
QUESTION = "What is the code of the red box?"


def example(text: str) -> Example:
    return Example(
        id="e", task="t", question=QUESTION, answers=("4711",), documents=(Passage(text=text),)
    )


def with_fact(at: int) -> str:
    lines = [*FILLER[:at], FACT, *FILLER[at:]]
    return "\n\n".join(lines) + "\n"


class Keywords(Embedder):
    """A vector with a place for each of three words."""

    name = "keywords"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[list[float]]:
        if is_query:
            self.asked += texts
        words = ("code", "box", "nothing")
        return [unit([float(word in text) for word in words]) for text in texts]

    async def aclose(self) -> None:
        pass


def context_for(
    text: str, engine: ScriptedEngine, *, limits: Limits | None = None, **settings: Any
) -> Context:
    sizes = {"window": 3000, "chunk_tokens": 500, "memory_tokens": 120, "answer_tokens": 60}
    return Context(
        engine=engine,
        tokenizer=ByteTokenizer(),
        settings=MethodSettings.parse({**sizes, **settings, "seed": 5}),
        limits=limits or Limits(),
        method="m",
        document=Document.from_text(text, source="e"),
        question=QUESTION,
        embedder=Keywords(),
    )


def run(name: str, text: str, engine: ScriptedEngine, **settings: Any) -> tuple[Trace, Context]:
    context = context_for(text, engine, **settings)

    async def answered() -> Trace:
        return await METHODS[name](example(text), context)

    return asyncio.run(answered()), context


def answer_if_seen(messages: Sequence[Message], sampling: Sampling) -> str:
    """The code if the prompt has it anywhere, else NONE."""
    return r"\boxed{4711}" if "4711" in messages[-1]["content"] else prompts.NOTHING


class WordTokenizer(ByteTokenizer):
    """One token a word, whatever its length."""

    def __init__(self) -> None:
        self.num_counted = 0

    def count(self, text: str) -> int:
        self.num_counted += len(text)
        return len(text.split())

    def measure(self, text: str) -> _CostsMeasured:
        ends = [match.end() for match in re.finditer(r"\S+\s*", text)]
        return _CostsMeasured(ends, [1] * len(ends))


def prompt(engine: ScriptedEngine, number: int = 0) -> str:
    return engine.prompts[number][-1]["content"]


# --- direct ---------------------------------------------------------------------------------------


def test_direct_shows_the_whole_text_where_it_fits() -> None:
    text = with_fact(3)[:900]
    engine = ScriptedEngine(answer_if_seen)
    trace, context = run("direct", text, engine)
    assert text in prompt(engine)
    assert trace.answer == r"\boxed{4711}"
    assert not context.is_cut


def test_direct_cuts_the_middle_out_and_reports_it() -> None:
    text = with_fact(30)
    engine = ScriptedEngine(answer_if_seen)
    trace, context = run("direct", text, engine, window=1800)
    shown = prompt(engine)
    assert FILLER[0] in shown
    assert FILLER[-1] in shown
    assert FACT not in shown
    assert trace.answer == prompts.NOTHING
    assert context.is_cut
    assert context.notes["num_chars"] == len(text)
    assert len(shown.encode()) + 64 + 60 <= 1800
    assert len(shown.encode()) > 1500


def test_a_cut_text_keeps_as_much_of_its_end_as_of_its_beginning() -> None:
    tokenizer = ByteTokenizer()
    text = "".join(chr(65 + number % 26) for number in range(1000))
    kept = cut_middle(text, tokenizer, max_tokens=209)
    assert kept == text[:100] + LEFT_OUT + text[-100:]
    assert cut_middle(text, tokenizer, max_tokens=1000) is None


def test_a_text_of_many_characters_and_few_tokens_is_not_cut() -> None:
    words = WordTokenizer()
    text = " ".join(["a" * 50] * 100)
    assert cut_middle(text, words, max_tokens=100) is None
    kept = cut_middle(text, words, max_tokens=51)
    assert kept is not None
    assert [len(part.split()) for part in kept.split(LEFT_OUT)] == [25, 25]


def test_only_the_ends_of_a_long_text_are_counted() -> None:
    words = WordTokenizer()
    assert cut_middle("word " * 100_000, words, max_tokens=100) is not None
    assert words.num_counted < 6 * 100 * 12


def test_the_end_of_a_text_never_begins_within_a_character() -> None:
    assert ending("äöü" * 10, ByteTokenizer(), max_tokens=7) == "äöü"


def test_a_window_too_small_for_the_wording_is_refused() -> None:
    with pytest.raises(BudgetError, match="raise `window`"):
        run("direct", with_fact(1), ScriptedEngine(answer_if_seen), window=550, chunk_tokens=500)


# --- retrieval ------------------------------------------------------------------------------------


def test_bm25_finds_the_passage_and_leaves_out_the_rest() -> None:
    engine = ScriptedEngine(answer_if_seen)
    trace, context = run("bm25", with_fact(40), engine, window=1100, chunk_tokens=200)
    assert trace.answer == r"\boxed{4711}"
    assert FACT in prompt(engine)
    assert prompt(engine).count("tells of nothing") <= 6
    assert context.is_cut
    assert context.notes["num_passages_in_text"] > 5


def test_dense_finds_the_passage_by_its_embedding_and_leaves_out_the_rest() -> None:
    engine = ScriptedEngine(answer_if_seen)
    trace, context = run("dense", with_fact(40), engine, window=1100, chunk_tokens=200)
    assert FACT in prompt(engine)
    assert FILLER[0] not in prompt(engine)
    assert trace.answer == r"\boxed{4711}"
    assert isinstance(context.embedder, Keywords)
    assert context.embedder.asked == [QUESTION]
    assert context.is_cut
    assert context.notes["num_passages"] == 1


def test_dense_without_an_embedder_is_an_error_of_one_line() -> None:
    context = context_for(with_fact(3), ScriptedEngine(answer_if_seen))
    context.embedder = None
    with pytest.raises(ConfigError, match="has no `embedder`"):
        asyncio.run(METHODS["dense"](example(with_fact(3)), context))


def test_bm25_names_the_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"memagent\[eval\]"):
        run("bm25", with_fact(3), ScriptedEngine(answer_if_seen))
    with pytest.raises(ConfigError, match=r"memagent\[eval\]"):  # before the first call
        open_method("bm25")


# --- refine and map-reduce ------------------------------------------------------------------------


def test_refine_carries_its_answer_from_section_to_section() -> None:
    text = with_fact(2)
    replies: list[str] = []

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        replies.append(f"answer {len(replies)}")
        return replies[-1]

    engine = ScriptedEngine(script)
    trace, context = run("refine", text, engine)
    assert len(trace.steps) > 3
    assert [step.kind for step in trace.steps] == ["read"] * (len(replies) - 1) + ["answer"]
    assert prompts.NO_DRAFT in prompt(engine, 0)
    for number in range(1, len(replies)):
        assert f"<memory>\n{replies[number - 1]}\n</memory>" in prompt(engine, number)
    sections = [step.section for step in trace.steps]
    assert "".join(text[s.start : s.end] for s in sections if s) == text
    assert trace.answer == replies[-1]
    assert not context.is_cut


def test_map_reduce_reads_every_section_alone_and_answers_from_the_notes() -> None:
    text = with_fact(30)
    engine = ScriptedEngine(answer_if_seen)
    trace, _ = run("map_reduce", text, engine)
    assert trace.answer == r"\boxed{4711}"
    reads = [step for step in trace.steps if step.kind == "read"]
    assert "".join(text[s.section.start : s.section.end] for s in reads if s.section) == text
    last = prompt(engine, len(engine.prompts) - 1)
    assert "<memory>\n\\boxed{4711}\n</memory>" in last  # notes that say NONE are left out


def test_notes_too_long_for_one_prompt_are_merged_until_they_fit() -> None:
    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        content = messages[-1]["content"]
        if "set of notes in their place" in content:
            return "merged " + "m" * 90
        return "note " + "n" * 110 if "section number" in content else r"\boxed{x}"

    engine = ScriptedEngine(script)
    trace, _ = run("map_reduce", with_fact(30), engine, window=1300, chunk_tokens=100)
    merges = [p for p in engine.prompts if "set of notes in their place" in p[-1]["content"]]
    assert len(merges) >= 2
    assert all(len(p[-1]["content"].encode()) + 64 + 120 <= 1300 for p in engine.prompts)
    assert [step.index for step in trace.steps] == list(range(len(trace.steps)))
    assert trace.answer == r"\boxed{x}"


def test_sections_that_do_not_fit_are_refused_with_a_size_that_does() -> None:
    with pytest.raises(BudgetError, match="lower to `chunk_tokens="):
        run(
            "map_reduce",
            with_fact(2),
            ScriptedEngine(answer_if_seen),
            window=1400,
            chunk_tokens=1200,
        )


# --- what all of them share -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_every_call_is_a_step_with_the_seed_of_the_item(name: str) -> None:
    seeds: list[int | None] = []

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        seeds.append(sampling.seed)
        return answer_if_seen(messages, sampling)

    engine = ScriptedEngine(script)
    trace, _ = run(name, with_fact(20), engine, prompts="boxed", window=4000)
    assert trace.usage.calls == len(engine.prompts) == len(trace.steps)
    assert set(seeds) == {5}
    assert trace.steps[-1].kind == "answer"


def test_an_empty_answer_is_a_failure_not_an_answer() -> None:
    with pytest.raises(EngineError, match="empty answer"):
        run("direct", FACT, ScriptedEngine(["<think>hm</think>"]))


def test_a_limit_on_cost_holds_for_every_method() -> None:
    limits = Limits(max_cost=0.0005, prices=Prices(prompt=1.0, completion=1.0))
    with pytest.raises(LimitReached):
        run("map_reduce", with_fact(20), ScriptedEngine(answer_if_seen), limits=limits)


def test_settings_come_from_the_model_then_from_all_methods_then_from_the_method() -> None:
    engine = ScriptedEngine(answer_if_seen)
    engine.reading_defaults = {"chunk_tokens": 700, "prompts": "small", "memory_tokens": 64}
    engine.served_window = 16384
    reader = settings_for("reader:paper", engine, {"chunk_tokens": 800}, {"memory_tokens": 32})
    assert (reader.chunk_tokens, reader.memory_tokens, reader.prompts) == (800, 32, "paper")
    assert reader.window == 8192
    assert settings_for("direct", engine, {}, {}).window == 16384
    assert settings_for("direct", engine, {"window": 9000}, {}).window == 9000
    with pytest.raises(ConfigError, match="less than `window=20000`"):
        settings_for("direct", engine, {}, {"window": 20000})


def test_only_the_reader_takes_a_prompt_set() -> None:
    with pytest.raises(ConfigError, match="only the reader"):
        open_method("direct:paper")
