"""From a model's reply to the next memory: reasoning is left out, the budget is kept."""

from __future__ import annotations

import re
from typing import NamedTuple

from memagent.config import EmptyReplies
from memagent.documents.tokenizers import Tokenizer

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


class Rewritten(NamedTuple):
    """A new memory, and what happened to it on the way."""

    text: str
    num_tokens: int
    was_cut: bool
    """True when the reply was longer than the memory may be."""
    was_kept: bool
    """True when the reply was empty or said that nothing changes, so the old memory stays."""


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
    said: str,
    tokenizer: Tokenizer,
    *,
    memory_tokens: int,
    is_kept: bool = False,
    empty_replies: EmptyReplies = "keep",
) -> Rewritten:
    """The memory after a reply. By default an empty reply keeps the old one: silence must not erase facts.

    `is_kept`: the reply says that nothing changes.
    """
    if is_kept or (not said and empty_replies == "keep"):
        return Rewritten(old, old_tokens, was_cut=False, was_kept=True)
    num_tokens = tokenizer.count(said)
    if num_tokens <= memory_tokens:
        return Rewritten(said, num_tokens, was_cut=False, was_kept=False)
    text = shortened(said, tokenizer, max_tokens=memory_tokens)
    return Rewritten(text, tokenizer.count(text), was_cut=True, was_kept=False)


def shortened(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    """The longest beginning of a text that has at most `max_tokens` when it stands alone."""
    end = tokenizer.measure(text).end_of(max_tokens)
    while end and tokenizer.count(text[:end]) > max_tokens:
        end -= 1
    return text[:end]
