"""What a reading will cost, known before the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memagent.agent.budget import NOTE_MARK_TOKENS, Budget
from memagent.agent.rates import CallRate, TimeEstimate, Work
from memagent.agent.reader import Reader
from memagent.config import AgentConfig
from memagent.documents.chunking import Chunks
from memagent.types import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The calls and tokens of a reading."""

    num_questions: int
    num_chunks: int
    num_calls: int
    """One per section and one for the answer, for each question: exact where sections are read in order, the
    least where notes or memories are merged."""
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
    """False when tokens were estimated, or the chat template is an allowance."""

    @property
    def work(self) -> Work:
        """The calls and tokens as evaluations count them, too."""
        return Work(
            num_calls=self.num_calls,
            prompt_tokens=self.prompt_tokens,
            max_memory_tokens=self.max_memory_tokens,
            max_completion_tokens=self.max_completion_tokens,
        )

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost: nothing written at all, everything at its limit."""
        return self.work.cost(prices)

    def seconds(self, rate: CallRate, *, is_shared: bool = False) -> TimeEstimate:
        """How long the reading takes at a rate.

        Calls to an endpoint do not slow each other down; with `is_shared` all calls share one processor, as
        those of a model in this process do.
        """
        return self.work.seconds(rate, lanes=None if is_shared else self.calls_at_once)


def plan_reading(
    reader: Reader,
    questions: Sequence[str],
    chunks: Chunks,
) -> ReadingPlan:
    """Count a reading's calls and tokens by rendering every prompt it will send."""
    num_chunks = 0
    prompt_tokens = [0] * len(questions)
    """Of the sections, by question."""
    budgets = [reader.check(question) for question in questions]
    for chunk in chunks:
        num_chunks += 1
        for number, question in enumerate(questions):
            messages = reader.prompts.section_messages(
                is_parallel=reader.config.asks_notes,
                question=question,
                section=chunk.text,
                memory="",
                section_number=chunk.index + 1,
                memory_tokens=reader.config.memory_tokens,
            )
            prompt_tokens[number] += reader.tokenizer.count_messages(messages)
    answers = [_answer_tokens(reader, question, num_chunks) for question in questions]
    rounds = reader.config.rounds if reader.config.mode == "parallel" else 1
    merges = [rounds * max_merges(reader.config, num_chunks, budget) for budget in budgets]
    return ReadingPlan(
        num_questions=len(questions),
        num_chunks=num_chunks,
        num_calls=len(questions) * (num_chunks + 1),
        max_calls=len(questions) * (rounds * num_chunks + 1) + sum(merges),
        calls_at_once=_calls_at_once(reader, num_chunks, len(questions)),
        prompt_tokens=sum(prompt_tokens) + sum(answers),
        max_memory_tokens=sum(
            budget.memory * num_chunks * rounds
            + (rounds - 1) * sections
            + num_merges * (budget.window - budget.merge_reply)
            + budget.ledger
            for budget, sections, num_merges in zip(budgets, prompt_tokens, merges, strict=True)
        ),
        max_completion_tokens=sum(
            budget.read_reply * num_chunks * rounds
            + budget.answer_reply
            + num_merges * budget.merge_reply
            for budget, num_merges in zip(budgets, merges, strict=True)
        ),
        is_exact=reader.tokenizer.is_exact and reader.tokenizer.knows_template,
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
    wide = num_chunks if config.mode == "parallel" else min(num_chunks, config.segments)
    return min(num_questions * wide, reader.call_slots().num)


def max_merges(config: AgentConfig, num_chunks: int, budget: Budget) -> int:
    """Merges of one round, or of all segments, where every note is as long as it may be."""
    if not config.merges or config.joins_memories:
        return 0
    at_once = max(2, budget.merge_room // (config.memory_tokens + NOTE_MARK_TOKENS))
    left = num_chunks if config.mode == "parallel" else min(num_chunks, config.segments)
    num_merges = int(config.mode == "parallel" and left == 1)
    while left > 1:
        left = -(-left // at_once)
        num_merges += left
    return num_merges
