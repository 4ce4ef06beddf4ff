r"""The part of a reply that a task with a limit grades: long reasoning is free, a long answer is not.

    reply ──▶ fits the limit ──────────────▶ all of it
              has a \boxed{} ──────────────▶ the last box, and boxes before it while they fit
              has "the answer is" ─────────▶ what follows it, up to the limit
              marks no answer ─────────────▶ its start or its end up to the limit, whichever scores higher

RULER stops a model after so many tokens, 50 where it asks for three words: a reply cannot score by listing
every word there is. A model that reasons first would score nothing that way, so the limit here counts the
answer alone.

    >>> limit_answer("Counting them gives me this: the answer is red, green and blue.", 3).texts
    ('the answer is red, green',)
"""

from __future__ import annotations

import re
from typing import NamedTuple

from memagent.rewards.text import last_boxes, last_phrase, without_reasoning

_token = re.compile(r"[^\W\d_]{1,5}|\d|[^\w\s]|_")


class LimitedAnswer(NamedTuple):
    """What of a reply is graded."""

    texts: tuple[str, ...]
    """The best score of these counts."""
    num_tokens: int
    """Tokens of the answer before it was cut."""
    was_cut: bool


def count_tokens(text: str) -> int:
    """Tokens of an answer: digits, signs, and up to five letters of a word each.

    About what tokenizers of models count, and the same for every model.
    """
    return sum(1 for _ in _token.finditer(text))


def limit_answer(reply: str, max_tokens: int) -> LimitedAnswer:
    """The answer in a reply, cut to `max_tokens`; the marks that graders look for stay."""
    said = without_reasoning(reply)
    num_tokens = count_tokens(said)
    if num_tokens <= max_tokens:
        return LimitedAnswer((reply,), num_tokens, was_cut=False)
    if boxes := last_boxes(said):
        return _limit_boxes(boxes, max_tokens)
    if phrase := last_phrase(said):
        start, answer = said[phrase.start() : phrase.end()], said[phrase.end() :]
        text, num_tokens, was_cut = _shortened(answer, max_tokens)
        return LimitedAnswer((start + text,), num_tokens, was_cut)
    head, tail = said[: _end_of(said, max_tokens)], said[_start_of_last(said, max_tokens) :]
    return LimitedAnswer((head, tail), num_tokens, was_cut=True)


def _limit_boxes(boxes: list[str], max_tokens: int) -> LimitedAnswer:
    *earlier, last = boxes
    text, num_tokens, was_cut = _shortened(last, max_tokens)
    kept = [text + "}" * _num_open(text)]
    for box in reversed(earlier):
        with_box = num_tokens + count_tokens(box)
        if was_cut or with_box > max_tokens:
            break
        kept.insert(0, box)
        num_tokens = with_box
    return LimitedAnswer((", ".join(f"\\boxed{{{box}}}" for box in kept),), num_tokens, was_cut)


def _shortened(text: str, max_tokens: int) -> tuple[str, int, bool]:
    num_tokens = count_tokens(text)
    if num_tokens <= max_tokens:
        return text, num_tokens, False
    return text[: _end_of(text, max_tokens)], num_tokens, True


def _end_of(text: str, max_tokens: int) -> int:
    """Where the first so many tokens end."""
    for number, token in enumerate(_token.finditer(text), start=1):
        if number == max_tokens:
            return token.end()
    return len(text)


def _start_of_last(text: str, max_tokens: int) -> int:
    """Where the last so many tokens start."""
    starts = [token.start() for token in _token.finditer(text)]
    return starts[-max_tokens]


def _num_open(text: str) -> int:
    """Braces that a cut left open."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
    return max(depth, 0)
