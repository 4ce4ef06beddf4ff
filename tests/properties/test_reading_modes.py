"""Laws of readings whose sections are read apart from each other, over random texts, settings and replies."""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.agent.budget import measure_budget
from memagent.agent.model_call import Limits
from memagent.agent.prompts import PROMPT_SETS, prompts_for
from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace
from memagent.config import AgentConfig
from memagent.documents.chunking import split
from memagent.documents.document import Document
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import EngineError, LimitReached
from memagent.tokens.tokenizers import ByteTokenizer
from memagent.types import Completion, Message, Sampling

BYTES = ByteTokenizer()
QUESTION = "Who sold the mill?"
words = st.sampled_from(
    ["mill", "sold.", "Nothing.", "Missing: a", "</note>", "漢字。", "\n\n", "x" * 30]
)
texts = st.lists(words, min_size=1, max_size=120).map(" ".join)
JOINED = {"notes": "memories", "no_change": True}
modes = st.one_of(
    st.builds(lambda rounds: {"mode": "parallel", "rounds": rounds}, st.integers(1, 3)),
    st.builds(lambda rounds: {"mode": "parallel", "rounds": rounds, **JOINED}, st.integers(1, 3)),
)
few = settings(max_examples=40, deadline=None)


class HashEngine(ScriptedEngine):
    """The same reply to the same prompt, in an order of its own; checks that every call fits the window."""

    def __init__(self, window: int) -> None:
        super().__init__(reply_to)
        self._window = window
        self.calls_left: int | None = None
        """Calls before the endpoint fails; None: it never does."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise EngineError("the endpoint is gone")
            self.calls_left -= 1
        assert BYTES.count_messages(messages) + sampling.max_tokens <= self._window
        for _ in range(number_of(messages[-1]["content"]) % 5):
            await asyncio.sleep(0)
        return await super().complete(messages, sampling)


def number_of(prompt: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")


def reply_to(messages: Sequence[Message], sampling: Sampling) -> str:
    """A note or nothing, a merge with or without something missing, a memory, an answer."""
    prompt = messages[-1]["content"]
    number = number_of(prompt)
    if "<note sections=" in prompt:
        missing = "nothing" if number % 3 else f"fact {number % 7}"
        return f"merged {number} " + "m" * (number % 90) + f"\nMissing: {missing}"
    return ["Nothing.", f"note {number}", "n" * (number % 120), ""][number % 4] or "end"


def reader_of(text: str, chunk_tokens: int, mode: dict[str, Any]) -> Reader:
    """A reader with the smallest window that its settings allow."""
    config = AgentConfig(
        window=10**6, chunk_tokens=chunk_tokens, memory_tokens=60, answer_tokens=40, **mode
    )
    needed = measure_budget(QUESTION, config, prompts_for(config), BYTES)
    asks = config.merges and not config.joins_memories
    least = 10**6 - needed.merge_room + 2 * (60 + 48) if asks else 0
    window = max(needed.read_total, needed.answer_total, least)
    tight = config.model_copy(update={"window": window})
    return Reader(HashEngine(window), tokenizer=BYTES, config=tight)


def reads(trace: Trace, number: int | None) -> list[Step]:
    found = [step for step in trace.steps if step.kind == "read" and step.round == number]
    return sorted(found, key=lambda step: step.section.start if step.section else 0)


def done(step: Step) -> tuple[str, int, int, str]:
    return (step.kind, step.round or 0, step.section.start if step.section else -1, step.memory)


@few
@given(text=texts, chunk_tokens=st.integers(40, 200), mode=modes)
def test_every_round_reads_every_character_once_and_every_note_is_merged_once(
    text: str, chunk_tokens: int, mode: dict[str, Any]
) -> None:
    trace = reader_of(text, chunk_tokens, mode).ask(QUESTION, text)
    numbers = {step.round for step in trace.steps if step.kind == "read"}
    for number in numbers:
        spans = [step.section for step in reads(trace, number) if step.section]
        assert "".join(text[span.start : span.end] for span in spans) == text
    merges = [step for step in trace.steps if step.kind == "merge"]
    used = [index for step in merges for index in step.inputs]
    assert len(used) == len(set(used))
    if "mode" in mode:
        assert numbers == set(range(1, len(numbers) + 1))
        notes = {step.index for step in trace.steps if step.kind == "read" and step.memory}
        assert notes <= set(used)
    assert trace.unread == ()
    assert [step.index for step in trace.steps] == list(range(len(trace.steps)))
    assert all(BYTES.count(step.memory) <= 60 for step in trace.steps)


@few
@given(text=texts, chunk_tokens=st.integers(40, 200), mode=modes, share=st.floats(0, 1))
def test_a_reading_that_is_resumed_anywhere_repeats_no_call_and_ends_the_same(
    text: str, chunk_tokens: int, mode: dict[str, Any], share: float
) -> None:
    whole = reader_of(text, chunk_tokens, mode).ask(QUESTION, text)
    num_kept = round(share * whole.usage.calls)
    stopped, resumed = reader_of(text, chunk_tokens, mode), reader_of(text, chunk_tokens, mode)
    stopped.limits = Limits(max_calls=max(1, num_kept))
    stopped.limits.num_calls = num_kept == 0
    with tempfile.TemporaryDirectory() as folder:
        with suppress(LimitReached):
            stopped.ask(QUESTION, text, run_dir=Path(folder, "run"))
        trace = resumed.ask(QUESTION, text, run_dir=Path(folder, "run"))
    num_new = sum(step.usage.calls for step in trace.steps if not step.is_known)
    assert num_new == whole.usage.calls - num_kept
    assert sorted(map(done, trace.steps)) == sorted(map(done, whole.steps))


@few
@given(text=texts, chunk_tokens=st.integers(40, 200), rounds=st.integers(1, 9))
def test_with_all_options_off_a_reading_is_the_plain_loop(
    text: str, chunk_tokens: int, rounds: int
) -> None:
    reader = reader_of(text, chunk_tokens, {"mode": "in_order", "rounds": rounds})
    trace = reader.ask(QUESTION, text)
    prompts = PROMPT_SETS["default"]
    memory, expected = "", []
    for chunk in split(Document.from_text(text), BYTES, chunk_tokens=chunk_tokens):
        messages = prompts.section_messages(
            question=QUESTION,
            section=chunk.text,
            memory=memory,
            section_number=chunk.index + 1,
            memory_tokens=60,
        )
        expected.append(messages)
        memory = reply_to(messages, Sampling(max_tokens=1)).strip()[:60] or memory
    expected.append(
        prompts.answer_messages(
            question=QUESTION, memory=memory, num_sections=len(expected), answer_tokens=40
        )
    )
    assert isinstance(reader.engine, ScriptedEngine)
    assert reader.engine.prompts == expected
    plain = {"kind", "index", "reply", "memory", "section", "reasoning", "flags", "usage"}
    plain |= {"num_attempts", "started", "seconds"}
    assert all(set(step) == plain for step in trace.to_dict()["steps"])


@few
@given(
    text=texts,
    chunk_tokens=st.integers(40, 200),
    mode=modes,
    cut=st.floats(0, 1),
    added=st.one_of(st.just(""), texts),
    removed=st.integers(0, 40),
    num_calls=st.integers(0, 30),
)
def test_continuing_is_a_whole_reading_and_asks_nothing_that_was_asked_before(
    text: str,
    chunk_tokens: int,
    mode: dict[str, Any],
    cut: float,
    added: str,
    removed: int,
    num_calls: int,
) -> None:
    """Whatever was appended, put in or taken out, and also after an interruption."""
    place = int(cut * len(text))
    changed = text[:place] + added + text[place + removed :] or "x"
    first, broken, second, whole = (reader_of(text, chunk_tokens, mode) for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        first.ask(QUESTION, text, run_dir=old)
        broken.engine.calls_left = num_calls  # type: ignore[attr-defined]
        try:
            broken.ask(QUESTION, changed, run_dir=new, continues=old)
        except EngineError:
            trace = second.ask(QUESTION, changed, run_dir=new)
        else:
            [trace] = Trace.load(new)
    expected = whole.ask(QUESTION, changed)
    assert sorted(map(done, trace.steps)) == sorted(map(done, expected.steps))
    assert trace.answer == expected.answer
    asked = Counter(map(prompt_of, sent(broken) + sent(second)))
    assert not asked.keys() & set(map(prompt_of, sent(first)))
    assert asked <= Counter(map(prompt_of, sent(whole)))
    assert trace.usage.calls == asked.total()


def sent(reader: Reader) -> list[list[Message]]:
    assert isinstance(reader.engine, ScriptedEngine)
    return list(reader.engine.prompts)


def prompt_of(messages: Sequence[Message]) -> str:
    return messages[-1]["content"]
