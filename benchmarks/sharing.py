"""How many tokens the local engine computes when requests share a prefix. No model: the scheduler alone.

python -m benchmarks.sharing
"""

from __future__ import annotations

import random

from memagent.engines.local.scheduler import GenerationRequest, Scheduler
from memagent.types import Sampling

NUM_TEXTS, GROUP, SHARED, OWN, REPLY = 8, 8, 5000, 150, 64
VOCABULARY = 49_000


def requests() -> list[GenerationRequest]:
    """Groups of requests over texts, each with tokens of its own after the shared ones."""
    rng = random.Random(0)
    made = []
    for _ in range(NUM_TEXTS):
        shared = [rng.randrange(VOCABULARY) for _ in range(SHARED)]
        for _ in range(GROUP):
            own = [rng.randrange(VOCABULARY) for _ in range(OWN)]
            made.append(
                GenerationRequest(
                    prompt_ids=shared + own, sampling=Sampling(max_tokens=REPLY), seed=0
                )
            )
    return made


def num_computed(scheduler: Scheduler, waiting: list[GenerationRequest]) -> int:
    """Play the model until every reply is written; the tokens that went through it."""
    for request in waiting:
        scheduler.submit(request)
    total = 0
    while pieces := scheduler.next_pieces():
        for piece in pieces:
            total += piece.length
            scheduler.computed(piece)
        for piece in pieces:
            if piece.is_last:
                piece.request.completion_ids.append(0)
                if len(piece.request.completion_ids) == REPLY:
                    scheduler.finish(piece.request)
    return total


def main() -> None:
    waiting = requests()
    scheduler = Scheduler(400_000, max_batch_tokens=8192, max_running=512)
    computed = num_computed(scheduler, waiting)
    apart = sum(len(request.prompt_ids) + REPLY - 1 for request in waiting)
    print(
        f"{NUM_TEXTS} texts x {GROUP} requests, {SHARED} tokens shared, {OWN} own, replies of {REPLY}"
    )
    print(f"computed {computed:,} tokens instead of {apart:,}: {apart / computed:.1f} times less")


if __name__ == "__main__":
    main()
