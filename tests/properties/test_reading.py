"""Laws of reading, over random texts, questions, settings and replies."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memagent.agent.budget import measure_budget
from memagent.agent.prompts import PROMPT_SETS
from memagent.agent.reader import Reader
from memagent.agent.trace import Section, Step, Trace
from memagent.config import AgentConfig
from memagent.documents.chunking import split
from memagent.documents.document import Document, Place
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import BudgetError, EngineError
from memagent.tokens.tokenizers import (
    ByteTokenizer,
    EstimatingTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
)
from memagent.types import Completion, Message, Sampling, Usage

words = st.sampled_from(
    [
        "the",
        "mill",
        "sold.",
        "don't",
        "1873",
        "\n",
        "\n\n",
        "漢字。",
        "🙂",
        "e\u0301",
        "  ",
        "\t",
        "x" * 40,
    ]
)
worded = st.lists(words, max_size=400).map(" ".join)
texts = st.one_of(st.text(max_size=1500), worded, worded.map(lambda text: text.replace(" ", "")))
kinds = st.sampled_from(["gpt2", "qwen", "bytes", "estimate"])

quickly = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def tokenizer_of(kind: str, gpt2: Path, qwen: Path) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "estimate":
        return EstimatingTokenizer()
    return HuggingFaceTokenizer.from_path(qwen if kind == "qwen" else gpt2, kind)


@quickly
@given(text=texts, chunk_tokens=st.integers(16, 400), kind=kinds)
def test_chunks_join_back_exactly_and_keep_the_limit(
    text: str, chunk_tokens: int, kind: str, tokenizer_folder: Path, qwen_like_folder: Path
) -> None:
    tokenizer = tokenizer_of(kind, tokenizer_folder, qwen_like_folder)
    chunks = list(split(Document.from_text(text), tokenizer, chunk_tokens=chunk_tokens))
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(chunk.text for chunk in chunks)
    for chunk in chunks:
        assert tokenizer.count(chunk.text) <= chunk_tokens


class CheckingEngine(ScriptedEngine):
    """Replies with anything, however long, and checks that each call fits the window."""

    def __init__(self, replies: Sequence[str], tokenizer: Tokenizer, window: int) -> None:
        super().__init__([])
        self._replies = replies
        self._counter = tokenizer
        self._window = window
        self.num_calls = 0

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        used = self._counter.count_messages(messages) + sampling.max_tokens
        assert used <= self._window, f"{used} tokens in a window of {self._window}"
        self.num_calls += 1
        return Completion(text=self._replies[self.num_calls % len(self._replies)])


@quickly
@given(
    text=texts.filter(bool),
    question=st.text(min_size=1, max_size=60).filter(lambda text: text.strip()),
    replies=st.lists(st.one_of(texts, words), min_size=1, max_size=5),
    chunk_tokens=st.integers(16, 300),
    memory_tokens=st.integers(8, 200),
    answer_tokens=st.integers(1, 200),
    spare=st.integers(0, 40),
    prompts=st.sampled_from(sorted(PROMPT_SETS)),
    kind=kinds,
)
def test_no_call_ever_exceeds_the_window(
    text: str,
    question: str,
    replies: list[str],
    chunk_tokens: int,
    memory_tokens: int,
    answer_tokens: int,
    spare: int,
    prompts: str,
    kind: str,
    tokenizer_folder: Path,
    qwen_like_folder: Path,
) -> None:
    tokenizer = tokenizer_of(kind, tokenizer_folder, qwen_like_folder)
    config = AgentConfig(
        window=10**6,
        chunk_tokens=chunk_tokens,
        memory_tokens=memory_tokens,
        answer_tokens=answer_tokens,
        prompts=prompts,
    )
    needed = measure_budget(question.strip(), config, PROMPT_SETS[prompts], tokenizer)
    window = max(needed.read_total, needed.answer_total) + spare - 10
    engine = CheckingEngine(replies, tokenizer, window)
    tight = config.model_copy(update={"window": window})
    reader = Reader(engine, tokenizer=tokenizer, config=tight)
    try:
        trace = reader.ask(question, text)
    except BudgetError:
        assert engine.num_calls == 0
        assert spare < 10
    except EngineError:  # an empty answer
        assert engine.num_calls > 0
    else:
        assert all(tokenizer.count(step.memory) <= memory_tokens for step in trace.steps)


places = st.builds(
    Place,
    source=st.text(),
    start=st.integers(0, 10**9),
    end=st.integers(0, 10**9),
    first_page=st.none() | st.integers(1, 10**6),
    last_page=st.none() | st.integers(1, 10**6),
    first_heading=st.none() | st.text(),
    last_heading=st.none() | st.text(),
    first_line=st.none() | st.integers(1, 10**6),
    last_line=st.none() | st.integers(1, 10**6),
)
sections = st.builds(
    Section,
    start=st.integers(0, 10**9),
    end=st.integers(0, 10**9),
    num_tokens=st.integers(0, 10**6),
    places=st.lists(places, max_size=3).map(tuple),
)
usages = st.builds(
    Usage,
    calls=st.integers(0, 9),
    prompt_tokens=st.integers(0, 10**9),
    completion_tokens=st.integers(0, 10**9),
    cached_tokens=st.integers(0, 10**9),
    is_estimated=st.booleans(),
)
steps = st.builds(
    Step,
    kind=st.sampled_from(["read", "answer"]),
    index=st.integers(0, 10**6),
    reply=st.text(),
    memory=st.text(),
    section=st.none() | sections,
    reasoning=st.none() | st.text(),
    flags=st.lists(st.sampled_from(["reply_cut", "memory_cut", "memory_kept"])).map(tuple),
    usage=usages,
    num_attempts=st.integers(1, 99),
    started=st.floats(0, 1e10),
    seconds=st.floats(0, 1e6),
)


@quickly
@given(steps=st.lists(steps, max_size=4), question=st.text(), source=st.text())
def test_traces_survive_a_json_round_trip(steps: list[Step], question: str, source: str) -> None:
    trace = Trace(
        question=question,
        steps=tuple(steps),
        model="m",
        prompts="default",
        source=source,
        document_sha256="0",
    )
    assert Trace.from_json(trace.to_json()) == trace
    for step in steps:
        assert b"\n" not in step.to_json()
        assert Step.from_json(step.to_json()) == step
