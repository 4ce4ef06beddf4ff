"""A trace as notebooks show it: question, answer, and what was in memory after each section.

Texts, names and answers may hold anything. All of it is escaped: no tag, link, formula or table of theirs
becomes part of the page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memagent.agent.trace import Trace

MAX_ROWS = 40
"""Sections that are shown; of more, the first and the last ones."""
MAX_CHARS = 4000
"""Characters of one memory or answer that are shown."""
CELL = 'style="text-align: left; white-space: pre-wrap"'
COLUMNS = ("section", "where", "memory", "flags")

_hidden = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and marks that turn the direction of the text around them."""
_punctuation = re.compile(r"""[!#$&(-+\-./:<=>@\[-`{-~]""")


def trace_html(trace: Trace) -> str:
    """The trace as HTML."""
    header = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(
        f"<tr>{''.join(f'<td {CELL}>{_as_html(cell)}</td>' for cell in row)}</tr>"
        for row in _rows(trace)
    )
    return (
        '<div style="max-width: 60em">'
        f"<p><b>{_as_html(trace.question)}</b></p>"
        f'<p style="white-space: pre-wrap">{_as_html(_answer(trace))}</p>'
        f"{''.join(f'<p>{_as_html(line)}</p>' for line in _sources(trace))}"
        f"<details><summary>{_as_html(_summary(trace))}</summary>"
        f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></details></div>"
    )


def trace_markdown(trace: Trace) -> str:
    """The trace as Markdown."""
    lines = [
        f"**{_as_markdown(trace.question)}**",
        "",
        f"> {_as_markdown(_answer(trace))}",
        "",
        *(f"{_as_markdown(line)}\n" for line in _sources(trace)),
        _as_markdown(_summary(trace)),
        "",
        _table_line(COLUMNS),
        _table_line(["---"] * len(COLUMNS)),
        *(_table_line([_as_markdown(cell) for cell in row]) for row in _rows(trace)),
    ]
    return "\n".join(lines) + "\n"


def _rows(trace: Trace) -> list[list[str]]:
    """The lines of the table, a cell for each of COLUMNS; those read at once in the order of the text."""
    steps = [step for step in trace.steps if step.section is not None or step.kind == "merge"]
    starts = sorted({step.section.start for step in steps if step.section})
    numbers = {start: number for number, start in enumerate(starts, start=1)}
    if any(step.round is not None for step in steps):
        steps.sort(
            key=lambda step: (step.round or 0, step.section.start if step.section else math.inf)
        )
    rows = []
    for step in steps:
        title = f"merge of {len(step.inputs):,}"
        if step.section:
            title = f"{step.index + 1 if step.round is None else numbers[step.section.start]:,}"
        if step.round is not None:
            title += f", round {step.round}"
        places = step.section.places if step.section else ()
        where = _cut(", ".join(map(str, places)))
        rows.append([title, where, _cut(step.memory), ", ".join(step.flags)])
    if (num_left_out := len(rows) - MAX_ROWS) > 0:
        left_out = ["...", f"{num_left_out:,} sections are not shown", "", ""]
        return [*rows[: MAX_ROWS // 2], left_out, *rows[-MAX_ROWS // 2 :]]
    return rows


def _answer(trace: Trace) -> str:
    return "no answer yet" if trace.final_answer is None else _cut(trace.final_answer)


def _sources(trace: Trace) -> list[str]:
    """The quotes that the answer cites, with their places."""
    return [_cut(one.line()) for one in trace.citations]


def _summary(trace: Trace) -> str:
    usage = trace.usage
    tokens = usage.prompt_tokens + usage.completion_tokens
    sections = "1 section" if trace.num_chunks == 1 else f"{trace.num_chunks:,} sections"
    return f"{sections} of {_cut(trace.source)}, {trace.model}, {tokens:,} tokens, {trace.seconds:.1f} s"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."


def _as_html(text: str) -> str:
    return f"<bdi>{html.escape(_visible(text))}</bdi>"


def _as_markdown(text: str) -> str:
    """Punctuation as entities: escaping by backslash would leave formulas such as \\(x\\) alive."""
    escaped = _punctuation.sub(lambda match: f"&#{ord(match[0])};", _visible(text))
    return "<br>".join(line.strip() for line in escaped.splitlines())


def _visible(text: str) -> str:
    return _hidden.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
