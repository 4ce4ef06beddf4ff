"""The calls and tokens that are planned, what they cost, and how long they take.

    Work(num_calls=40, prompt_tokens=210_000, max_completion_tokens=41_000).cost(prices)
    speed = recall(engine)                                   # as the last run with the model was
    work.seconds(speed, lanes=16)

A run keeps how long its prompt tokens took in a file of the user's state folder: model, address, figures, no text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_state_path

from memagent.agent.budget import NOTE_MARK_TOKENS, Budget
from memagent.agent.journal import check_same, earlier_replies, read_reading
from memagent.agent.model_call import Limits
from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.engines.base import facts_of
from memagent.errors import LimitReached
from memagent.files import write_atomically
from memagent.replies import Scope
from memagent.types import Engine, Prices

MAX_KNOWN = 500
"""Models whose speed is kept."""


class Speed(NamedTuple):
    """Seconds for each prompt token of a run, replies included."""

    of_calls: float
    """All calls one after the other."""
    of_run: float
    """From its start to its end: less where calls were in flight together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Calls and tokens that are planned."""

    num_calls: float = 0
    prompt_tokens: float = 0
    """Instructions, questions and texts."""
    max_memory_tokens: float = 0
    """What memories, drafts and notes can add to the prompts at most."""
    max_completion_tokens: float = 0
    """Every reply at its limit."""

    def __add__(self, other: Work) -> Work:
        return Work(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)}
        )

    def __mul__(self, times: int) -> Work:
        return Work(**{f.name: getattr(self, f.name) * times for f in fields(Work)})

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost: all replies empty, all at their limit."""
        low = prices.cost(prompt_tokens=round(self.prompt_tokens), completion_tokens=0)
        high = prices.cost(
            prompt_tokens=round(self.prompt_tokens + self.max_memory_tokens),
            completion_tokens=round(self.max_completion_tokens),
        )
        return low, high

    def seconds(self, speed: Speed, *, lanes: float | None = None) -> float:
        """About how long it takes, `lanes` calls at once; None: as many as in the run that was measured."""
        per_token = speed.of_run if lanes is None else speed.of_calls / max(1.0, lanes)
        return self.prompt_tokens * per_token


def remember(engine: Engine, *, prompt_tokens: int, call_seconds: float, seconds: float) -> None:
    """Keep the speed of a run for the next estimate. A state folder that cannot be written is no error."""
    if prompt_tokens <= 0 or call_seconds <= 0:
        return
    known = {name: values for name, values in _known().items() if name != _key(engine)}
    known = dict(list(known.items())[-MAX_KNOWN + 1 :])
    speed = Speed(call_seconds / prompt_tokens, seconds / prompt_tokens)
    try:
        _record().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_record(), json.dumps({**known, _key(engine): speed}, indent=1).encode())
    except OSError:
        return


def recall(engine: Engine) -> Speed | None:
    """The speed of the last run with this model."""
    values = _known().get(_key(engine))
    if not isinstance(values, list) or len(values) != 2:
        return None
    if not all(isinstance(value, float) for value in values):
        return None
    return Speed(*values)


def _key(engine: Engine) -> str:
    return f"{facts_of(engine).kept_address or type(engine).__name__} {engine.model}"


