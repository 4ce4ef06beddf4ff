"""Which questions a file names: the survivors of a filter, or those of the original project's own files.

    numbers = select_items(store, Path("survivors.jsonl"))      # numbers of questions in the store

Questions are found by their HotpotQA id where the file has it, else by their wording.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memagent.data.formats.files import read_examples
from memagent.data.formats.json_stream import read_records
from memagent.data.formats.original import kind_of, read_original
from memagent.data.tasks.hotpotqa.store import Store
from memagent.errors import DataError


class SelectedItems(NamedTuple):
    """Questions of a store, in the order of a file."""

    numbers: list[int]
    num_unknown: int
    """Questions of the file that the store does not have."""


def select_items(store: Store, file: Path) -> SelectedItems:
    """The questions of a store that a file names, each once."""
    by_id: dict[str, int] = {}
    by_wording: dict[str, int] = {}
    for number in range(store.num_items):
        item = store.item(number)
        by_id[item.id] = number
        by_wording.setdefault(_wording(item.question), number)
    found: dict[int, None] = {}
    num_unknown = 0
    for hotpotqa_id, question in _questions(file):
        at = by_id.get(hotpotqa_id) if hotpotqa_id else None
        at = by_wording.get(_wording(question)) if at is None else at
        if at is None:
            num_unknown += 1
        else:
            found[at] = None
    if not found:
        raise DataError(f"no question of {file} is among the {store.num_items:,} of this split")
    return SelectedItems(list(found), num_unknown)


def _questions(file: Path) -> Iterator[tuple[str | None, str]]:
    """HotpotQA's id, where the file has it, and the wording of each question."""
    kind = kind_of(file)
    if kind == "original-eval":  # without its texts, which may be numbers of documents elsewhere
        for _, record in read_records(file):
            yield None, str(record.get("input", ""))
        return
    examples = read_examples(file) if kind == "memagent" else read_original(file, kind)
    for example in examples:
        own = example.metadata.get("hotpotqa_id")
        yield own if isinstance(own, str) else None, example.question


def _wording(question: str) -> str:
    return " ".join(question.split()).casefold()
