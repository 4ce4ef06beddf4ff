"""Before the first step: does an engine outside this process sample what the trainer computes?

    one reply of the engine ──▶ its log-probabilities ─┐
              └── scored by the trainer ───────────────┴──▶ mean difference per token, refused above a limit

A server may apply a repetition penalty or another temperature, report log-probabilities of another
distribution, or serve other weights. Every update would be wrong then, and no reward shows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.agents.recorder import call_of, merge_calls
from memagent.rl.update.packing import Pack, pack
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far engine and trainer differ over one reply, in nats per token."""

    num_tokens: int
    mean: float
    largest: float
    engine_logprob: float
    """Mean log-probability of the engine."""
    trainer_logprob: float

    @property
    def is_good(self) -> bool:
        """Whether rounding explains the difference."""
        return self.mean <= MAX_DIFFERENCE


async def check_agreement(
    engine: BaseEngine, score: Score, *, temperature: float, vocabulary: int, seed: int = 0
) -> Agreement:
    """Have the engine sample one reply and score it. Raises ConfigError when trainer and engine disagree.

    `score` is that of the trainer, whose model has a vocabulary of this size and computes log-probabilities
    at this temperature.
    """
    found = await compare(engine, score, temperature=temperature, vocabulary=vocabulary, seed=seed)
    if not found.is_good:
        raise ConfigError(
            f"{engine.model} reports log-probabilities that are not the trainer's: over {found.num_tokens} "
            f"tokens of one reply they differ by {found.mean:.3f} per token (at most {MAX_DIFFERENCE:g} is "
            f"expected), by up to {found.largest:.3f}; mean {found.engine_logprob:.3f} there, "
            f"{found.trainer_logprob:.3f} here. Serve the weights of `model.source`, without a repetition "
            "penalty; start vLLM with --generation-config vllm --logprobs-mode processed_logprobs"
        )
    return found


async def compare(
    engine: BaseEngine, score: Score, *, temperature: float, vocabulary: int, seed: int = 0
) -> Agreement:
    """The difference between engine and trainer over one reply."""
    sampling = Sampling(max_tokens=REPLY_TOKENS, temperature=temperature, seed=seed)
    completion = await engine.complete([PROMPT], sampling)
    (sample,) = merge_calls([call_of(completion, model=engine.model, policy_version=0)])
    if max(sample.ids) >= vocabulary:
        raise ConfigError(
            f"{engine.model} has the token {max(sample.ids)}, and `model.source` {vocabulary} tokens; serve "
            "the model that is trained"
        )
    row = TrainingRow(sample=sample, group=0, rollout=0, advantage=1.0, weight=1.0)
    (one,) = pack([row], max_tokens=len(sample.ids))
    theirs: list[float] = one.targets.behaviour.tolist()
    (ours,) = await score([one])
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    return Agreement(
        num_tokens=len(differences),
        mean=fmean(differences),
        largest=max(differences),
        engine_logprob=fmean(theirs),
        trainer_logprob=fmean(ours),
    )
