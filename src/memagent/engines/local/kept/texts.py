"""Which prefixes of prompts are kept, and where their keys and values are.

    prefix tree of the cache ──evicted──▶ memory ──full──▶ disk ──full──▶ texts that were used least are dropped
              ▲                              │               │
              └──────── a prompt that begins with the prefix is admitted ◀──┘

A prefix is known by its owner and its token ids. They come from tokenizer, prompt and text, so none of the three can
be another one; weights and adapter are in the fingerprint that every entry carries. Only prefixes that were named are
kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memagent.engines.local.kept.disk import KeptText, TextFiles
from memagent.types import KeptSizes

INDEX_TOKENS = 256
"""Prefixes are found by their first tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """The tokens of a prompt up to the end of a section."""

    ids: tuple[int, ...]
    text: str
    """SHA-256 of the text."""
    source: str
    owner: str = ""
    """Whose prompts may use it."""


class KeptTexts:
    """Keys and values of named prefixes in memory and on disk. The cache asks for them and hands them over."""

    def __init__(
        self,
        *,
        model: str,
        key: Callable[[], str],
        files: TextFiles | None,
        max_memory_bytes: int,
        max_named_tokens: int | None = None,
    ) -> None:
        """`key` computes the fingerprint of the weights; it is asked for when it is first needed.

        Of more tokens than `max_named_tokens`, texts that were not used for longest are forgotten.
        """
        self.files = files
        self._model = model
        self._key_of = key
        self._key: str | None = None
        self._max_memory_bytes = max_memory_bytes
        self._max_named_tokens = max_named_tokens
        self._named: dict[tuple[int, ...], list[KeptPrefix]] = {}
        self._short: list[KeptPrefix] = []
        """Those with fewer tokens than the index has."""
        self._of_text: OrderedDict[tuple[str, str], list[KeptPrefix]] = OrderedDict()
        """By owner and text, the least recently used first."""
        self._num_named_tokens = 0
        self._in_memory: OrderedDict[KeptPrefix, torch.Tensor] = OrderedDict()
        """The least recently used first."""
        self._lock = threading.Lock()
        """Prefixes are named by callers and used in the engine's thread."""

    def name(self, ids: Sequence[int], *, text: str, source: str, owner: str = "") -> None:
        """Keep this prefix of an owner from now on."""
        prefix = KeptPrefix(tuple(ids), text, source, owner)
        with self._lock:
            bucket = self._named.setdefault(prefix.ids[:INDEX_TOKENS], [])
            if any((other.ids, other.owner) == (prefix.ids, owner) for other in bucket):
                return
            bucket.append(prefix)
            self._short += [prefix] if len(prefix.ids) < INDEX_TOKENS else []
            self._of_text.setdefault((owner, text), []).append(prefix)
            self._num_named_tokens += len(prefix.ids)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        limit = self._max_named_tokens
        while limit is not None and self._num_named_tokens > limit and len(self._of_text) > 1:
            self._forget(next(iter(self._of_text)))

    def _forget(self, owner_and_text: tuple[str, str]) -> None:
        forgotten = self._of_text.pop(owner_and_text, [])
        for prefix in forgotten:
            self._named[prefix.ids[:INDEX_TOKENS]].remove(prefix)
            if not self._named[prefix.ids[:INDEX_TOKENS]]:
                del self._named[prefix.ids[:INDEX_TOKENS]]
            self._num_named_tokens -= len(prefix.ids)
        self._short = [prefix for prefix in self._short if prefix not in forgotten]

    def drop(self, text: str, owner: str) -> None:
        """Forget a text of an owner, and drop it from memory and from disk, there for all models."""
        with self._lock:
            self._forget((owner, text))
        for prefix in [one for one in self._in_memory if (one.text, one.owner) == (text, owner)]:
            del self._in_memory[prefix]
        if self.files:
            for kept in self.files.texts():
                if (kept.text, kept.owner) == (text, owner):
                    self.files.drop(kept)

    def find(self, tokens: Sequence[int], owner: str = "") -> KeptPrefix | None:
        """The longest prefix named for an owner that a prompt begins with."""
        tokens = tuple(tokens)
        with self._lock:
            known = [*self._named.get(tokens[:INDEX_TOKENS], ()), *self._short]
        own = [one for one in known if one.owner == owner]
        found = [one for one in own if one.ids == tokens[: len(one.ids)]]
        longest = max(found, key=lambda one: len(one.ids), default=None)
        if longest is not None:
            self._used(longest)
        return longest

    def _used(self, prefix: KeptPrefix) -> None:
        with self._lock:
            if (prefix.owner, prefix.text) in self._of_text:
                self._of_text.move_to_end((prefix.owner, prefix.text))

    def load(self, prefix: KeptPrefix) -> torch.Tensor | None:
        """The keys and values of a prefix from memory, else from disk."""
        if prefix in self._in_memory:
            self._in_memory.move_to_end(prefix)
            return self._in_memory[prefix]
        return self.files.load(self._text(prefix), prefix.ids) if self.files else None

    def put(self, prefix: KeptPrefix, values: torch.Tensor) -> None:
        """Take over what leaves the cache. What does not fit the memory goes to disk."""
        if prefix in self._in_memory or not self._is_named(prefix):
            return
        self._in_memory[prefix] = values
        while self.memory_bytes > self._max_memory_bytes:
            oldest, leaving = self._in_memory.popitem(last=False)
            self._save(oldest, leaving)

    def _is_named(self, prefix: KeptPrefix) -> bool:
        with self._lock:
            return prefix in self._of_text.get((prefix.owner, prefix.text), ())

    def save(self, in_cache: Sequence[tuple[KeptPrefix, Callable[[], torch.Tensor]]]) -> None:
        """Put everything on disk that is not there yet, as before the process ends."""
        for prefix, values in in_cache:
            if prefix not in self._in_memory and self.files and self._is_named(prefix):
                self._save(prefix, values())
        for prefix, kept in self._in_memory.items():
            self._save(prefix, kept)

    def weights_changed(self) -> None:
        """Nothing that was computed before is valid any more."""
        self._in_memory.clear()
        self._key = None

    @property
    def key(self) -> str:
        """The fingerprint of weights and adapter."""
        if self._key is None:
            self._key = self._key_of()
        return self._key

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(_num_bytes(values) for values in self._in_memory.values())

    def sizes(self, in_cache: Sequence[KeptPrefix], *, token_bytes: int) -> list[KeptSizes]:
        """What is kept of each text; `in_cache` holds the prefixes in the cache."""
        with self._lock:
            named = [prefix for bucket in self._named.values() for prefix in bucket]
        on_disk = {text.folder: text.num_bytes for text in self.files.texts()} if self.files else {}
        found = []
        for text, source, owner in dict.fromkeys(
            (prefix.text, prefix.source, prefix.owner) for prefix in named
        ):
            those = {prefix for prefix in named if (prefix.text, prefix.owner) == (text, owner)}
            kept = [_num_bytes(v) for prefix, v in list(self._in_memory.items()) if prefix in those]
            about = self._about(text, source, owner)
            found.append(
                KeptSizes(
                    source=source,
                    text=text,
                    num_sections=len(those),
                    section_bytes=token_bytes * sum(len(prefix.ids) for prefix in those),
                    cache_bytes=token_bytes * sum(len(p.ids) for p in in_cache if p in those),
                    memory_bytes=sum(kept),
                    disk_bytes=on_disk.get(about.folder, 0),
                )
            )
        return found

    def _save(self, prefix: KeptPrefix, values: torch.Tensor) -> None:
        if self.files:
            self.files.save(self._text(prefix), prefix.ids, values)

    def _text(self, prefix: KeptPrefix) -> KeptText:
        return self._about(prefix.text, prefix.source, prefix.owner)

    def _about(self, text: str, source: str, owner: str) -> KeptText:
        return KeptText(text=text, source=source, model=self._model, key=self.key, owner=owner)


def _num_bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
