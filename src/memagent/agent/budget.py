"""Does everything fit the window? Answered before the first call, in tokens.

read    template + question + section + memory + reply (memory + quotes + reasoning)   <= window
answer  template + question + memory + ledger + reply (answer + sources + reasoning) <= window
merge   template + question + memory + two notes at least + reply (memory + reasoning) <= window
"""

from __future__ import annotations

from typing import NamedTuple

from memagent.agent.prompts import PromptSet
from memagent.config import AgentConfig
from memagent.errors import BudgetError
from memagent.tokens.tokenizers import Tokenizer

JOINT_TOKENS = 32
"""Spare room: text tokenises a little differently where the parts of a prompt meet."""
LARGE_NUMBER = 10**6
"""Stands for the section number when a prompt is measured, so that no real one is longer."""
MISSING_TOKENS = 64
"""Tokens of what a memory says is still missing, beside the memory itself."""
NOTE_MARK_TOKENS = 48
"""Tokens around each note in a merge: its tags, and the sections it is on."""
MARK_TOKENS = 12
"""Room in a reply for marks such as <enough/>."""
SOURCES_TOKENS = 48
"""Room in the answer for the line that names its sources."""


class Budget(NamedTuple):
    """The tokens of each part of the prompts, at most."""

    window: int
    question: int
    read_template: int
    """Everything in a read prompt but question, section and memory."""
    answer_template: int
    section: int
    memory: int
    read_reply: int
    answer_reply: int
    ledger: int = 0
    """Most tokens of quotes that the answer is shown: what the settings allow and the window has room for."""
    merge_template: int | None = None
    """None where nothing is merged."""
    merge_reply: int = 0
    """The most a merge may write."""

    @property
    def merge_room(self) -> int:
        """Tokens of notes that fit one merge, their marks included."""
        template = self.merge_template or 0
        used = template + self.question + self.memory + self.merge_reply + JOINT_TOKENS
        return self.window - used

    @property
    def read_total(self) -> int:
        """The most a read call can take of the window."""
        prompt = self.read_template + self.question + self.section + self.memory
        return prompt + self.read_reply + JOINT_TOKENS

    @property
    def answer_total(self) -> int:
        """The most the answer call can take of the window."""
        prompt = self.answer_template + self.question + self.memory
        return prompt + self.answer_reply + JOINT_TOKENS


def check_budget(
    question: str, config: AgentConfig, prompts: PromptSet, tokenizer: Tokenizer
) -> Budget:
    """The budget for a question. Raises BudgetError when the parts do not fit the window."""
    budget = measure_budget(question, config, prompts, tokenizer)
    for name, total in (("read", budget.read_total), ("answer", budget.answer_total)):
        if total > budget.window:
            raise BudgetError(_explain(name, total, budget))
    needed = 2 * (config.memory_tokens + NOTE_MARK_TOKENS)
    if budget.merge_template is not None and budget.merge_room < needed:
        raise BudgetError(
            f"a merge needs room for two notes, {needed} tokens, and {max(0, budget.merge_room)} fit a window "
            f"of {budget.window}; lower `memory_tokens`, or raise `window`"
        )
    return budget


def measure_budget(
    question: str, config: AgentConfig, prompts: PromptSet, tokenizer: Tokenizer
) -> Budget:
    """The tokens of each part, whether they fit or not."""
    # the template is what a prompt with the question in it needs beyond the question
    num_question = tokenizer.count(question)
    is_parallel = config.asks_notes
    read = prompts.section_messages(
        is_parallel=is_parallel,
        question=question,
        section="",
        memory="",
        section_number=LARGE_NUMBER,
        memory_tokens=config.memory_tokens,
    )
    answer = prompts.answer_messages(
        question=question, memory="", num_sections=LARGE_NUMBER, answer_tokens=config.answer_tokens
    )
    quotes = config.quote_tokens if config.asks_quotes else 0
    marks = MARK_TOKENS if config.stop_early else 0
    sources = SOURCES_TOKENS if config.asks_quotes else 0
    merge_template = None
    if config.merges and not config.joins_memories:
        merge = prompts.merge_messages(
            question=question, notes=(), memory="", memory_tokens=config.memory_tokens
        )
        merge_template = tokenizer.count_messages(merge) - num_question
    budget = Budget(
        window=config.window,
        question=num_question,
        read_template=tokenizer.count_messages(read) - num_question,
        answer_template=tokenizer.count_messages(answer) - num_question,
        section=config.chunk_tokens,
        memory=config.memory_tokens + (MISSING_TOKENS if is_parallel else 0),
        read_reply=config.memory_tokens + config.reasoning_tokens + quotes + marks,
        answer_reply=config.answer_tokens + config.reasoning_tokens + sources,
        merge_template=merge_template,
        merge_reply=config.memory_tokens + config.reasoning_tokens + MISSING_TOKENS,
    )
    room = max(0, budget.window - budget.answer_total)
    return budget._replace(ledger=min(config.ledger_tokens, room) if config.asks_quotes else 0)


def _explain(name: str, total: int, budget: Budget) -> str:
    excess = total - budget.window
    room_for_question = budget.question - excess
    template = budget.read_template if name == "read" else budget.answer_template
    reply = budget.read_reply if name == "read" else budget.answer_reply
    section = f"section {budget.section} + " if name == "read" else ""
    parts = (
        f"question {budget.question} + {section}memory {budget.memory} + reply {reply} + "
        f"template {template + JOINT_TOKENS} = {total} tokens"
    )
    if room_for_question >= 32 and budget.question > room_for_question:
        return (
            f"the question has {budget.question} tokens and {room_for_question} fit a window of "
            f"{budget.window} ({parts}); shorten it by {excess}, or lower `chunk_tokens`"
        )
    remedy = (
        f"lower `chunk_tokens` to {budget.section - excess}"
        if name == "read" and budget.section - excess >= 16
        else "lower `memory_tokens` or `answer_tokens`"
    )
    return f"{parts} do not fit a window of {budget.window}; {remedy}, or raise `window` to {total}"
