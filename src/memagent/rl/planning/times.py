"""Seconds of each kind of work in a step: updates, passes without gradient, prompts, decoding steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from memagent.rl.planning.accelerators import Accelerator
from memagent.rl.planning.rates import MEASURED, Rates
from memagent.rl.planning.shapes import BF16, ModelShape
from memagent.rl.planning.workload import Workload
from memagent.rl.settings import TrainConfig

OPTIMIZER_BYTES = 36
"""Read and written per parameter by a step of AdamW with float32 masters."""
GATHER_PASSES = 2
"""How often FSDP gathers the weights for a pack: forward and backward."""
GRADIENT_BYTES = 4
GPUS_PER_NODE = 8


class ModelPasses(NamedTuple):
    """How often an update's tokens go through the model."""

    weights: float
    """Matrix products, in multiples of a forward pass."""
    attention: float
    """The same for attention."""
    traffic: float
    """In multiples of a whole update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTimes:
    """How long the trainer takes."""

    shape: ModelShape
    gpu: Accelerator
    num_trained: float
    """Parameters that are trained."""
    has_adapter: bool
    checkpointing: bool
    compiled: bool
    num_updates: int
    num_scored: int
    """ModelPasses without gradient over all rows: old log-probabilities, reference, agreement."""
    max_tokens: int
    """Of a pack."""
    offload: bool = False
    """Weights, gradients and optimizer state are kept in the memory of the machine."""
    rates: Rates = MEASURED

    def update_seconds(self, workload: Workload, num_gpus: int) -> float:
        """Optimizer steps on all groups of a step."""
        again = 1.0 if self.checkpointing else 0.0
        backward = 1.0 if self.has_adapter else 2.0
        passes = ModelPasses(
            1 + again + backward, 1 + again + 2.5, 1 + again * self.rates.forward_share
        )
        return self._seconds(workload, passes, num_gpus) + self.num_updates * (
            self.rates.update_seconds + self.optimizer_seconds(num_gpus)
        )

    def scoring_seconds(self, workload: Workload, num_gpus: int) -> float:
        """ModelPasses without gradient."""
        passes = ModelPasses(1, 1, self.rates.forward_share)
        return self.num_scored * self._seconds(workload, passes, num_gpus)

    def optimizer_seconds(self, num_gpus: int) -> float:
        """One step of AdamW on a shard."""
        bandwidth = self.gpu.host_link / 2 if self.offload else self.gpu.bandwidth
        return OPTIMIZER_BYTES * self.num_trained / num_gpus / bandwidth

    def flops(self, workload: Workload) -> float:
        """Arithmetic of one forward pass over the tokens of an update."""
        return sum(tokens * self._token_flops(seen) for tokens, seen in workload.update_parts())

    def step_flops(self, workload: Workload) -> float:
        """Useful arithmetic of a step: forward and backward once, without recomputation, and prompts."""
        passes = 2.0 if self.has_adapter else 3.0
        prompts = workload.prefill_tokens * self._token_flops(_mean_seen(workload))
        replies = workload.reply_tokens * self._token_flops(2 * _mean_seen(workload))
        return self.flops(workload) * (passes + self.num_scored) + prompts + replies

    def _token_flops(self, seen: float) -> float:
        return 2 * self.shape.layer_parameters + self._attention_flops(seen)

    def _attention_flops(self, seen: float) -> float:
        return 4 * self.shape.num_layers * self.shape.attention_size * seen

    def _seconds(self, workload: Workload, passes: ModelPasses, num_gpus: int) -> float:
        """Packs are shared out over the GPUs; the last round waits for the longest."""
        parts = workload.update_parts()
        tokens = sum(number for number, _ in parts)
        if tokens == 0:
            return 0.0
        weights = 2 * self.shape.layer_parameters * tokens * passes.weights
        attention = sum(number * self._attention_flops(seen) for number, seen in parts)
        peak = self.gpu.flops * self.rates.peak_share(self.shape.hidden_size)
        compute = (weights + attention * passes.attention) / peak
        left = self.rates.compiled_traffic if self.compiled else 1.0
        moved = self.rates.traffic * left * passes.traffic * tokens * self.shape.traffic_width
        seconds = compute + moved / self.gpu.bandwidth
        num_packs = max(tokens / self.max_tokens, self.num_updates)
        rounds = self.num_updates * math.ceil(num_packs / self.num_updates / num_gpus)
        fullest = max(seconds / num_gpus, rounds * seconds / num_packs)
        return max(fullest, rounds * self._gather_seconds(num_gpus, passes))

    def _gather_seconds(self, num_gpus: int, passes: ModelPasses) -> float:
        """FSDP's communication for a pack; it runs beside the arithmetic."""
        if num_gpus == 1:
            return 0.0
        link = self.gpu.link if num_gpus <= GPUS_PER_NODE else self.gpu.network
        has_gradients = passes.traffic >= 1
        gathered = self.shape.weight_bytes * (GATHER_PASSES if has_gradients else 1)
        reduced = GRADIENT_BYTES * self.num_trained if has_gradients else 0.0
        return (gathered + reduced) * (1 - 1 / num_gpus) / (link * self.rates.link_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """How long an engine replica takes: prompts per token, a decoding step per row."""

    shape: ModelShape
    gpu: Accelerator
    tensor_parallel: int
    is_merged: bool
    """No adapter, or one that is merged into the weights."""
    rates: Rates = MEASURED

    def prefill_seconds(self, tokens: float, seen: float) -> float:
        """Prompt tokens that see `seen` tokens on average."""
        flops = 2 * self.shape.layer_parameters + (
            4 * self.shape.num_layers * self.shape.attention_size * seen
        )
        share = self.rates.forward_share * self.rates.compiled_traffic
        moved = self.rates.traffic * share * self.shape.traffic_width
        return tokens * (flops / self._peak + moved / self.gpu.bandwidth / self.tensor_parallel)

    @property
    def step_seconds(self) -> float:
        """A decoding step, whatever is in it."""
        layer = self.rates.layer_seconds
        layer += 0.0 if self.is_merged else self.rates.adapter_layer_seconds
        layer += layer * 0.25 * math.log2(self.tensor_parallel)
        weights = self.shape.weight_bytes / self.rates.weight_bandwidth
        return self.shape.num_layers * layer + weights / self._bandwidth

    def row_seconds(self, context: float) -> float:
        """What a row adds to a decoding step; `context` is what has to be read for it."""
        products = 2 * self.shape.layer_parameters + 2 * (
            self.shape.vocab_size * self.shape.hidden_size
        )
        cached = self.shape.kv_bytes * context / self.rates.cache_bandwidth
        return products / self._peak + cached / self._bandwidth

    @property
    def _peak(self) -> float:
        share = self.rates.peak_share(self.shape.hidden_size)
        return self.gpu.flops * share * self.tensor_parallel

    @property
    def _bandwidth(self) -> float:
        return self.gpu.bandwidth * self.tensor_parallel


def publish_seconds(
    shape: ModelShape,
    gpu: Accelerator,
    *,
    is_colocated: bool,
    is_direct: bool = True,
    num_trained: float,
    rates: Rates,
) -> float:
    """New weights from the trainer to the engines; an engine in the trainer's own process needs none.

    Not `is_direct`: through the object store, bucket after bucket by one process.
    """
    link = gpu.link if is_colocated else gpu.network
    bandwidth = link * rates.link_share
    if not is_direct:
        bandwidth = min(bandwidth, rates.store_bandwidth)
    num_bytes = min(BF16 * num_trained, shape.weight_bytes)
    return rates.pause_seconds + num_bytes / bandwidth


def num_scored(config: TrainConfig) -> int:
    """ModelPasses without gradient that the objective takes."""
    objective = config.objective
    recomputed = objective.old_logprobs == "recompute" or (
        objective.has_masks and config.update.updates > 1
    )
    return int(recomputed) + int(objective.kl_coef > 0)


def _mean_seen(workload: Workload) -> float:
    """Tokens that a token of a prompt sees on average."""
    return sum(call.prompt_tokens for call in workload.calls) / len(workload.calls) / 2
