"""Texts of chained facts, and an engine that reads them perfectly as far as its prompt shows them."""

import re
from collections.abc import Sequence

from memagent.types import Message, Sampling

_fact = re.compile(r"\b(\w+) leads to (\w+)\.")
_block = re.compile(r"<(question|section|memory|note)(?: [^>]*)?>\n(.*?)\n</\1>", re.DOTALL)


def chained_text(names: Sequence[str], *, sections: int, places: Sequence[int]) -> str:
    """Sections of about 200 characters; the fact from each name to the next stands in one of them."""
    parts = [f"Section {number} is dull. " + "It goes on. " * 14 for number in range(sections)]
    for place, first, second in zip(places, names[:-1], names[1:], strict=True):
        parts[place] = f"Section {place} tells: {first} leads to {second}. " + "It goes on. " * 12
    return "\n\n".join(part.strip() for part in parts)


def follow(messages: Sequence[Message], sampling: Sampling) -> str:
    """Notes, merges, memories and answers from what stands in the prompt, and nothing else."""
    blocks = _block.findall(messages[-1]["content"])
    texts = dict(blocks)
    start = texts["question"].rsplit(" ", 1)[-1].rstrip("?")
    known = dict(_fact.findall(texts.get("memory", "")))
    if "section" in texts:
        found = dict(_fact.findall(texts["section"]))
        wanted = {first: found[first] for first in found if first in {start, *known.values()}}
        if "Nothing." in messages[-1]["content"].rpartition("</section>")[2]:
            return _lines(wanted) or "Nothing."
        return _lines({**known, **found}) or "(nothing yet)"
    for name, text in blocks:
        known |= dict(_fact.findall(text)) if name == "note" else {}
    end = start
    while end in known:
        end = known[end]
    if "note" in texts:
        return f"{_lines(known)}\nMissing: {'nothing' if end == 'home' else f'where {end} leads'}"
    return end


def _lines(facts: dict[str, str]) -> str:
    return "\n".join(f"{first} leads to {second}." for first, second in facts.items())
