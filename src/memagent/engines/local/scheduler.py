"""Continuous batching over a pool of slots: which tokens are computed in the next step.

    submit ─▶ waiting ──admit──▶ running ──▶ finished
                 ▲                  │
                 └─────preempt──────┘   when the pool is full: the youngest request frees its slots

Each step takes one token of every generating request and fills the rest of the batch with pieces of
prompts, oldest first. Pure bookkeeping that runs without a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memagent.engines.local.cache import PrefixNode, PrefixTree, SlotPool, path_to
from memagent.errors import ConfigError
from memagent.types import Sampling

GROW_SLOTS = 64
"""Slots that a reply is given at a time."""


class SlotRun(NamedTuple):
    """Consecutive slots that hold consecutive tokens."""

    start: int
    length: int


@dataclass(eq=False, slots=True)
class GenerationRequest:
    """A prompt and the reply being generated."""

    prompt_ids: Sequence[int]
    """Preferably a tuple: the garbage collector does not traverse tuples of numbers."""
    sampling: Sampling
    seed: int
    owner: str = ""
    """What is computed is used for requests of the same owner only."""
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the weights that sampled the reply, each with the number of its tokens."""
    is_cancelled: bool = False
    # --- set by the scheduler ---
    is_running: bool = False
    leaf: PrefixNode | None = None
    """The prefix-tree node that ends the admitted tokens; None while waiting."""
    num_admitted: int = 0
    """Tokens held by nodes; those generated since are in `tails`."""
    tails: list[SlotRun] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_preemptions: int = 0
    num_reused: int = 0
    """Prompt tokens found in the cache."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def sampled_by(self, policy_version: int, count: int) -> None:
        """Note which weights sampled the newest tokens."""
        if self.versions and self.versions[-1][0] == policy_version:
            count += self.versions.pop()[1]
        self.versions.append((policy_version, count))

    @property
    def num_left(self) -> int:
        """Tokens that the reply may still get."""
        return self.sampling.max_tokens - len(self.completion_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and reply, by position."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.completion_ids[start - num_prompt : end - num_prompt]
        return [*self.prompt_ids[start:end], *self.completion_ids[: max(end - num_prompt, 0)]]

    def runs(self, end: int) -> list[SlotRun]:
        """The slots of the tokens before position `end`, in order."""
        found: list[SlotRun] = []
        left = end
        nodes = path_to(self.leaf) if self.leaf else []
        for run in [*(SlotRun(node.start, len(node.tokens)) for node in nodes), *self.tails]:
            if left <= 0:
                break
            found.append(SlotRun(run.start, min(run.length, left)))
            left -= run.length
        assert left <= 0, "a token has no slot"
        return found


class Piece(NamedTuple):
    """Tokens of one request that are computed in this step."""

    request: GenerationRequest
    start: int
    """Position of the first token."""
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_reply(self) -> bool:
        """True for a token of the reply; False for tokens the request was admitted with."""
        return self.start >= self.request.num_admitted

    @property
    def is_last(self) -> bool:
        """True when its last token's logits give the next token of the reply."""
        return self.end == self.request.num_tokens


