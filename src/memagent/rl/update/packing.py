"""Rows that begin alike become one tree; trees fill sequences up to a budget of tokens.

    rows      A B C d e          tree   A B C d e f g h
              A B C f g h               │ │ │ └─┘ └───┘   d e and f g h do not see each other;
                                        └─┴─┘             both see A B C, and both begin at position 3

Rows of a group are sorted, so that a row follows the one it shares most with, and only the tokens
that are new are laid down. A token is then seen by itself and by what follows it, up to the place
where the first row begins that no longer passes through it. That place is all that attention needs:

    ids       A B C d e f g h
    until     8 8 8 5 5 8 8 8      query q sees key k   when   k <= q < until[k]

Rows may part several times (turns of a conversation, sections of a text); the rule stays the same.
One token may be followed by several others, so one position may have several targets: C predicts d
and f. No tensors here; `policy.py` runs what is packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from memagent.errors import ConfigError
from memagent.rl.update.rows import TrainingRow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Sampled tokens and where they are predicted, one entry each, in the order of places."""

    places: Ints
    """Index in the sequence of the token before: its hidden state predicts the target."""
    ids: Ints
    rows: Ints
    """Which of the rows that were packed."""
    offsets: Ints
    """Index in its row."""
    behaviour: Floats
    """Log-probability when it was drawn."""
    advantages: Floats
    weights: Floats

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One sequence for the model: trees one after the other."""

    ids: Ints
    positions: Ints
    """Position in its row of each token: what rotary embeddings see."""
    until: Ints
    """End of those who see each token: query q sees key k when k <= q < until[k]."""
    targets: Targets

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    """Rows that are laid down together."""

    members: tuple[int, ...]
    """Numbers of the rows, sorted by their tokens."""
    shared: tuple[int, ...]
    """How many tokens each begins with that the one before has too; 0 for the first."""
    num_tokens: int


def pack(
    rows: Sequence[TrainingRow], *, max_tokens: int, share: bool = True, min_shared: int = 1
) -> list[Pack]:
    """Pack rows into sequences of at most `max_tokens`.

    With `share` off every row stands alone. A run of tokens is shared when it has at least `min_shared`:
    rows that begin alike for less are not put together, and rows that go on alike for less after others
    have parted part there too. The result depends on the rows and nothing else.
    """
    trees: list[_Tree] = []
    for members in _by_group(rows) if share else [[number] for number in range(len(rows))]:
        trees += _trees(rows, members, max_tokens=max_tokens, min_shared=max(min_shared, 1))
    return [_lay(rows, some) for some in _first_fit(trees, max_tokens)]


def num_row_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of all rows, as they would be without sharing."""
    return sum(len(row.sample.ids) for row in rows)


def share_out(packs: Sequence[Pack], num_parts: int) -> list[list[Pack]]:
    """The packs of each of `num_parts` processes, the longest first to whoever has least so far.

    Every process gets as many packs as the others, because a sharded model is run by all at once.
    Where packs run out, an empty one (one token, no target) is run, which adds nothing.
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
    rows: Sequence[TrainingRow], members: Sequence[int], *, max_tokens: int, min_shared: int
) -> Iterator[_Tree]:
    """Trees of the rows of one group."""
    order = sorted(members, key=lambda number: (rows[number].sample.ids, number))
    arrays = [np.array(rows[number].sample.ids, dtype=np.int64) for number in order]
    lengths = [len(array) for array in arrays]
    if lengths and (longest := max(lengths)) > max_tokens:
        raise ConfigError(
            f"a row has {longest} tokens, but a packed sequence may have {max_tokens}; raise max_tokens"
        )
    shared = [0, *(_num_shared(a, b) for a, b in pairwise(arrays))]
    shared = _coarse(shared, min_shared)
    for first, end in _cut(shared, lengths, max_tokens):
        here = (0, *shared[first + 1 : end])
        yield _Tree(
            members=tuple(order[first:end]),
            shared=here,
            num_tokens=sum(lengths[first:end]) - sum(here),
        )


def _num_shared(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _coarse(shared: Sequence[int], min_shared: int) -> list[int]:
    """Rows part where they would, or, when that is less than `min_shared` further on, where they last did."""
    result = list(shared)
    ranges = [(0, len(shared), 0)]
    while ranges:
        first, end, above = ranges.pop()
        if end - first < 2:
            continue
        least = min(shared[first + 1 : end])
        place = least if least - above >= min_shared else above
        cuts = [first, *(n for n in range(first + 1, end) if shared[n] == least), end]
        for cut in cuts[1:-1]:
            result[cut] = place
        ranges += [(a, b, place) for a, b in pairwise(cuts)]
    return result


def _cut(shared: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Ranges of sorted rows, each a tree within the limit.

    What is too long is cut where its rows share least, so that little is laid down twice; neighbours
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
    """Lay trees down one after the other."""
    length = sum(tree.num_tokens for tree in trees)
    ids, positions = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    until = np.full(length, length, dtype=np.int64)
    targets: list[Targets] = []
    start = 0
    for tree in trees:
        path = np.empty(0, dtype=np.int64)  # where the tokens of the row before lie
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


def _targets_of(row: TrainingRow, number: int, tokens: Ints, path: Ints) -> Targets:
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
    places = np.concatenate([targets.places for targets in some])
    order = np.argsort(places, kind="stable")
    return Targets(
        places=places[order],
        ids=np.concatenate([targets.ids for targets in some])[order],
        rows=np.concatenate([targets.rows for targets in some])[order],
        offsets=np.concatenate([targets.offsets for targets in some])[order],
        behaviour=np.concatenate([targets.behaviour for targets in some])[order],
        advantages=np.concatenate([targets.advantages for targets in some])[order],
        weights=np.concatenate([targets.weights for targets in some])[order],
    )


def _empty_pack() -> Pack:
    nothing, none = np.empty(0, dtype=np.int64), np.empty(0)
    return Pack(
        ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        until=np.ones(1, dtype=np.int64),
        targets=Targets(
            places=nothing,
            ids=nothing,
            rows=nothing,
            offsets=nothing,
            behaviour=none,
            advantages=none,
            weights=none,
        ),
    )
