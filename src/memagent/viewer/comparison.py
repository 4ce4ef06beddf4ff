"""Two evaluations side by side: the cells that both have, and the items that they score differently."""

from __future__ import annotations

from collections.abc import Iterable

from memagent.eval.records import ItemKey
from memagent.eval.stats import compare
from memagent.viewer.evaluations import (
    CellKey,
    Items,
    NumberedItem,
    interval,
    item_row,
    plain_interval,
)
from memagent.viewer.traces import Json

Pair = tuple[NumberedItem, NumberedItem]


def comparison(first: Items, second: Items, *, offset: int, limit: int) -> Json:
    """Cells of both with their difference, and items with different scores, those that got worse first."""
    ours, theirs = _by_key(first.all()), _by_key(second.all())
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    differing = sorted(
        (pair for pair in pairs if pair[0].head.score != pair[1].head.score),
        key=lambda pair: pair[1].head.score - pair[0].head.score,
    )
    return {
        "num_shared": len(pairs),
        "num_first": len(ours),
        "num_second": len(theirs),
        "cells": [_row(cell, found) for cell, found in _cells(pairs).items()],
        "num_differing": len(differing),
        "offset": offset,
        "items": [
            {"first": item_row(one), "second": item_row(other)}
            for one, other in differing[offset : offset + limit]
        ],
    }


def _by_key(items: Iterable[NumberedItem]) -> dict[ItemKey, NumberedItem]:
    return {item.head.key: item for item in items}


def _cells(pairs: Iterable[Pair]) -> dict[CellKey, list[Pair]]:
    cells: dict[CellKey, list[Pair]] = {}
    for pair in pairs:
        cells.setdefault(pair[0].head.cell, []).append(pair)
    return dict(sorted(cells.items(), key=lambda cell: (cell[0].task, cell[0].tokens or 0)))


def _row(cell: CellKey, pairs: list[Pair]) -> Json:
    ours, theirs = ([pair[side].head.score for pair in pairs] for side in (0, 1))
    found = compare(theirs, ours)
    return {
        "task": cell.task,
        "method": cell.method,
        "tokens": cell.tokens,
        "first": interval(ours),
        "second": interval(theirs),
        "difference": plain_interval(found.difference),
        "num_better": found.num_better,
        "num_worse": found.num_worse,
        "p_value": found.p_value,
    }