class Scheduler:
    """Decides, step by step, which tokens are computed."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_batch_tokens: int,
        max_running: int,
        grow_slots: int = GROW_SLOTS,
    ) -> None:
        self.pool = SlotPool(num_slots)
        self.tree = PrefixTree(self.pool)
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._grow_slots = grow_slots

    def check(self, num_tokens: int) -> None:
        """Raise ConfigError if prompt and reply of `num_tokens` do not fit the cache."""
        if num_tokens > self.pool.num_slots:
            raise ConfigError(
                f"prompt and reply need {num_tokens} tokens of cache, which has "
                f"{self.pool.num_slots}; shorten the prompt, lower `max_tokens` or raise `cache_gb`"
            )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request that passed `check`."""
        self.waiting.append(request)

    def next_pieces(self, steps: int = 1) -> list[Piece]:
        """The work of the next step; empty if there is none.

        Every reply is given slots for `steps` tokens, or for all it may still get.
        """
        self.drop_cancelled()
        pieces = self._replies(steps)
        budget = self.max_batch_tokens - len(pieces)
        for request in self.running:
            if budget > 0 and (piece := self._prompt_piece(request, budget)):
                pieces.append(piece)
                budget -= piece.length
        most = min(self._max_running, self.max_batch_tokens)
        while budget > 0 and self.waiting and len(self.running) < most:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            request.is_running = True
            self.running.append(request)
            if piece := self._prompt_piece(request, budget):
                pieces.append(piece)
                budget -= piece.length
        return pieces

    def computed(self, piece: Piece) -> None:
        """Record that a piece's keys and values are in the cache."""
        request = piece.request
        request.num_computed = piece.end
        if piece.start >= request.num_admitted:
            return  # a token of the reply, which is in no node
        position = 0
        for node in path_to(request.leaf) if request.leaf else []:
            inside = min(max(piece.end - position, 0), len(node.tokens))
            if piece.start < position + len(node.tokens) and inside > node.num_computed:
                node.num_computed = inside
                if node.is_computed:
                    node.writer = None
            position += len(node.tokens)

    def finish(self, request: GenerationRequest) -> None:
        """Free the slots of a running request; its prompt stays cached until evicted."""
        self.running.remove(request)
        self._release(request)

    def forget(self) -> None:
        """Drop the whole cache, as after a weight update. No request may be running."""
        assert not self.running, "requests use the cache"
        self.tree.clear()

    def preempt_all(self) -> None:
        """Have all running requests wait, in their order; what they computed is computed again."""
        for request in reversed(self.running[:]):
            self._preempt(request)

    def shrink(self, max_batch_tokens: int) -> None:
        """Compute at most so many tokens a step; of more running requests the youngest wait."""
        self.max_batch_tokens = max_batch_tokens
        for request in reversed(self.running[max_batch_tokens:]):
            self._preempt(request)

    def drop_cancelled(self) -> None:
        """Remove cancelled requests."""
        for request in [request for request in self.running if request.is_cancelled]:
            self.finish(request)
        self.waiting = deque(request for request in self.waiting if not request.is_cancelled)

    # --- replies -------------------------------------------------------------------------------

    def _replies(self, steps: int) -> list[Piece]:
        pieces: list[Piece] = []
        for request in list(self.running):
            if not request.is_running:  # preempted for an earlier one
                continue
            last = request.num_tokens - 1
            if last < request.num_admitted or request.num_computed != last:
                continue  # its prompt is not computed yet
            if self._has_slots(request, last + min(steps, request.num_left)):
                pieces.append(Piece(request, last, 1))
        # an earlier request may have been preempted for a later one
        return [piece for piece in pieces if piece.request.is_running]

    def _has_slots(self, request: GenerationRequest, end: int) -> bool:
        """Give a reply slots for the positions before `end`. False if it was preempted instead."""
        while end > request.num_admitted + sum(run.length for run in request.tails):
            if not self._grow(request):
                return False
        return True

    def _grow(self, request: GenerationRequest) -> bool:
        """More slots for a reply, preempting others. False if it was preempted itself."""
        count = max(min(self._grow_slots, request.num_left), 1)
        while (start := self.take(count)) is None:
            if count > 1:
                count //= 2
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.tails.append(SlotRun(start, count))
        return True

    def take(self, count: int) -> int | None:
        """Slots, evicting unused prompts."""
        while (start := self.pool.take(count)) is None:
            if not self.tree.evict(1):
                return None
        return start

    def _preempt(self, request: GenerationRequest) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    # --- prompts -------------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> bool:
        """Give a request slots for its tokens, sharing the common prefix with others."""
        tokens = (*request.prompt_ids, *request.completion_ids)
        shared = self.tree.match(
            tokens[:-1], request.owner
        )  # the last token is recomputed, for its logits
        num_shared = sum(len(node.tokens) for node in shared)
        for node in shared:
            self.tree.use(node, request)
        num_own = len(tokens) - num_shared
        num_reply = min(self._grow_slots, request.num_left)
        start = self.pool.take(num_own + num_reply)  # the reply right behind, if possible
        if start is not None:
            request.tails = [SlotRun(start + num_own, num_reply)]
        else:
            start = self.take(num_own)
        if start is None:
            for node in shared:
                self.tree.release(node, request)
            if self.running:
                return False
            # alone, and no run is long enough: the shared nodes fragment the pool, so start over
            self.tree.evict(self.pool.num_slots)
            shared, num_shared = [], 0
            start = self.take(len(tokens))
            assert start is not None, "`check` refuses requests larger than the pool"
        parent = shared[-1] if shared else None
        leaf = self.tree.add(parent, tokens[num_shared:], start, request.owner)
        self.tree.use(leaf, request)
        request.leaf = leaf
        request.num_admitted = len(tokens)
        request.num_computed = 0
        request.num_reused = num_shared
        return True

    def _prompt_piece(self, request: GenerationRequest, budget: int) -> Piece | None:
        """The next piece of a prompt; None if done, or while another request computes it."""
        if request.num_computed >= request.num_admitted:
            return None
        position = 0
        for node in path_to(request.leaf) if request.leaf else []:
            if not node.is_computed:
                if node.writer not in (None, request):
                    return None
                node.writer = request
                start = position + node.num_computed
                count = min(budget, len(node.tokens) - node.num_computed)
                return Piece(request, start, count)
            position += len(node.tokens)
        raise AssertionError("all nodes are computed but the request is not marked as computed")

    # --- freeing -------------------------------------------------------------------------------

    def _release(self, request: GenerationRequest) -> None:
        request.is_running = False
        for node in reversed(path_to(request.leaf) if request.leaf else []):
            self.tree.release(node, request)
        for run in request.tails:
            self.pool.give_back(run.start, run.length)
        request.leaf = None
        request.tails = []
        request.num_admitted = request.num_computed = 0
