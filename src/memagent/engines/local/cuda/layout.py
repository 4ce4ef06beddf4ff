"""Inputs of the attention kernels, computed on the host: which rows attend to which runs of slots.

Requests with a common prefix are adjacent, so the rows that attend to a run of the prefix tree are a
range, and one program reads the run once for all of them:

    row 0  ─┐                    ┌─ own tokens of row 0
    row 1  ─┼─ question+section ─┼─ own tokens of row 1        item = rows x part of a run
    row 2  ─┘                    └─ own tokens of row 2

A row attends to the first `position + 1 - first_position` tokens of a run, at most all of them: one rule
for runs before it, for its own run, and for runs that it reaches only in a later step. NumPy only: no
torch, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memagent.engines.local.cache import PrefixNode, path_to
from memagent.engines.local.scheduler import GenerationRequest, Piece

Ints = npt.NDArray[np.int32]

ITEM_FIELDS = 6
"""row, number of rows, slot, first position, length, ordinal: see `reply_layout`."""
MAX_IDLE_SHARE = 8
"""A layout is rebuilt when more than an eighth of its rows have ended."""
MAX_PART_TOKENS = 1024
"""Longer runs are split over several programs."""


class PromptLayout(NamedTuple):
    """Pieces of prompts, packed into one row of tokens."""

    ids: Ints
    positions: Ints
    slots: Ints
    """The slot of each token's keys and values."""
    tiles: Ints
    """(T, 4): first row, number of rows, first run, end run."""
    runs: Ints
    """(R, 3): slot, first position, length."""
    final_rows: Ints
    """Rows whose logits are needed, in the order of the pieces that complete a prompt."""


class ReplyLayout(NamedTuple):
    """Which replies read which slots; valid until a request joins or gets new slots."""

    order: list[GenerationRequest]
    """The request of each row."""
    marks: list[tuple[PrefixNode | None, int]]
    """State of each request: the leaf of its prompt and its number of tails."""
    items: Ints
    """(I, ITEM_FIELDS): work items of the attention kernel; those of several rows come first."""
    num_shared_items: int
    """Items of several rows."""
    first_parts: Ints
    """(rows + 1): number of the first part of each row; the last entry is the total."""

    def serves(self, requests: set[GenerationRequest]) -> bool:
        """Whether the layout can compute these requests: all have rows, and few rows are idle."""
        if len(self.order) - len(requests) > len(self.order) // MAX_IDLE_SHARE:
            return False
        num_same = 0
        for request, (leaf, num_tails) in zip(self.order, self.marks, strict=True):
            if request in requests:
                if request.leaf is not leaf or len(request.tails) != num_tails:
                    return False
                num_same += 1
        return num_same == len(requests)


class ReplyInputs(NamedTuple):
    """Inputs of the rows of a layout for one round."""

    ids: Ints
    positions: Ints
    """-1 for rows whose request has ended: they attend to nothing."""
    slots: Ints
    """(steps, rows): the slot of each step's token; the padding slot where a reply has ended."""


