"""Does the trainer compute what was sampled, and in packs what it computes row by row?

    two replies of the engine ──▶ its log-probabilities ─┐
              └── scored by the trainer, in one pack ────┴──▶ mean difference per token, refused above a limit
                          row by row ────────────────────┘

A server may apply a repetition penalty or another temperature, report log-probabilities of another
distribution, or serve other weights; a kernel may be wrong on this GPU, or compiled wrongly. Every update would be wrong
then, and no reward shows it. A server is asked before the first step; steps whose rows are twice as long as what was
compared are compared again: a window may end in between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.agents.recorder import call_of, merge_calls
from memagent.rl.types import Group, Sample
from memagent.rl.update.packing import Pack, num_row_tokens, num_shared, pack
from memagent.rl.update.rows import TrainingRow
from memagent.types import Message, Sampling

Score = Callable[[Sequence[Pack]], Awaitable[list[list[float]]]]
"""Log-probabilities of the targets of packs."""

PROMPT: Message = {
    "role": "user",
    "content": "Count from one to twenty in words, then describe a river.",
}
REPLY_TOKENS = 64
MAX_DIFFERENCE = 0.1
"""Mean difference of log-probabilities, in nats per token, that rounding in half precision stays below."""


async def check_agreement(
    engine: BaseEngine, score: Score, *, temperature: float, vocabulary: int, seed: int = 0
) -> NDArray[np.float64]:
    """Have the engine sample two replies and score them: the differences, in nats per token. Raises ConfigError when trainer and engine disagree.

    `score` is that of the trainer, whose model has a vocabulary of this size and computes log-probabilities
    at this temperature.
    """
    samples: list[Sample] = []
    for number in range(2):
        sampling = Sampling(max_tokens=REPLY_TOKENS, temperature=temperature, seed=seed + number)
        completion = await engine.complete([PROMPT], sampling)
        samples += merge_calls([call_of(completion, model=engine.model, policy_version=0)])
    largest = max(max(sample.ids) for sample in samples)
    if largest >= vocabulary:
        raise ConfigError(
            f"{engine.model} has the token {largest}, and `model.source` {vocabulary} tokens; serve "
            "the model that is trained"
        )
    return await _compared(samples, score, engine.model)


async def check_longer(
    groups: Sequence[Group],
    score: Score,
    *,
    num_checked: int,
    policy_version: int,
    served: str | None,
) -> int:
    """Compare the longest row of a step, if it is twice as long as rows that were, in a pack with one that is much like it:
    with each of them alone and, where the model is `served`, with the server. Returns the tokens of the longest row that
    was compared; of a server only rows of these weights can be.
    """
    fresh = [
        (number, sample)
        for number, group in enumerate(groups)
        for rollout in group.rollouts
        for sample in rollout.samples
        if sample.num_sampled and (served is None or sample.policy_version == policy_version)
    ]
    group, longest = max(fresh, key=lambda one: len(one[1].ids), default=(0, None))
    if longest is None or len(longest.ids) < 2 * num_checked:
        return num_checked
    others = [one for number, one in fresh if number == group and one is not longest]
    others.sort(key=lambda one: num_shared(np.array(one.ids), np.array(longest.ids)))
    pair = [longest, *others[-1:]]
    await _check_packing(pair, score)
    if served is not None:
        await _compared(pair, score, served)
    return len(longest.ids)


async def _check_packing(samples: Sequence[Sample], score: Score) -> None:
    """Raise ConfigError unless rows score in one pack as they do alone."""
    rows = _rows_of(samples)
    (together,) = pack(rows, max_tokens=num_row_tokens(rows))
    alone = [pack([row], max_tokens=len(row.sample.ids))[0] for row in rows]
    packed, *each = await score([together, *alone])
    by_row = np.lexsort((together.targets.offsets, together.targets.rows))
    differences = np.abs(np.array(packed)[by_row] - np.concatenate(each))
    if not differences.mean() <= MAX_DIFFERENCE:
        raise ConfigError(
            f"rows of up to {max(len(one.ids) for one in samples)} tokens score otherwise in a pack than alone, by "
            f"{differences.mean():.3f} per token and up to {differences.max():.3f}; train with "
            "`update.compiled=false`, and if that does not help report the GPU and the versions of torch and triton"
        )


def _rows_of(samples: Sequence[Sample]) -> list[TrainingRow]:
    return [
        TrainingRow(sample=sample, group=0, rollout=number, advantage=1.0, weight=1.0)
        for number, sample in enumerate(samples)
    ]


async def _compared(samples: Sequence[Sample], score: Score, model: str) -> NDArray[np.float64]:
    """The differences between engine and trainer over rows that share a pack; refused if rounding does not explain them."""
    rows = _rows_of(samples)
    (one,) = pack(rows, max_tokens=num_row_tokens(rows))
    theirs, ours = one.targets.behaviour.astype(float), np.array((await score([one]))[0])
    differences: NDArray[np.float64] = np.abs(theirs - ours)
    if not differences.mean() <= MAX_DIFFERENCE:
        raise ConfigError(
            f"{model} reports log-probabilities that are not the trainer's: over {len(differences)} "
            f"tokens of {len(rows)} rows of up to {max(len(each.ids) for each in samples)} tokens they differ by "
            f"{differences.mean():.3f} per token (at most {MAX_DIFFERENCE:g} is expected), by up to "
            f"{differences.max():.3f}; mean {theirs.mean():.3f} there, {ours.mean():.3f} here. Serve the weights of "
            "`model.source`, without a repetition penalty; start vLLM with --generation-config vllm --logprobs-mode "
            "processed_logprobs"
        )
    return differences
