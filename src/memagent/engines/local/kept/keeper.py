"""Between the cache and kept texts: prefixes that are evicted are handed over, and put back when a prompt needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from memagent.engines.local.cache import PrefixNode, path_to
from memagent.engines.local.kept.texts import KeptPrefix, KeptTexts
from memagent.engines.local.loading import is_out_of_memory
from memagent.engines.local.scheduler import Scheduler
from memagent.types import KeptSizes


class CacheKeeper:
    """Keeps named prefixes of a scheduler's cache. Used in the engine's thread only."""

    def __init__(self, texts: KeptTexts, scheduler: Scheduler, cache: torch.Tensor) -> None:
        """`cache` has the axes layers, keys and values, heads, slots, size of a head."""
        self.texts = texts
        self._scheduler = scheduler
        self._tree = scheduler.tree
        self._cache = cache
        self._tree.on_evict = self._evicted

    def before_admission(self, tokens: Sequence[int], owner: str) -> None:
        """Put the kept prefix of a prompt back into the cache, if it is not there and there is room."""
        prefix = self.texts.find(tokens, owner)
        if prefix is None:
            return
        nodes = self._tree.match(prefix.ids, owner)
        num_there = sum(len(node.tokens) for node in nodes)
        if num_there == len(prefix.ids):
            return
        values = self.texts.load(prefix)
        if values is None or not self._fits(values, prefix):
            return
        for node in nodes:  # they must not be evicted to make room
            self._tree.use(node, self)
        start = self._copied(values[..., num_there:, :])
        if start is not None:
            parent = nodes[-1] if nodes else None
            node = self._tree.add(parent, prefix.ids[num_there:], start, owner)
            node.num_computed = len(node.tokens)
            node.kept = prefix
        for node in nodes:
            self._tree.release(node, self)

    def _copied(self, values: torch.Tensor) -> int | None:
        """The first slot that keys and values were copied to; None where there is no room."""
        count = values.shape[-2]
        start = self._scheduler.take(count)
        if start is None:
            return None
        try:
            self._cache[..., start : start + count, :] = values.to(self._cache.device)
        except Exception as error:
            self._scheduler.pool.give_back(start, count)
            if not is_out_of_memory(error):
                raise
            return None
        return start

    def after_admission(self, tokens: Sequence[int], owner: str) -> None:
        """Mark the node at which the kept prefix of an admitted prompt ends."""
        prefix = self.texts.find(tokens, owner)
        if prefix is None:
            return
        nodes = self._tree.match(prefix.ids, owner)
        if sum(len(node.tokens) for node in nodes) == len(prefix.ids):
            nodes[-1].kept = prefix

    def save(self) -> None:
        """Put all kept prefixes on disk."""
        self.texts.save([(prefix, partial(self._values, node)) for prefix, node in self._marked()])

    def close(self) -> None:
        """Let go of the cache, whose shape stays known, and of the scheduler's callback."""
        self._cache = self._cache.to("meta")
        self._tree.on_evict = _ignored

    def sizes(self) -> list[KeptSizes]:
        """What is kept of each text, and where."""
        per_token = self._cache[..., 0, :].numel() * self._cache.element_size()
        return self.texts.sizes([prefix for prefix, _ in self._marked()], token_bytes=per_token)

    def _evicted(self, node: PrefixNode) -> None:
        if isinstance(node.kept, KeptPrefix) and _is_whole(node):
            try:
                self.texts.put(node.kept, self._values(node))
            except Exception as error:
                if not is_out_of_memory(error):  # it can be computed again
                    raise

    def _marked(self) -> list[tuple[KeptPrefix, PrefixNode]]:
        return [
            (node.kept, node)
            for node in list(self._tree.nodes())
            if isinstance(node.kept, KeptPrefix) and _is_whole(node)
        ]

    def _values(self, node: PrefixNode) -> torch.Tensor:
        """A copy of the keys and values from the beginning of a prompt to the end of a node."""
        parts = [
            self._cache[..., one.start : one.start + len(one.tokens), :].to("cpu")
            for one in path_to(node)
        ]
        return torch.cat(parts, dim=-2)

    def _fits(self, values: torch.Tensor, prefix: KeptPrefix) -> bool:
        """Whether values have the shape and type of the cache."""
        shape = (*self._cache.shape[:3], len(prefix.ids), self._cache.shape[-1])
        return values.shape == shape and values.dtype == self._cache.dtype


def _ignored(node: PrefixNode) -> None:
    """Nothing is kept of it."""


def _is_whole(node: PrefixNode) -> bool:
    return all(one.is_computed for one in path_to(node))