def prompt_layout(pieces: Sequence[Piece], *, tile_rows: int) -> PromptLayout:
    """Pack pieces of prompts."""
    ids: list[int] = []
    positions: list[Ints] = []
    slots: list[Ints] = []
    tiles: list[tuple[int, int, int, int]] = []
    runs: list[tuple[int, int, int]] = []
    finals: list[int] = []
    for piece in pieces:
        row, first_run = len(ids), len(runs)
        ids += piece.request.tokens(piece.start, piece.end)
        position = 0
        for run in piece.request.runs(piece.end):
            runs.append((run.start, position, run.length))
            begin, position = max(piece.start, position), position + run.length
            if begin < position:
                shift = run.start + run.length - position
                slots.append(np.arange(begin + shift, position + shift, dtype=np.int32))
        positions.append(np.arange(piece.start, piece.end, dtype=np.int32))
        for begin in range(0, piece.length, tile_rows):
            count = min(tile_rows, piece.length - begin)
            tiles.append((row + begin, count, first_run, len(runs)))
        if piece.is_last:
            finals.append(len(ids) - 1)
    tiles.reverse()  # late rows of a piece have the most to read: they start first
    return PromptLayout(
        ids=np.array(ids, dtype=np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        tiles=np.array(tiles, dtype=np.int32),
        runs=np.array(runs, dtype=np.int32),
        final_rows=np.array(finals, dtype=np.int32),
    )


def reply_layout(
    requests: Iterable[GenerationRequest], *, tile_rows: int, num_processors: int
) -> ReplyLayout:
    """Lay out one token of each request.

    An item is a range of rows and a part of a run that all of them attend to. Its result for a row is
    the row's part number `first_parts[row] + ordinal`; a row's parts are merged afterwards.
    """
    order = sorted(requests, key=_place_in_tree)
    spans = _spans(order)
    part_tokens = _part_tokens(sum(span[4] for span in spans), num_processors)
    items: list[tuple[int, int, int, int, int, int]] = []
    num_parts = [0] * len(order)
    for first_row, end_row, slot, position, length in spans:
        ordinal = num_parts[first_row]
        for begin in range(0, length, part_tokens):
            count = min(part_tokens, length - begin)
            for row in range(first_row, end_row, tile_rows):
                rows = min(tile_rows, end_row - row)
                items.append((row, rows, slot + begin, position + begin, count, ordinal))
            ordinal += 1
        for row in range(first_row, end_row):
            num_parts[row] = ordinal
    items.sort(key=_num_rows_of, reverse=True)
    first_parts = np.zeros(len(order) + 1, dtype=np.int32)
    np.cumsum(num_parts, out=first_parts[1:])
    return ReplyLayout(
        order=order,
        marks=[(request.leaf, len(request.tails)) for request in order],
        items=np.array(items, dtype=np.int32),
        num_shared_items=sum(item[1] > 1 for item in items),
        first_parts=first_parts,
    )


def reply_inputs(
    order: Sequence[GenerationRequest],
    present: set[GenerationRequest],
    *,
    steps: int,
    padding_slot: int,
) -> ReplyInputs:
    """The last token of each reply, and the slots of it and the following ones."""
    ids = [0] * len(order)
    positions = [-1] * len(order)
    first_slots = [padding_slot] * len(order)
    num_slots = [0] * len(order)
    special: list[tuple[int, list[int]]] = []
    for row, request in enumerate(order):
        if request not in present:
            continue
        ids[row] = request.completion_ids[-1]
        position = len(request.prompt_ids) + len(request.completion_ids) - 1
        positions[row] = position
        begin = position - request.num_admitted
        if len(request.tails) == 1:
            tail = request.tails[0]
            first_slots[row] = tail.start + begin
            num_slots[row] = tail.length - begin
        else:
            special.append((row, _slots_one_by_one(request, begin, steps, padding_slot)))
    step = np.arange(steps, dtype=np.int32)[:, None]
    slots = np.array(first_slots, dtype=np.int32)[None, :] + step
    slots = np.where(step < np.array(num_slots, dtype=np.int32)[None, :], slots, padding_slot)
    for row, own in special:
        slots[:, row] = own
    return ReplyInputs(
        ids=np.array(ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=slots.astype(np.int32),
    )


def _place_in_tree(request: GenerationRequest) -> list[int]:
    return [node.start for node in path_to(request.leaf)] if request.leaf else []


def _num_rows_of(item: tuple[int, ...]) -> int:
    return item[1]


_Span = tuple[int, int, int, int, int]
"""First row, end row, slot, first position, length."""


def _spans(order: Sequence[GenerationRequest]) -> list[_Span]:
    """Runs with the range of rows that attend to them, outer ones first."""
    spans: list[_Span] = []
    open_nodes: list[tuple[PrefixNode, int]] = []
    """Nodes of the previous row, each with the index of its span."""
    for row, request in enumerate(order):
        path = path_to(request.leaf) if request.leaf else []
        common = position = 0
        for (node, index), own in zip(open_nodes, path, strict=False):
            if node is not own:
                break
            first, _, slot, begin, length = spans[index]
            spans[index] = (first, row + 1, slot, begin, length)
            position += length
            common += 1
        del open_nodes[common:]
        for node in path[common:]:
            open_nodes.append((node, len(spans)))
            spans.append((row, row + 1, node.start, position, len(node.tokens)))
            position += len(node.tokens)
        for tail in request.tails:
            spans.append((row, row + 1, tail.start, position, tail.length))
            position += tail.length
    return _joined(spans)


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    """Merge spans of adjacent slots and the same rows."""
    joined: list[_Span] = []
    for span in spans:
        if joined:
            first, end, slot, position, length = joined[-1]
            if (first, end, slot + length, position + length) == span[:4]:
                joined[-1] = (first, end, slot, position, length + span[4])
                continue
        joined.append(span)
    return joined


def _part_tokens(num_tokens: int, num_processors: int) -> int:
    """Length of the parts: short enough that every multiprocessor gets several."""
    wanted = num_tokens // (4 * num_processors)
    return min(max(128, 1 << max(wanted, 1).bit_length()), MAX_PART_TOKENS)


def _slots_one_by_one(
    request: GenerationRequest, begin: int, steps: int, padding_slot: int
) -> list[int]:
    own = [slot for tail in request.tails for slot in range(tail.start, tail.start + tail.length)]
    chosen = own[begin : begin + steps]
    return chosen + [padding_slot] * (steps - len(chosen))
