"""The KV cache: a pool of token slots, and a prefix tree of prompts that share them.

A slot holds the keys and values of one token in all layers. Consecutive tokens of a prompt occupy
consecutive slots, so attention reads plain slices, never a gathered copy. Prompts with a common prefix
share its slots:

    question + section ── memory of rollout 1        PrefixNode = a run of tokens and its slots
                       ├─ memory of rollout 2
                       └─ memory of rollout 3

No tensors here: a slot is an index.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


class SlotPool:
    """Allocates contiguous runs of slots, which are freed whole or in parts."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: list[tuple[int, int]] = [(0, num_slots)] if num_slots else []
        """Free runs as (start, end), sorted and never adjacent."""

    def take(self, count: int) -> int | None:
        """The start of a run of `count` slots; None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                self._free[index : index + 1] = (
                    [(start + count, end)] if end - start > count else []
                )
                self.num_free -= count
                return start
        return None

    def give_back(self, start: int, count: int) -> None:
        """Free a run; adjacent free runs are merged."""
        if not count:
            return
        end = start + count
        index = bisect(self._free, (start, end))
        if index and self._free[index - 1][1] >= start:
            assert self._free[index - 1][1] == start, "a slot was given back twice"
            index -= 1
            start = self._free.pop(index)[0]
        if index < len(self._free) and self._free[index][0] <= end:
            assert self._free[index][0] == end, "a slot was given back twice"
            end = self._free.pop(index)[1]
        self._free.insert(index, (start, end))
        self.num_free += count


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A run of tokens in the prefix tree."""

    tokens: Sequence[int]
    start: int
    """Slot of the first token; the others follow."""
    parent: PrefixNode | None
    children: dict[int, PrefixNode] = field(default_factory=dict)
    """By first token."""
    users: list[Hashable] = field(default_factory=list)
    """Requests that use these slots; a node with users is never evicted."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    writer: Hashable | None = None
    """The request that computes it; others wait instead of computing it again."""
    last_used: int = 0

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.tokens)


class PrefixTree:
    """Prompts by their tokens, for one version of the weights. Prompts of different owners share nothing."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._roots: dict[str, PrefixNode] = {}
        """By owner."""
        self._clock = itertools.count(1)
        self._unused: list[tuple[int, int, PrefixNode]] = []
        """Heap of evictable nodes by last use; may contain stale entries."""

    def match(self, tokens: Sequence[int], owner: str = "") -> list[PrefixNode]:
        """The nodes of the longest prefix of `tokens` cached for an owner; a node is split to fit."""
        nodes: list[PrefixNode] = []
        if (root := self._roots.get(owner)) is None:
            return nodes
        node, position = root, 0
        while position < len(tokens) and (child := node.children.get(tokens[position])):
            length = _common_length(child.tokens, tokens, position)
            if length < len(child.tokens):
                child = self._split(child, length)
            nodes.append(child)
            node, position = child, position + length
        return nodes

    def add(
        self, parent: PrefixNode | None, tokens: Sequence[int], start: int, owner: str = ""
    ) -> PrefixNode:
        """A new node below `parent` (None: the root of the owner), whose slots start at `start`.

        If its tokens are already cached (a repeated prompt, whose last token is recomputed for its
        logits), the node stays out of the tree and is dropped after use.
        """
        parent = parent or self._root(owner)
        node = PrefixNode(tokens=tokens, start=start, parent=parent)
        parent.children.setdefault(tokens[0], node)
        self._offer(node)
        return node

    def use(self, node: PrefixNode, user: Hashable) -> None:
        """Keep a node from being evicted."""
        node.users.append(user)
        node.last_used = next(self._clock)

    def release(self, node: PrefixNode, user: Hashable) -> None:
        """Remove a user. A node that was never fully computed is dropped."""
        node.users.remove(user)
        node.last_used = next(self._clock)
        if node.writer == user:
            node.writer = None
        is_worth_keeping = node.is_computed and self._is_in_tree(node)
        if not node.users and not node.children and not is_worth_keeping:
            self._drop(node)
        self._offer(node)

    def evict(self, num_slots: int) -> bool:
        """Evict least recently used nodes until `num_slots` are free; whether that succeeded."""
        freed = 0
        while freed < num_slots:
            if not self._unused:
                return False
            last_used, _, node = heappop(self._unused)
            if node.last_used != last_used or not self._is_evictable(node):
                continue  # stale: used, split or dropped since
            freed += len(node.tokens)
            parent = node.parent
            self._drop(node)
            if parent is not None:
                self._offer(parent)
        return True

    def drop_unused(self, owner: str) -> None:
        """Evict all that is cached for an owner and not in use."""
        root = self._roots.get(owner)
        nodes = list(_below(root)) if root is not None else []
        for node in reversed(nodes):  # children before their parents
            if self._is_evictable(node):
                self._drop(node)

    def clear(self) -> None:
        """Free everything; no node may be in use."""
        for node in list(self.nodes()):
            assert not node.users, "the cache is cleared while requests use it"
            self._pool.give_back(node.start, len(node.tokens))
        self._roots.clear()
        self._unused.clear()

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes."""
        for root in self._roots.values():
            yield from _below(root)

    def _root(self, owner: str) -> PrefixNode:
        if owner not in self._roots:  # clients may name any number of owners
            self._roots = {name: root for name, root in self._roots.items() if root.children}
            self._roots[owner] = PrefixNode(tokens=(), start=0, parent=None)
        return self._roots[owner]

    def _offer(self, node: PrefixNode) -> None:
        """Make a node a candidate for eviction, if it is evictable."""
        if self._is_evictable(node):
            heappush(self._unused, (node.last_used, next(self._clock), node))

    def _is_evictable(self, node: PrefixNode) -> bool:
        return not node.users and not node.children and self._is_in_tree(node)

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Split a node in two; returns the first part, which takes its place. Users keep both."""
        assert node.parent is not None
        first = PrefixNode(
            tokens=node.tokens[:length],
            start=node.start,
            parent=node.parent,
            users=list(node.users),
            num_computed=min(node.num_computed, length),
            last_used=node.last_used,
        )
        first.writer = node.writer if not first.is_computed else None
        node.parent.children[node.tokens[0]] = first
        node.tokens = node.tokens[length:]
        node.start += length
        node.num_computed = max(node.num_computed - length, 0)
        node.parent = first
        first.children[node.tokens[0]] = node
        return first

    def _is_in_tree(self, node: PrefixNode) -> bool:
        return node.parent is not None and node.parent.children.get(node.tokens[0]) is node

    def _drop(self, node: PrefixNode) -> None:
        if self._is_in_tree(node):
            assert node.parent is not None
            del node.parent.children[node.tokens[0]]
        self._pool.give_back(node.start, len(node.tokens))
        node.parent = None


def _below(root: PrefixNode) -> Iterator[PrefixNode]:
    """The nodes below a root, parents before their children."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def path_to(node: PrefixNode) -> list[PrefixNode]:
    """The nodes from the root of the tree down to a node."""
    path: list[PrefixNode] = []
    current: PrefixNode | None = node
    while current is not None and current.tokens:
        path.append(current)
        current = current.parent
    return path[::-1]


def _common_length(known: Sequence[int], tokens: Sequence[int], position: int) -> int:
    """Length of the common prefix of `known` and `tokens[position:]`, by bisection over slices."""
    low, high = 0, min(len(known), len(tokens) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if known[low:middle] == tokens[position + low : position + middle]:
            low = middle
        else:
            high = middle - 1
    return low
