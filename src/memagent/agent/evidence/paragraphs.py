"""Paragraphs around quotes, so that an answer is written from the text and not from the memory alone.

    ledger ─▶ the paragraph of each quote ─▶ as many as fit, in the order of the text ─▶ the answer's prompt

What a memory holds of a section is often one sentence of two that belong together. Paragraphs that were noted far apart stand
side by side here, as in a short text, however long the text is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memagent.agent.evidence.ledger import JOINT_TOKENS, held_numbers, ranked
from memagent.agent.evidence.quotes import Quote, Span
from memagent.agent.evidence.replies import shielded
from memagent.documents.tokenizers import Tokenizer

HEADING = "Paragraphs from the text:"
MAX_CHARS = 1500
"""A longer paragraph is cut to whole sentences around its quote."""
MAX_QUOTES = 64
"""Quotes whose paragraphs are considered, at most."""

_blank_line = re.compile(r"\n[ \t\r\f\v]*\n\s*")
_sentence_end = re.compile(r"(?<=[.!?])\s+|\n")


def show_paragraphs(
    ledger: Sequence[Quote],
    text: str,
    question: str,
    tokenizer: Tokenizer,
    *,
    memory: str,
    max_tokens: int,
) -> str:
    """The paragraphs of quotes within the limit, with a heading; empty where there are none, or no room for one.

    Quotes that the memory holds come first, then those that fit the question best. A paragraph that does not fit is left
    out, but for its quote.
    """
    room = max_tokens - tokenizer.count(f"{HEADING}\n")
    if not ledger or room <= 0:
        return ""
    chosen: list[Span] = []
    for quote in _by_use(ledger, question, memory)[:MAX_QUOTES]:
        for span in (paragraph_at(text, quote.span), quote.span):
            spans = joined([*chosen, span])
            if _num_tokens(text, spans, tokenizer) <= room:
                chosen = spans
                break
    blocks = [text[start:end].strip() for start, end in chosen]
    return shielded("\n\n".join([f"{HEADING}\n{blocks[0]}", *blocks[1:]])) if blocks else ""


def _by_use(ledger: Sequence[Quote], question: str, memory: str) -> list[Quote]:
    """Quotes in the order in which an answer needs them."""
    held = set(held_numbers(memory, ledger))
    entries = ranked(ledger, question)
    return [one.quote for one in sorted(entries, key=lambda one: one.number not in held)]


def paragraph_at(text: str, span: Span, *, max_chars: int = MAX_CHARS) -> Span:
    """The paragraph that a span stands in; of a longer one, whole sentences around the span.

    >>> text = "One.\\n\\nTwo is here. It is red.\\n\\nThree."
    >>> text[slice(*paragraph_at(text, (19, 29)))]
    'Two is here. It is red.'
    """
    start, end = span
    low, high = max(0, start - max_chars), min(len(text), end + max_chars)
    breaks = [found.end() for found in _blank_line.finditer(text, low, start)]
    following = _blank_line.search(text, end, high)
    low = breaks[-1] if breaks else low
    high = following.start() if following else high
    if high - low <= max_chars:
        return low, high
    side = max(0, max_chars - (end - start)) // 2
    return _begin(text, low, start, side), _end(text, end, high, side)


def _begin(text: str, low: int, start: int, side: int) -> int:
    """The beginning of a paragraph, or of its first sentence that is not too far from a quote."""
    if low >= start - side:
        return low
    found = _sentence_end.search(text, start - side, start)
    return found.end() if found else start


def _end(text: str, end: int, high: int, side: int) -> int:
    """The end of a paragraph, or of its last sentence that is not too far from a quote."""
    if high <= end + side:
        return high
    ends = [found.start() for found in _sentence_end.finditer(text, end, end + side)]
    return ends[-1] if ends else end


def joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in the order of the text; those that overlap as one.

    >>> joined([(8, 12), (0, 3), (2, 5)])
    [(0, 5), (8, 12)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _num_tokens(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> int:
    return sum(tokenizer.count(text[start:end].strip()) + JOINT_TOKENS for start, end in spans)