def _known() -> dict[str, object]:
    try:
        found = json.loads(_record().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record() -> Path:
    return user_state_path("memagent", appauthor=False) / "rates.json"


MOST_COUNTED = 500
"""Questions whose prompts are counted, at most; of more, these are a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan(Work):
    """The calls and tokens of a reading.

    `num_calls` has one per section and one for the answer, for each question, without those of an earlier run: exact
    where sections are read in order, the least where notes or memories are merged. `prompt_tokens` is exact for
    instructions, questions and sections; what the memory adds is not known yet.
    """

    num_questions: int
    num_chunks: int
    max_calls: int
    """With all rounds, and with merges of all notes at their limit."""
    calls_at_once: int
    """One for each question where sections are read in order, more where they are read apart from each other."""
    is_exact: bool
    """False when tokens were estimated, the chat template is an allowance, or not all questions were counted."""


class DoneBefore(NamedTuple):
    """What of the reading for one question was done in an earlier run."""

    starts: frozenset[int] = frozenset()
    """Where the sections begin that are not read again, at least in the first round."""
    is_answered: bool = False


def done_in(steps: Sequence[Step]) -> DoneBefore:
    """What the steps of a run that is resumed or continued leave out."""
    reads = [step.start for step in steps if step.round in (None, 1)]
    return DoneBefore(
        frozenset(start for start in reads if start is not None),
        is_answered=bool(steps) and steps[-1].kind == "answer",
    )


async def done_before(
    reader: Reader,
    questions: Sequence[str],
    chunks: Chunks,
    *,
    resumes: Path | None = None,
    continues: Path | None = None,
) -> list[DoneBefore]:
    """What a reading that resumes or continues a run leaves out, for each question."""
    if resumes is not None:
        check_same(read_reading(resumes), reader.identity(questions, chunks.document), resumes)
        return [done_in(trace.steps) for trace in Trace.load(resumes)]
    if continues is None:
        return [DoneBefore() for _ in questions]
    also = reader.continued(continues, questions, chunks.document)
    replies = earlier_replies(also)
    return [
        await _known_of(reader, question, chunks, replies.scope(str(number)))
        for number, question in enumerate(questions)
    ]


async def _known_of(reader: Reader, question: str, chunks: Chunks, known: Scope) -> DoneBefore:
    """What the replies of an earlier run leave out, of a reading in rounds in the first one."""
    if reader.config.merges:
        reading = reader.reading(question, chunks)
        sampling = reader.config.sampling(reading.budget.read_reply)
        starts = (
            chunk.start
            for chunk in chunks
            if known.knows(reading.section_messages(chunk, ""), sampling)
        )
        return DoneBefore(frozenset(starts))
    replaying = copy(reader)
    replaying.limits = Limits(max_calls=1)
    replaying.limits.num_calls = 1  # no call leaves
    steps = []
    with suppress(LimitReached):
        async for step in replaying.steps(question, chunks, known=known):
            steps.append(step)
    return done_in(steps)


def plan_reading(
    reader: Reader,
    questions: Sequence[str],
    chunks: Chunks,
    *,
    done: Sequence[DoneBefore] | None = None,
) -> ReadingPlan:
    """Count a reading's calls and tokens by rendering the prompts it will send; `done` needs no call."""
    done = done or [DoneBefore() for _ in questions]
    step = -(-len(questions) // MOST_COUNTED)  # of so many questions, the first stands for all
    alike = Counter(
        (questions[number - number % step], before) for number, before in enumerate(done)
    )
    counts = {each: _SectionCount() for each in alike}
    readings = {question: reader.reading(question, chunks) for question, _ in counts}
    for chunk in chunks:
        for (question, before), count in counts.items():
            messages = readings[question].section_messages(chunk, "")
            tokens = reader.tokenizer.count_messages(messages)
            count.add(tokens, is_done=before.is_answered or chunk.start in before.starts)
    num_chunks = max((count.num_all for count in counts.values()), default=0)
    total, max_calls, num_left = Work(), 0, 0
    for (question, before), num in alike.items():
        if not before.is_answered:
            work, most = _work_of(reader, question, counts[question, before])
            total += work * num
            max_calls += most * num
            num_left += num
    config = reader.config
    return ReadingPlan(
        **asdict(total),
        num_questions=len(questions),
        num_chunks=num_chunks,
        max_calls=max_calls,
        calls_at_once=min(num_left * num_chunks, reader.calls_at_once)
        if config.merges
        else num_left,
        is_exact=step <= 1 and reader.tokenizer.is_exact and reader.tokenizer.knows_template,
    )


@dataclass(slots=True)
class _SectionCount:
    """The sections of a text, and those that are left to read in the first round."""

    num_all: int = 0
    all_tokens: int = 0
    """Tokens of the prompts."""
    num_left: int = 0
    left_tokens: int = 0

    def add(self, tokens: int, *, is_done: bool) -> None:
        self.num_all += 1
        self.all_tokens += tokens
        if not is_done:
            self.num_left += 1
            self.left_tokens += tokens


def _work_of(reader: Reader, question: str, count: _SectionCount) -> tuple[Work, int]:
    """What one question takes, and the most calls that it may take."""
    config, budget = reader.config, reader.check(question)
    rounds = config.rounds if config.mode == "parallel" else 1
    num_merges = rounds * max_merges(config, count.num_all, budget)
    num_reads = count.num_left + (rounds - 1) * count.num_all
    answer = reader.prompts.answer_messages(
        question=question,
        memory="",
        num_sections=count.num_all,
        answer_tokens=config.answer_tokens,
    )
    work = Work(
        num_calls=count.num_left + 1,
        prompt_tokens=count.left_tokens + reader.tokenizer.count_messages(answer),
        max_memory_tokens=budget.memory * num_reads
        + (rounds - 1) * count.all_tokens
        + num_merges * (budget.window - budget.merge_reply)
        + budget.ledger,
        max_completion_tokens=budget.read_reply * num_reads
        + budget.answer_reply
        + num_merges * budget.merge_reply,
    )
    return work, num_reads + 1 + num_merges


def max_merges(config: AgentConfig, num_chunks: int, budget: Budget) -> int:
    """Merges of one round, where every note is as long as it may be."""
    if not config.merges or config.joins_memories:
        return 0
    at_once = max(2, budget.merge_room // (config.memory_tokens + NOTE_MARK_TOKENS))
    left = num_chunks
    num_merges = int(left == 1)
    while left > 1:
        left = -(-left // at_once)
        num_merges += left
    return num_merges
