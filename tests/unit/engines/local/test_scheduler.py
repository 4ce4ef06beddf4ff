"""The scheduler without a model: every token computed once, no slot shared by mistake, none lost."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.engines.local.cache import PrefixTree, SlotPool
from memagent.engines.local.scheduler import GenerationRequest, Piece, Scheduler
from memagent.types import Sampling


class TestSlotPool:
    def test_runs_are_taken_from_the_front_and_merge_when_given_back(self) -> None:
        pool = SlotPool(10)
        assert [pool.take(3), pool.take(3), pool.take(3), pool.take(3)] == [0, 3, 6, None]
        pool.give_back(3, 3)
        assert pool.take(4) is None
        pool.give_back(6, 3)
        assert pool.take(4) == 3
        pool.give_back(0, 3)
        pool.give_back(3, 4)
        assert pool.take(10) == 0

    @given(st.lists(st.integers(1, 9), max_size=40), st.randoms())
    def test_taken_runs_never_overlap_and_all_come_back(
        self, counts: list[int], rng: random.Random
    ) -> None:
        pool = SlotPool(60)
        taken: list[tuple[int, int]] = []
        for count in counts:
            if taken and rng.random() < 0.4:
                pool.give_back(*taken.pop(rng.randrange(len(taken))))
            if (start := pool.take(count)) is not None:
                taken.append((start, count))
            slots = [slot for low, size in taken for slot in range(low, low + size)]
            assert len(slots) == len(set(slots)) == 60 - pool.num_free
        for run in taken:
            pool.give_back(*run)
        assert pool.take(60) == 0


class TestPrefixTree:
    def add(self, tree: PrefixTree, pool: SlotPool, tokens: list[int], owner: str = "") -> None:
        shared = tree.match(tokens, owner)
        length = sum(len(node.tokens) for node in shared)
        if length < len(tokens):
            start = pool.take(len(tokens) - length)
            assert start is not None
            node = tree.add(shared[-1] if shared else None, tokens[length:], start, owner)
            node.num_computed = len(node.tokens)

    def test_a_common_beginning_is_found_and_split_off(self) -> None:
        pool = SlotPool(100)
        tree = PrefixTree(pool)
        self.add(tree, pool, [1, 2, 3, 4])
        self.add(tree, pool, [1, 2, 9])
        assert [node.tokens for node in tree.match([1, 2, 3, 4, 5])] == [[1, 2], [3, 4]]
        assert [node.tokens for node in tree.match([1, 2, 9])] == [[1, 2], [9]]
        assert [node.start for node in tree.match([1, 2, 3, 4])] == [0, 2]
        assert tree.match([2]) == []
        assert pool.num_free == 95

    def test_the_least_recently_used_is_evicted_first_and_what_is_in_use_never(self) -> None:
        pool = SlotPool(100)
        tree = PrefixTree(pool)
        for tokens in ([1, 1], [2, 2], [3, 3]):
            self.add(tree, pool, tokens)
        for tokens in ([2, 2], [1, 1]):
            (node,) = tree.match(tokens)
            tree.use(node, "reader")
            tree.release(node, "reader")
        (kept,) = tree.match([2, 2])
        tree.use(kept, "reader")
        assert tree.evict(2)
        assert tree.match([3, 3]) == []
        assert tree.evict(2)
        assert tree.match([1, 1]) == []
        assert not tree.evict(2)
        assert tree.match([2, 2]) == [kept]

    def test_owners_without_prompts_are_forgotten(self) -> None:
        pool = SlotPool(4)
        tree = PrefixTree(pool)
        for number in range(100):
            tree.match([1, 2], f"asks {number}")
            self.add(tree, pool, [1, 2], f"owner {number}")
            assert len(tree._roots) <= 3
            tree.evict(2)

    def test_all_prompts_of_an_owner_are_dropped_but_those_in_use(self) -> None:
        pool = SlotPool(100)
        tree = PrefixTree(pool)
        for tokens in ([1, 2, 3], [1, 2, 4], [5, 6]):
            for owner in ("anna", "bert"):
                self.add(tree, pool, tokens, owner)
        used = tree.match([1, 2, 4], "anna")
        for node in used:
            tree.use(node, "request")
        tree.drop_unused("anna")
        assert pool.num_free == 100 - 6 - 3
        assert tree.match([1, 2, 4], "anna") == used
        assert tree.match([5, 6], "anna") == []
        assert len(tree.match([1, 2, 3], "bert")) == 2
        for node in used:
            tree.release(node, "request")
        tree.drop_unused("anna")
        tree.drop_unused("nobody")
        assert pool.num_free == 100 - 6


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
loads = st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    load=loads,
    num_slots=st.integers(50, 120),
    max_batch_tokens=st.integers(1, 40),
    max_running=st.integers(1, 6),
    rng=st.randoms(use_true_random=False),
)
def test_every_token_is_computed_in_order_after_the_tokens_it_attends_to(
    load: list[tuple[list[int], int]],
    num_slots: int,
    max_batch_tokens: int,
    max_running: int,
    rng: random.Random,
) -> None:
    """Plays the model: a slot remembers which beginning of which text it was written for."""
    scheduler = Scheduler(num_slots, max_batch_tokens=max_batch_tokens, max_running=max_running)
    requests = [
        GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=count), seed=0)
        for prompt, count in load
    ]
    for request in requests:
        scheduler.submit(request)
    written: dict[int, tuple[int, ...]] = {}
    for _ in range(5000):
        if not (scheduler.waiting or scheduler.running):
            break
        if rng.random() < 0.03:
            rng.choice(requests).is_cancelled = True
        pieces = scheduler.next_pieces()
        assert sum(piece.length for piece in pieces) <= max(max_batch_tokens, max_running)
        for piece in pieces:
            write(piece, written)
        for piece in pieces:
            check_reads(piece, written)
            scheduler.computed(piece)
        for piece in pieces:
            advance(piece, scheduler, rng)
    else:
        raise AssertionError("the scheduler does not come to an end")
    for request in requests:
        assert request.is_cancelled or len(request.completion_ids) == request.sampling.max_tokens
    scheduler.tree.clear()
    assert scheduler.pool.num_free == num_slots


def slots_of(piece: Piece) -> list[int]:
    runs = piece.request.runs(piece.end)
    return [slot for run in runs for slot in range(run.start, run.start + run.length)]


def write(piece: Piece, written: dict[int, tuple[int, ...]]) -> None:
    tokens = piece.request.tokens(0, piece.end)
    for position, slot in list(enumerate(slots_of(piece)))[piece.start :]:
        written[slot] = tuple(tokens[: position + 1])


def check_reads(piece: Piece, written: dict[int, tuple[int, ...]]) -> None:
    tokens = piece.request.tokens(0, piece.end)
    for position, slot in enumerate(slots_of(piece)):
        assert written.get(slot) == tuple(tokens[: position + 1]), "it reads what another wrote"


def advance(piece: Piece, scheduler: Scheduler, rng: random.Random) -> None:
    request = piece.request
    if piece.end != request.num_tokens:
        return
    request.completion_ids.append(rng.randint(0, 3))
    if len(request.completion_ids) == request.sampling.max_tokens:
        scheduler.finish(request)
