"""What a GPU has to hold: shards of the model and its optimizer, activations, and the cache of an engine.

Weights are in bfloat16; masters, gradients and the two moments of what is trained are in float32. FSDP2 gives
each rank an equal shard of all of them and gathers a layer when it is computed. Activations are those of one
pack. An engine's cache gets what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from memagent.rl.planning.accelerators import GIB
from memagent.rl.planning.shapes import BF16, ModelShape
from memagent.rl.planning.workload import Workload

MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
ACTIVATION_BYTES = 35
"""For each token, layer and unit of width. Measured: 23 GiB for 16,384 more tokens at 1.5B; 20 GiB for
packs of 32,768 at 135M."""
CHECKPOINT_BYTES = 2
"""The same for what gradient checkpointing keeps."""
GATHERED_LAYERS = 2
"""Layers that FSDP holds in full at a time."""
OVERHEAD = 2 * GIB
"""Of the driver, kernels and libraries."""
SLACK = 0.95
"""Share of the memory that can be used; the rest is lost in gaps."""
MIN_ROWS = 8
"""An engine that decodes fewer rollouts at once is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes on one GPU, by what they are for."""

    weights: float = 0.0
    reference: float = 0.0
    """Frozen weights of the KL term."""
    masters: float = 0.0
    gradients: float = 0.0
    moments: float = 0.0
    gathered: float = 0.0
    """Layers that are held in full while they are computed."""
    activations: float = 0.0
    logits: float = 0.0
    engine_weights: float = 0.0
    """A copy for generation, where it is not the trainer's own."""
    cache: float = 0.0
    """Keys and values."""
    overhead: float = OVERHEAD

    @property
    def resident(self) -> float:
        """What stays when neither training nor generation is going on."""
        parts = (self.weights, self.reference, self.masters, self.gradients, self.moments)
        return sum(parts) + self.overhead

    @property
    def training(self) -> float:
        """While an update is computed."""
        return self.resident + self.gathered + self.activations + self.logits

    @property
    def generating(self) -> float:
        """While rollouts are sampled."""
        return self.resident + self.engine_weights + self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """What decides the memory of a trainer rank."""

    shape: ModelShape
    num_trained: float
    has_reference: bool
    max_tokens: int
    checkpointing: bool
    offload_optimizer: bool = False
    offload_reference: bool = False

    def of_rank(self, workload: Workload, num_ranks: int) -> GpuMemory:
        """Of one of some ranks."""
        shape, trained = self.shape, 0.0 if self.offload_optimizer else self.num_trained / num_ranks
        weights = 0.0 if self.offload_optimizer else shape.weight_bytes / num_ranks
        has_reference = self.has_reference and not self.offload_reference
        return GpuMemory(
            weights=weights,
            reference=shape.weight_bytes / num_ranks if has_reference else 0.0,
            masters=MASTER_BYTES * trained,
            gradients=GRADIENT_BYTES * trained,
            moments=MOMENT_BYTES * trained,
            gathered=self._gathered() if num_ranks > 1 or self.offload_optimizer else 0.0,
            activations=self._activations(),
            logits=self._logits(workload),
        )

    def _gathered(self) -> float:
        shape = self.shape
        layer = shape.layer_parameters / shape.num_layers
        embedding = shape.vocab_size * shape.hidden_size
        return BF16 * (GATHERED_LAYERS * layer + embedding)

    def _activations(self) -> float:
        shape = self.shape
        token = ACTIVATION_BYTES * shape.hidden_size
        if self.checkpointing:
            token += CHECKPOINT_BYTES * shape.num_layers * shape.hidden_size
        else:
            token *= shape.num_layers
        return token * self.max_tokens

    def _logits(self, workload: Workload) -> float:
        """Logits of the tokens with loss, and their gradient."""
        replies = workload.trained_rollouts * workload.rollout_reply_tokens
        share = min(1.0, replies / workload.computed_tokens)
        return 2 * BF16 * self.shape.vocab_size * share * self.max_tokens


def row_context(workload: Workload) -> float:
    """Cached tokens of a rollout in the middle of its longest call; what the group shares counts once for it."""
    return max(
        call.shared_tokens / workload.group_size + call.own_tokens + call.reply_tokens / 2
        for call in workload.calls
    )


def longest_row(workload: Workload) -> float:
    """Tokens of the longest prompt with its reply at the limit."""
    return max(call.prompt_tokens + call.max_reply for call in workload.calls)
