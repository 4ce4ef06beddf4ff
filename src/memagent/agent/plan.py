"""What a reading will cost, known before the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memagent.agent.rates import CallRate, TimeEstimate, estimate
from memagent.agent.reader import Reader
from memagent.documents.chunking import Chunks
from memagent.types import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The calls and tokens of a reading."""

    num_questions: int
    num_chunks: int
    num_calls: int
    """Exact: one per section and one for the answer, for each question."""
    prompt_tokens: int
    """Exact for instructions, questions and sections; what the memory adds is not known yet."""
    max_memory_tokens: int
    """What memories and quotes can add to the prompts at most."""
    max_completion_tokens: int
    """Every reply at its limit."""
    is_exact: bool
    """False when tokens were estimated, or the chat template is an allowance."""

    def cost(self, prices: Prices) -> tuple[float, float]:
        """The lowest and the highest cost: nothing written at all, everything at its limit."""
        low = prices.cost(prompt_tokens=self.prompt_tokens, completion_tokens=0)
        high = prices.cost(
            prompt_tokens=self.prompt_tokens + self.max_memory_tokens,
            completion_tokens=self.max_completion_tokens,
        )
        return low, high

    def seconds(self, rate: CallRate, *, is_shared: bool = False) -> TimeEstimate:
        """How long the reading takes at a rate.

        The sections of a question are read one after the other. Calls to an endpoint do not slow each other down;
        with `is_shared` all calls share one processor, as those of a model in this process do.
        """
        return estimate(
            rate,
            num_calls=self.num_calls,
            prompt_tokens=self.prompt_tokens,
            max_completion_tokens=self.max_completion_tokens,
            max_memory_tokens=self.max_memory_tokens,
            lanes=None if is_shared else self.num_questions,
        )


def plan_reading(
    reader: Reader,
    questions: Sequence[str],
    chunks: Chunks,
) -> ReadingPlan:
    """Count a reading's calls and tokens by rendering every prompt it will send."""
    num_chunks = prompt_tokens = 0
    budgets = [reader.check(question) for question in questions]
    for chunk in chunks:
        num_chunks += 1
        for question in questions:
            messages = reader.prompts.read_messages(
                question=question,
                section=chunk.text,
                memory="",
                section_number=chunk.index + 1,
                memory_tokens=reader.config.memory_tokens,
            )
            prompt_tokens += reader.tokenizer.count_messages(messages)
    for question in questions:
        messages = reader.prompts.answer_messages(
            question=question,
            memory="",
            num_sections=num_chunks,
            answer_tokens=reader.config.answer_tokens,
        )
        prompt_tokens += reader.tokenizer.count_messages(messages)
    return ReadingPlan(
        num_questions=len(questions),
        num_chunks=num_chunks,
        num_calls=len(questions) * (num_chunks + 1),
        prompt_tokens=prompt_tokens,
        max_memory_tokens=sum(budget.memory * num_chunks + budget.ledger for budget in budgets),
        max_completion_tokens=sum(
            budget.read_reply * num_chunks + budget.answer_reply for budget in budgets
        ),
        is_exact=reader.tokenizer.is_exact and reader.tokenizer.knows_template,
    )
