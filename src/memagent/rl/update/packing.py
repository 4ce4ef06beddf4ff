"""Rows with a common prefix become a tree; trees fill sequences up to a budget of tokens.

    rows      A B C d e          tree   A B C d e f g h
              A B C f g h               │ │ │ └─┘ └───┘   d e and f g h do not see each other;
                                        └─┴─┘             both see A B C, and both begin at position 3

Rows of a group are sorted, so that each row follows the one with which it shares its longest prefix, and
only its new tokens are laid out. A token is seen by itself and by the tokens after it, up to the place where
the first row starts that does not contain it. That place is all that attention needs:

    ids       A B C d e f g h
    until     8 8 8 5 5 8 8 8      query q sees key k   when   k <= q < until[k]

Rows may branch several times (turns of a conversation, sections of a text); the rule stays the same. A
token may have several successors, so a place may have several targets: C predicts d and f. No tensors
here; `policy.py` runs packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memagent.errors import ConfigError
from memagent.rl.update.rows import TrainingRow

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Sampled tokens and the places that predict them, one entry each, in the order of places."""

    places: IntArray
    """Index in the sequence of the token before, whose hidden state predicts the target."""
    ids: IntArray
    rows: IntArray
    """Index among the packed rows."""
    offsets: IntArray
    """Index in its row."""
    behaviour: FloatArray
    """Log-probability reported by the engine."""
    advantages: FloatArray
    weights: FloatArray

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One sequence for the model: trees in a row."""

    ids: IntArray
    positions: IntArray
    """Position of each token in its row, for rotary embeddings."""
    until: IntArray
    """End of the tokens that see each token: query q sees key k when k <= q < until[k]."""
    targets: Targets

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """Rows that are laid out together."""

    members: tuple[int, ...]
    """Indices of the rows, sorted by their tokens."""
    shared: tuple[int, ...]
    """Length of the prefix that each row shares with the one before; 0 for the first."""
    num_tokens: int


def pack(rows: Sequence[TrainingRow], *, max_tokens: int, share: bool = True) -> list[Pack]:
    """Pack rows into sequences of at most `max_tokens`; without `share` every row stands alone.

    The result depends only on the rows.
    """
    trees: list[_Tree] = []
    for members in _by_group(rows) if share else [[number] for number in range(len(rows))]:
        trees += _trees(rows, members, max_tokens=max_tokens)
    return [_lay(rows, some) for some in _first_fit(trees, max_tokens)]


def num_row_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of all rows, shared prefixes counted in each."""
    return sum(len(row.sample.ids) for row in rows)


