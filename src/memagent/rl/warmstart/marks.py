"""What right replies hold besides the memory: quotes, items, the mark that enough is known, and sources.

    marks = marks_of(example, config)               # spans of the evidence; items for tasks that count
    marks.quotes(section)                           # <quote>...</quote>
    sources_of(marks.spans, "... [1] ... [2] ...")  # "Sources: 2"

Where the evidence is, is known, so quotes, the moment to stop and the sources of the answer are known too. Items of
tasks that count are what code needs to count them: name, value and sentence; their memory stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from memagent.agent.evidence.replies import SEPARATOR, shielded
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.documents.document import Chunk

MAX_SOURCES = 12
"""Quotes that an answer names, at most."""
WHOLE_TEXT = frozenset(
    {
        *("beyond/counting", "beyond/aggregation", "beyond/corrections", "beyond/unanswerable"),
        *("ruler/cwe", "ruler/fwe", "ruler/vt"),
    }
)
"""Tasks that are answered only when the whole text has been read: demonstrations of them never stop early."""

_shown = re.compile(r"^\[(\d+)\] ", re.MULTILINE)


class Mark(NamedTuple):
    """A span of the text that a reply quotes, with the item it is."""

    start: int
    end: int
    text: str
    item: str = ""
    value: str = ""
    is_source: bool = True
    """Whether the answer rests on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The marks of an example's right replies."""

    spans: tuple[Mark, ...]
    """In the order of the text."""
    items: bool
    needed: frozenset[int] | None
    """Ends of the evidence that must have been read before a reply says that enough is known; None where none
    says so."""

    def inside(self, section: Chunk) -> list[Mark]:
        """The marks of a section; what two sections share is in neither."""
        return [
            mark for mark in self.spans if section.start <= mark.start and mark.end <= section.end
        ]

    def quotes(self, section: Chunk) -> str:
        """The quotes of a section, one a line."""
        return "\n".join(self._quote(mark) for mark in self.inside(section))

    def _quote(self, mark: Mark) -> str:
        text = shielded(mark.text)
        if not self.items:
            return f"<quote>{text}</quote>"
        return f"<item>{f' {SEPARATOR} '.join((mark.item, mark.value, text))}</item>"


def sources_of(quoted: Iterable[Mark], prompt: str) -> str:
    """The line that names the sources, of the quotes that a prompt shows by their numbers."""
    shown = {int(number) for number in _shown.findall(prompt)}
    numbers = [
        str(number)
        for number, mark in enumerate(sorted(set(quoted)), start=1)
        if mark.is_source and number in shown
    ]
    return f"Sources: {', '.join(numbers[:MAX_SOURCES]) or 'none'}"


def marks_of(example: Example, config: AgentConfig) -> Marks:
    """The marks that replies of these settings hold; none where the settings ask for none."""
    rule = ITEM_RULES.get(example.task, _evidence) if config.items else _evidence
    spans = sorted(rule(example)) if config.asks_quotes else []
    if spans and config.mode == "in_order":
        spans = sorted([*spans, *_candidates(example)])
    needed = frozenset(end for _, end in example.evidence_offsets())
    can_stop = config.stop_early and needed and example.task not in WHOLE_TEXT
    return Marks(spans=tuple(spans), items=config.items, needed=needed if can_stop else None)


def counts_items(example: Example, config: AgentConfig) -> bool:
    """Whether items of an example are counted by code, so that its memory stays empty."""
    return config.items and example.task in ITEM_RULES


# --- spans ----------------------------------------------------------------------------------------


def _evidence(example: Example) -> list[Mark]:
    """Each piece of evidence, named by the passage it is in."""
    return [
        Mark(start, end, item.text, item=example.passages[item.document].title or "fact")
        for item, (start, end) in zip(example.evidence, example.evidence_offsets(), strict=True)
    ]


def _candidates(example: Example) -> list[Mark]:
    """What may matter as long as the fact that tells has not been read; no answer rests on it."""
    text = example.text()
    last = max((end for _, end in example.evidence_offsets()), default=0)
    return [
        Mark(start, end, text[start:end], item="fact", is_source=False)
        for start, end, _ in example.metadata.get("spans", {}).get("candidate", [])
        if end < last
    ]


def _counted(example: Example) -> list[Mark]:
    """What counts: its name is what is counted."""
    name = str(example.metadata.get("counted", "item")).removesuffix(" so far")
    return [mark._replace(item=name) for mark in _evidence(example)]


def _entries(example: Example) -> list[Mark]:
    """Names with numbers."""
    entries = example.metadata["entries"]
    pairs = zip(sorted(_evidence(example)), entries, strict=True)
    return [mark._replace(item=str(name), value=str(num)) for mark, (name, num) in pairs]


def _states(example: Example) -> list[Mark]:
    """States of things, one after the other: the last value of each is the valid one, and a source."""
    pairs = zip(example.evidence, sorted(_evidence(example)), strict=True)
    found = [(mark, *state_of(item.note or item.text)) for item, mark in pairs]
    last = {name: mark.start for mark, name, _ in found}
    return [
        mark._replace(item=name, value=value, is_source=last[name] == mark.start)
        for mark, name, value in found
    ]


def state_of(note: str) -> tuple[str, str]:
    """The thing that a note tells the state of, and the state.

    >>> state_of("The boat race of Farnley is set for 4 March.")
    ('boat race of Farnley', '4 March')
    """
    name, mark, value = note.partition(" is set for ")
    return (name.removeprefix("The "), value.rstrip(".")) if mark else ("state", note)


def _similar(example: Example) -> list[Mark]:
    """All items of the kind that is asked for; the answer rests on one of them."""
    text = example.text()
    name = f"{example.metadata['kind']} about {example.metadata['topic']}"
    similar = [
        Mark(start, end, text[start:end], item=name, is_source=False)
        for start, end, _ in example.metadata["spans"].get("similar", [])
    ]
    return [*similar, *(mark._replace(item=name) for mark in _evidence(example))]


ITEM_RULES: dict[str, Callable[[Example], list[Mark]]] = {
    "beyond/counting": _counted,
    "beyond/aggregation": _entries,
    "beyond/corrections": _states,
    "beyond/coreference": _similar,
}
"""Tasks whose items are counted by code."""
