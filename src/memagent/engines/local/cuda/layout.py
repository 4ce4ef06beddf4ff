"""What the attention kernels read, worked out on the host: which rows look at which runs of slots.

Requests that share a beginning stand next to each other, so the rows that read a run of the prefix
tree are a range, and one program reads the run once for all of them:

    row 0  ─┐                    ┌─ own tokens of row 0
    row 1  ─┼─ question+section ─┼─ own tokens of row 1        item = rows x part of a run
    row 2  ─┘                    └─ own tokens of row 2

A row sees the first `position + 1 - first_position` tokens of a run, at most all of them: one rule for
whole runs before it, for the run it stands in, and for runs that it will only reach in a few steps.
Numbers only: no torch, no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memagent.engines.local.cache import Node, path_to
from memagent.engines.local.scheduler import Piece, Request

Ints = npt.NDArray[np.int32]

ITEM_FIELDS = 6
"""row, number of rows, slot, first position, length, ordinal: see `reply_layout`."""


class PromptLayout(NamedTuple):
    """Pieces of prompts, packed into one row of tokens."""

    ids: Ints
    positions: Ints
    slots: Ints
    """Where each token's keys and values go."""
    tiles: Ints
    """(T, 4): first row, number of rows, and which runs they read: first and end of `runs`."""
    runs: Ints
    """(R, 3): slot, first position, length."""
    final_rows: Ints
    """Rows whose logits are needed, in the order of the pieces that end in a new token."""


class ReplyLayout(NamedTuple):
    """Single tokens of many requests, for the next few steps."""

    order: list[Request]
    """The request of each row."""
    ids: Ints
    positions: Ints
    slots: Ints
    """(steps, rows): where the token of each step goes; the padding slot where a reply has ended."""
    items: Ints
    """(I, ITEM_FIELDS): work of the attention kernel."""
    first_parts: Ints
    """(rows + 1): the parts of a row are numbered from here; the last is the number of all parts."""


def prompt_layout(pieces: Sequence[Piece], *, tile_rows: int) -> PromptLayout:
    """Pack pieces of prompts. Each piece lies inside one node of the prefix tree."""
    ids: list[int] = []
    positions, slots, tiles, runs, finals = [], [], [], [], []
    for piece in pieces:
        row, first_run = len(ids), len(runs)
        ids += piece.request.tokens(piece.start, piece.end)
        position = 0
        for run in piece.request.runs(piece.end):
            runs.append((run.start, position, run.length))
            position += run.length
        own = runs[-1]
        assert own[1] <= piece.start, "a piece of a prompt reaches over two nodes"
        positions.append(np.arange(piece.start, piece.end, dtype=np.int32))
        slots.append(positions[-1] + np.int32(own[0] - own[1]))
        for begin in range(0, piece.length, tile_rows):
            count = min(tile_rows, piece.length - begin)
            tiles.append((row + begin, count, first_run, len(runs)))
        if piece.is_last:
            finals.append(len(ids) - 1)
    tiles.reverse()  # within a piece, late rows have the most to read: they begin first
    return PromptLayout(
        ids=np.array(ids, dtype=np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        tiles=np.array(tiles, dtype=np.int32),
        runs=np.array(runs, dtype=np.int32),
        final_rows=np.array(finals, dtype=np.int32),
    )


def reply_layout(
    requests: Sequence[Request],
    *,
    steps: int,
    tile_rows: int,
    num_programs: int,
    padding_slot: int,
) -> ReplyLayout:
    """Lay out one token of each request, for `steps` steps without looking at what they are.

    An item is a range of rows and a part of a run that all of them read. Its result for a row is the
    row's part number `first_parts[row] + ordinal`; a row's parts are put together afterwards.
    """
    paths = {request: path_to(request.leaf) if request.leaf else [] for request in requests}
    order = sorted(requests, key=lambda request: [node.start for node in paths[request]])
    spans, num_row_tokens = _spans(order, paths)
    part_tokens = _part_tokens(num_row_tokens, num_programs)
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
    slots = np.full((steps, len(order)), padding_slot, dtype=np.int32)
    for row, request in enumerate(order):
        _next_slots(slots[:, row], request)
    first_parts = np.zeros(len(order) + 1, dtype=np.int32)
    np.cumsum(num_parts, out=first_parts[1:])
    return ReplyLayout(
        order=order,
        ids=np.array([request.completion_ids[-1] for request in order], dtype=np.int32),
        positions=np.array([request.num_tokens - 1 for request in order], dtype=np.int32),
        slots=slots,
        items=np.array(items, dtype=np.int32),
        first_parts=first_parts,
    )


_Span = tuple[int, int, int, int, int]
"""First row, end row, slot, first position, length."""


def _spans(order: Sequence[Request], paths: dict[Request, list[Node]]) -> tuple[list[_Span], int]:
    """Runs with the range of rows that read them, outer ones first; and the tokens in all of them."""
    spans: list[_Span] = []
    num_tokens = 0
    open_nodes: list[tuple[Node, int]] = []
    """Nodes of the last row, each with the index of its span."""
    for row, request in enumerate(order):
        path = paths[request]
        common = 0
        while common < min(len(path), len(open_nodes)) and open_nodes[common][0] is path[common]:
            index = open_nodes[common][1]
            first, _, slot, position, length = spans[index]
            spans[index] = (first, row + 1, slot, position, length)
            common += 1
        del open_nodes[common:]
        position = sum(len(node.tokens) for node, _ in open_nodes)
        for node in path[common:]:
            open_nodes.append((node, len(spans)))
            spans.append((row, row + 1, node.start, position, len(node.tokens)))
            position += len(node.tokens)
            num_tokens += len(node.tokens)
        for tail in request.tails:
            spans.append((row, row + 1, tail.start, position, tail.length))
            position += tail.length
            num_tokens += tail.length
    return spans, num_tokens


def _part_tokens(num_tokens: int, num_programs: int) -> int:
    """How long the parts are: as long as every program still gets a few."""
    wanted = num_tokens // (2 * num_programs)
    return min(max(128, 1 << max(wanted, 1).bit_length()), 1024)


def _next_slots(slots_S: Ints, request: Request) -> None:
    """Where the next tokens of a reply go, as far as it has slots."""
    position = request.num_tokens - 1 - request.num_admitted
    step = 0
    for tail in request.tails:
        if position < tail.length:
            count = min(tail.length - position, len(slots_S) - step)
            begin = tail.start + position
            slots_S[step : step + count] = np.arange(begin, begin + count, dtype=np.int32)
            step += count
            position += count
        if step == len(slots_S):
            return
        position -= tail.length