def share_out(packs: Sequence[Pack], num_parts: int) -> list[list[Pack]]:
    """The packs of each of `num_parts` processes: longest first, to the process with the fewest tokens.

    Every process gets the same number of packs, because all processes run a sharded model together. Empty
    packs (one token, no target) fill up; their gradient is zero.
    """
    parts: list[list[Pack]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for one in sorted(packs, key=lambda one: -one.num_tokens):
        least = min(range(num_parts), key=lambda part: (loads[part], part))
        parts[least].append(one)
        loads[least] += one.num_tokens
    longest = max(map(len, parts), default=0)
    return [[*part, *[_empty_pack()] * (longest - len(part))] for part in parts]


# --- trees ----------------------------------------------------------------------------------------


def _by_group(rows: Sequence[TrainingRow]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _trees(
    rows: Sequence[TrainingRow], members: Sequence[int], *, max_tokens: int
) -> Iterator[_Tree]:
    """Trees of the rows of one group."""
    order = sorted(members, key=lambda number: (rows[number].sample.ids, number))
    arrays = [np.array(rows[number].sample.ids, dtype=np.int64) for number in order]
    lengths = [len(array) for array in arrays]
    if lengths and (longest := max(lengths)) > max_tokens:
        raise ConfigError(
            f"a row has {longest} tokens, more than the {max_tokens} of a packed sequence; set "
            f"`update.max_tokens={longest}`"
        )
    shared = [0, *(num_shared(a, b) for a, b in pairwise(arrays))]
    for first, end in _cut(shared, lengths, max_tokens):
        here = (0, *shared[first + 1 : end])
        yield _Tree(
            members=tuple(order[first:end]),
            shared=here,
            num_tokens=sum(lengths[first:end]) - sum(here),
        )


def num_shared(a: IntArray, b: IntArray) -> int:
    """The length of the prefix that two rows share."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _cut(shared: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of sorted rows, each a tree within the limit.

    A range that is too long is cut where its rows share least, so that few tokens are repeated; neighbours
    are joined again while they fit.
    """
    new_tokens = np.cumsum([0, *(np.array(lengths) - np.array(shared)).tolist()])

    def size(first: int, end: int) -> int:
        return int(new_tokens[end] - new_tokens[first]) + shared[first]

    def parts(first: int, end: int) -> list[tuple[int, int]]:
        least = min(shared[first + 1 : end], default=0)
        if end - first == 1 or (least > 0 and size(first, end) <= max_tokens):
            return [(first, end)]
        cuts = [first, *(n for n in range(first + 1, end) if shared[n] == least), end]
        found = [part for a, b in pairwise(cuts) for part in parts(a, b)]
        joined = found[:1]
        for a, b in found[1:]:
            if shared[a] > 0 and size(joined[-1][0], b) <= max_tokens:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        return joined

    return parts(0, len(lengths)) if lengths else []


def _first_fit(trees: Sequence[_Tree], max_tokens: int) -> list[list[_Tree]]:
    """The longest tree first, each into the first sequence with room."""
    bins: list[list[_Tree]] = []
    room: list[int] = []
    for tree in sorted(trees, key=lambda tree: (-tree.num_tokens, tree.members)):
        for number, left in enumerate(room):
            if tree.num_tokens <= left:
                bins[number].append(tree)
                room[number] -= tree.num_tokens
                break
        else:
            bins.append([tree])
            room.append(max_tokens - tree.num_tokens)
    return bins


# --- layout ---------------------------------------------------------------------------------------


def _lay(rows: Sequence[TrainingRow], trees: Sequence[_Tree]) -> Pack:
    """Lay out trees in a row."""
    length = sum(tree.num_tokens for tree in trees)
    ids, positions = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    until = np.full(length, length, dtype=np.int64)
    targets: list[Targets] = []
    start = 0
    for tree in trees:
        path = np.empty(0, dtype=np.int64)  # places of the previous row
        for number, shared in zip(tree.members, tree.shared, strict=True):
            row = rows[number]
            tokens = np.array(row.sample.ids, dtype=np.int64)
            end = start + len(tokens) - shared
            ids[start:end] = tokens[shared:]
            positions[start:end] = np.arange(shared, len(tokens))
            until[path[shared:]] = start
            path = np.concatenate([path[:shared], np.arange(start, end)])
            targets.append(_targets_of(row, number, tokens, path))
            start = end
        until[path] = start
    assert start == length
    return Pack(ids=ids, positions=positions, until=until, targets=_joined(targets))


def _targets_of(row: TrainingRow, number: int, tokens: IntArray, path: IntArray) -> Targets:
    offsets = np.flatnonzero(np.array(row.sample.is_sampled, dtype=bool)).astype(np.int64)
    return Targets(
        places=path[offsets - 1],
        ids=tokens[offsets],
        rows=np.full(len(offsets), number, dtype=np.int64),
        offsets=offsets,
        behaviour=np.array(row.sample.logprobs, dtype=np.float64)[offsets],
        advantages=np.full(len(offsets), row.advantage),
        weights=np.full(len(offsets), row.weight),
    )


def _joined(some: Sequence[Targets]) -> Targets:
    """All targets, in the order of places."""
    columns = {
        field.name: np.concatenate([getattr(targets, field.name) for targets in some])
        for field in fields(Targets)
    }
    order = np.argsort(columns["places"], kind="stable")
    return Targets(**{name: values[order] for name, values in columns.items()})


def _empty_pack() -> Pack:
    none = {name: np.empty(0, dtype=np.int64) for name in ("places", "ids", "rows", "offsets")}
    return Pack(
        ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        until=np.ones(1, dtype=np.int64),
        targets=Targets(**none, behaviour=np.empty(0), advantages=np.empty(0), weights=np.empty(0)),
    )
