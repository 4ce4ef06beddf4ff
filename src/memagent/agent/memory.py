"""From a model's reply to the next memory: reasoning is left out, the budget is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from memagent.agent.prompts import MemoryChange
from memagent.agent.trace import Step
from memagent.config import EmptyReplies
from memagent.tokens.tokenizers import Tokenizer

_TAGS = "think|thinking|thought|reasoning"
_closed_block = re.compile(rf"<({_TAGS})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_dangling_end = re.compile(rf"^.*</({_TAGS})>", re.DOTALL | re.IGNORECASE)
_dangling_start = re.compile(rf"<({_TAGS})>.*$", re.DOTALL | re.IGNORECASE)


class Reply(NamedTuple):
    """A model's reply, taken apart."""

    text: str
    """The reply itself."""
    reasoning: str | None
    """The reasoning before it; None without reasoning."""


class ReadingState(NamedTuple):
    """What goes from step to step: the memory and its size, and whether it is said to be enough."""

    memory: str = ""
    num_tokens: int = 0
    is_enough: bool = False
    """Whether the model said so."""
    certainty: Mapping[str, float] = MappingProxyType({})
    """Log-probability of each line of the memory, where the engine reports any."""

    def after_read(self, step: Step, num_tokens: int) -> ReadingState:
        """The state after one more section."""
        certainty = self.certainty
        if step.memory != self.memory and step.logprob is not None:
            lines = set(step.memory.split("\n"))
            new = lines - set(self.memory.split("\n"))  # which share what the reply has
            certainty = {line: value for line, value in certainty.items() if line in lines}
            certainty |= dict.fromkeys(new, step.logprob / max(1, len(new)))
        return ReadingState(step.memory, num_tokens, "enough" in step.flags, certainty)


class Rewritten(NamedTuple):
    """A new memory, and what happened to it on the way."""

    text: str
    num_tokens: int
    was_cut: bool
    """True when the memory would have been longer than it may be."""
    was_kept: bool
    """True when the reply was empty, said that nothing changes or added nothing, so the old memory stays."""


def split_reasoning(text: str) -> Reply:
    """Separate a reply from its reasoning block.

    A closing tag without an opening one ends the reasoning too (some chat templates write the opening
    tag themselves), and an opening tag without a closing one means that all the rest is reasoning.
    """
    said = _closed_block.sub("", text)
    said = _dangling_end.sub("", said)
    said = _dangling_start.sub("", said)
    if said == text:
        return Reply(text.strip(), None)
    return Reply(said.strip(), text.strip())


def rewrite(
    old: str,
    old_tokens: int,
    change: MemoryChange,
    tokenizer: Tokenizer,
    *,
    memory_tokens: int,
    empty_replies: EmptyReplies = "keep",
    certainty: Mapping[str, float] = MappingProxyType({}),
    logprob: float | None = None,
) -> Rewritten:
    """The memory after a reply. By default an empty reply keeps the old one: silence must not erase facts."""
    if change.kind == "keep" or (not change.text and empty_replies == "keep"):
        return Rewritten(old, old_tokens, was_cut=False, was_kept=True)
    if change.kind == "add":
        return extend(
            old,
            old_tokens,
            change.text,
            tokenizer,
            memory_tokens=memory_tokens,
            certainty=certainty,
            logprob=logprob,
        )
    num_tokens = tokenizer.count(change.text)
    if num_tokens <= memory_tokens:
        return Rewritten(change.text, num_tokens, was_cut=False, was_kept=False)
    text = shortened(change.text, tokenizer, max_tokens=memory_tokens)
    return Rewritten(text, tokenizer.count(text), was_cut=True, was_kept=False)


def extend(
    old: str,
    old_tokens: int,
    added: str,
    tokenizer: Tokenizer,
    *,
    memory_tokens: int,
    certainty: Mapping[str, float] = MappingProxyType({}),
    logprob: float | None = None,
) -> Rewritten:
    """The memory with further lines; those it has already are left out.

    What the model was least certain of makes room; the oldest line, where certainty is equal or not known.
    """
    lines = old.split("\n") if old else []
    known = set(lines)
    found = dict.fromkeys(line for line in added.splitlines() if line.strip())
    new = [line for line in found if line not in known]
    if not new:
        return Rewritten(old, old_tokens, was_cut=False, was_kept=True)
    values = {**certainty, **dict.fromkeys(new, (logprob or 0.0) / len(new))}
    fitted = fit_lines([*lines, *new], values, tokenizer, memory_tokens=memory_tokens)
    return fitted._replace(was_kept=fitted.text == old)


def fit_lines(
    lines: Sequence[str],
    certainty: Mapping[str, float],
    tokenizer: Tokenizer,
    *,
    memory_tokens: int,
) -> Rewritten:
    """Lines as a memory; those that the model was least certain of are dropped until the rest fits."""
    kept = list(lines)
    while (num_tokens := tokenizer.count("\n".join(kept))) > memory_tokens and len(kept) > 1:
        kept.remove(min(kept, key=lambda line: certainty.get(line, 0.0)))
    text = "\n".join(kept)
    if num_tokens > memory_tokens:
        text = shortened(text, tokenizer, max_tokens=memory_tokens)
        return Rewritten(text, tokenizer.count(text), was_cut=True, was_kept=False)
    return Rewritten(text, num_tokens, was_cut=len(kept) < len(lines), was_kept=False)


def shortened(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    """The longest beginning of a text that has at most `max_tokens` when it stands alone."""
    end = tokenizer.measure(text).end_of(max_tokens)
    while end and tokenizer.count(text[:end]) > max_tokens:
        end -= 1
    return text[:end]
