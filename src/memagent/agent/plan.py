"""What a reading will cost, known before the first call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from memagent.agent.budget import NOTE_MARK_TOKENS, Budget
from memagent.agent.journal import check_same, earlier_replies, read_reading
from memagent.agent.model_call import Limits
from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace
from memagent.agent.work import Speed, Work
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.errors import LimitReached
from memagent.replies import Scope

MOST_COUNTED = 500
"""Questions whose prompts are counted, at most; of more, these are a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The calls and tokens of a reading."""

    num_questions: int
    num_chunks: int
    num_calls: int
    """One per section and one for the answer, for each question, without those of an earlier run: exact where
    sections are read in order, the least where notes or memories are merged."""
    max_calls: int
    """With all rounds, and with merges of all notes at their limit."""
    calls_at_once: int
    """One for each question where sections are read in order, more where they are read apart from each other."""
    prompt_tokens: int
    """Of `num_calls`: exact for instructions, questions and sections; what the memory adds is not known yet."""
    max_memory_tokens: int
    """What memories, quotes, merges and further rounds can add to the prompts at most."""
    max_completion_tokens: int
    """Every reply at its limit."""
    is_exact: bool
    """False when tokens were estimated, the chat template is an allowance, or not all questions were counted."""

    @property
    def work(self) -> Work:
        """The calls and tokens as evaluations count them, too."""
        return Work(
            num_calls=self.num_calls,
            prompt_tokens=self.prompt_tokens,
            max_memory_tokens=self.max_memory_tokens,
            max_completion_tokens=self.max_completion_tokens,
        )

    def seconds(self, speed: Speed, *, is_shared: bool = False) -> float:
        """About how long the reading takes.

        Calls to an endpoint do not slow each other down; with `is_shared` all calls share one processor, as
        those of a model in this process do.
        """
        return self.work.seconds(speed, lanes=None if is_shared else self.calls_at_once)


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
    works = [
        work
        for (question, before), num in alike.items()
        if not before.is_answered
        for work in [_work_of(reader, question, counts[question, before])] * num
    ]
    return ReadingPlan(
        num_questions=len(questions),
        num_chunks=num_chunks,
        num_calls=sum(work.num_calls for work in works),
        max_calls=sum(work.max_calls for work in works),
        calls_at_once=_calls_at_once(reader, num_chunks, len(works)),
        prompt_tokens=sum(work.prompt_tokens for work in works),
        max_memory_tokens=sum(work.max_memory_tokens for work in works),
        max_completion_tokens=sum(work.max_completion_tokens for work in works),
        is_exact=step <= 1 and reader.tokenizer.is_exact and reader.tokenizer.knows_template,
    )


@dataclass(slots=True)
class _SectionCount:
    """The sections of a text, and those that are left to read in the first round."""

    num_all: int = 0
    all_tokens: int = 0
    """Of the prompts."""
    num_left: int = 0
    left_tokens: int = 0

    def add(self, tokens: int, *, is_done: bool) -> None:
        self.num_all += 1
        self.all_tokens += tokens
        if not is_done:
            self.num_left += 1
            self.left_tokens += tokens


class _QuestionWork(NamedTuple):
    """What one question takes, as a plan counts it."""

    num_calls: int
    max_calls: int
    prompt_tokens: int
    max_memory_tokens: int
    max_completion_tokens: int


def _work_of(reader: Reader, question: str, count: _SectionCount) -> _QuestionWork:
    budget = reader.check(question)
    rounds = reader.config.rounds if reader.config.mode == "parallel" else 1
    num_merges = rounds * max_merges(reader.config, count.num_all, budget)
    num_reads = count.num_left + (rounds - 1) * count.num_all
    return _QuestionWork(
        num_calls=count.num_left + 1,
        max_calls=num_reads + 1 + num_merges,
        prompt_tokens=count.left_tokens + _answer_tokens(reader, question, count.num_all),
        max_memory_tokens=budget.memory * num_reads
        + (rounds - 1) * count.all_tokens
        + num_merges * (budget.window - budget.merge_reply)
        + budget.ledger,
        max_completion_tokens=budget.read_reply * num_reads
        + budget.answer_reply
        + num_merges * budget.merge_reply,
    )


def _answer_tokens(reader: Reader, question: str, num_chunks: int) -> int:
    messages = reader.prompts.answer_messages(
        question=question,
        memory="",
        num_sections=num_chunks,
        answer_tokens=reader.config.answer_tokens,
    )
    return reader.tokenizer.count_messages(messages)


def _calls_at_once(reader: Reader, num_chunks: int, num_questions: int) -> int:
    config = reader.config
    if not config.merges:
        return num_questions
    return min(num_questions * num_chunks, reader.calls_at_once)


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
