"""What a training run will need and take, from its config alone: memory, tokens, time, cost.

    plan = make_plan(read_config("paper_7b"), gpu="H100", price=2.5)
    plan.chosen.step_seconds, plan.run_seconds, plan.cost
    plan.problems           what does not fit, each with a change that makes it fit

    synchronous     rollouts ─▶ scoring ─▶ update ─▶ new weights       one after the other
    asynchronous    rollouts                                           a step takes as long as the slower one
                    scoring ─▶ update ─▶ new weights

Closed formulas on values: no torch, no Ray, no GPU, no network. Constants were measured on one H200 and are carried
over to other models and GPUs by arithmetic and bandwidth. A replica decodes its rollouts together, one token a
step; prompts interrupt it, and a synchronous step waits for its longest rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from pydantic import Field

from memagent.agent.prompts import open_prompts
from memagent.config import LONGEST, Settings
from memagent.data.inspection import read_manifest
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.rl.agents.memory import MemorySettings
from memagent.rl.rollouts.tasks import TaskSource
from memagent.rl.settings import TrainConfig, parse_config
from memagent.rl.sizes import (
    BF16,
    CHECKPOINT_BYTES,
    GIB,
    GRADIENT_BYTES,
    OVERHEAD,
    GpuMemory,
    ModelShape,
    cache_bytes,
    model_shape,
    num_trained,
    trainer_memory,
)

# --- GPUs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU by its data sheet."""

    name: str
    gib: float
    """Memory that programs can use."""
    teraflops: float
    """Dense bfloat16 arithmetic."""
    tb_s: float
    """Bandwidth of its memory."""
    link_gb_s: float
    """To a GPU of the same node, in one direction."""

    @property
    def flops(self) -> float:
        return self.teraflops * 1e12

    @property
    def bandwidth(self) -> float:
        return self.tb_s * 1e12


ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("B200", 178, 2250, 8.0, 900),
        Accelerator("H200", 139, 989, 4.8, 450),
        Accelerator("H100", 79, 989, 3.35, 450),
        Accelerator("H800", 79, 989, 3.35, 200),
        Accelerator("H20", 95, 148, 4.0, 450),
        Accelerator("A100", 79, 312, 2.0, 300),
        Accelerator("A100-40GB", 39, 312, 1.55, 300),
        Accelerator("L40S", 44, 362, 0.86, 25),
        Accelerator("RTX4090", 23.5, 165, 1.0, 12),
    )
}
"""By name. `A100` is the one of 80 GB."""
GPUS_PER_NODE = 8


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name, in capitals or not."""
    found = {known.lower(): gpu for known, gpu in ACCELERATORS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(f"there is no accelerator {name!r}; {hint(name.upper(), ACCELERATORS)}")
    return found


# --- what was measured, on one H200 ---------------------------------------------------------------

PEAK, HALF_WIDTH = 0.6, 400.0
"""Share of peak arithmetic in products of very wide models, and the width at which half of it is reached: with
`TRAFFIC`, the rates of 135M and 1.5B."""
TRAFFIC = 105.0
"""Bytes that an update moves for each token, layer and unit of 4 x hidden + 2 x feed-forward width:
42,700 to 36,800 tokens/s eager at 1.5B with an adapter; 135M, all weights, 156,800 tokens in 1.36 s."""
COMPILED_TRAFFIC = 0.7
"""Remaining share with compiled layers (135M: 1.08 s instead of 1.36 s)."""
FORWARD_SHARE = 0.3
"""A forward pass alone, as a share of the traffic of an update."""
UPDATE_SECONDS = 0.15
"""Every update, however small: packing, masks, the optimizer (135M: 0.25 s, 1.5B: 0 to 0.1)."""
OPTIMIZER_BYTES = 36
"""Read and written per parameter by a step of AdamW with float32 masters."""
LAYER_SECONDS, ADAPTER_LAYER_SECONDS = 100e-6, 130e-6
"""A layer in a decoding step, whatever is in it (135M: 256 replies of 150 tokens in 0.72 s); on top of it an
adapter that is not merged (1.5B: 11.1 ms a step instead of 7.4)."""
CACHE_BANDWIDTH, WEIGHT_BANDWIDTH = 0.5, 0.75
"""Share of the memory's bandwidth at which keys and values are read (2.46 of 4.8 TB/s), and weights (assumed)."""
HOST_SECONDS, CLUSTER_HOST_SECONDS = 0.8e-3, 0.95e-3
"""The driver's own time for a call: rendering, encoding, recording; with replicas on a cluster."""
SIGMA, CORRELATION = 0.9, 0.3
"""Skew of reply lengths below their limit: the standard deviation of their logarithm, and how much of it the replies
of a rollout have in common."""
LINK_SHARE, NETWORK_GB_S = 0.6, 50.0
"""Share of a link's bandwidth that collectives reach, and the network between nodes for each GPU. Assumed."""
HOST_LINK = 50e9
"""Bytes a second between a GPU and the memory of its machine."""
DISK_BANDWIDTH = 1e9
"""Bytes a second and node that a checkpoint is written at. Assumed."""
PAUSE_SECONDS = 0.5
"""Stopping an engine for new weights and starting it again, besides the transfer. Assumed."""
SLACK = 0.95
"""Share of a GPU's memory that can be used; the rest is lost in gaps."""
MIN_ROWS = 8
"""An engine that decodes fewer rollouts at once is of no use."""


# --- the work of a step ---------------------------------------------------------------------------

CHARS_PER_TOKEN = 4.2
"""Characters of a token in English prompts."""
TEMPLATE_TOKENS, QUESTION_TOKENS, PLAIN_PROMPT_TOKENS = 20, 30, 300
"""What a chat template adds to a prompt; a question; the prompt of an agent whose prompts are not known."""
DOC_TOKENS = 140
"""Mean tokens of a HotpotQA document: 28,069 in 200."""
NATURAL_FILL = 0.93
"""How full sections are that end at a sentence: 4,096 tokens are five sections of at most 1,024."""

MOST_SECTIONS = 100_000
"""The most sections of a text: its calls are planned one by one."""


class PlanAssumptions(Settings):
    """What a config does not say about a run. Defaults are what runs of this project measured."""

    text_tokens: int | None = Field(default=None, ge=1, le=LONGEST)
    """Tokens of the text of a task; from the lengths of the tasks, or the manifests of their files, when not
    given."""
    reply_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a reply to a section; a quarter of its limit when not given, where replies of the
    trained readers end."""
    signal: float = Field(default=0.65, gt=0, le=1)
    """Share of the groups whose rewards differ; without a KL term only these are trained on."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a rollout."""

    shared_tokens: float
    """Prompt tokens that are the same in all rollouts of the group, from the start of the prompt."""
    own_tokens: float
    """Prompt tokens after them."""
    reply_tokens: float
    """Mean length of the reply."""
    max_reply: int

    @property
    def prompt_tokens(self) -> float:
        """Tokens of the whole prompt."""
        return self.shared_tokens + self.own_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step: its rollouts, and what the update computes of them."""

    prompts: int
    group_size: int
    calls: tuple[PlannedCall, ...]
    """The calls of one rollout, in order."""
    is_sharing: bool = True
    """Whether the update computes shared prefixes once."""
    trained_share: float = 1.0
    """Share of the groups that the update is computed for."""
    extra_groups: float = 1.0
    """Groups sampled for each one that is kept, with dynamic sampling."""

    @property
    def num_rollouts(self) -> float:
        """Rollouts of a step, those that are replaced included."""
        return self.prompts * self.group_size * self.extra_groups

    @property
    def num_calls(self) -> float:
        return self.num_rollouts * len(self.calls)

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens of one rollout."""
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def reply_tokens(self) -> float:
        """Reply tokens of one rollout."""
        return sum(call.reply_tokens for call in self.calls)

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens that generation computes."""
        own = sum(call.own_tokens for call in self.calls)
        shared = sum(call.shared_tokens for call in self.calls)
        return self.num_rollouts * (own + shared / self.group_size)

    @property
    def trained_rollouts(self) -> float:
        return self.prompts * self.group_size * self.trained_share

    @property
    def trained_tokens(self) -> float:
        """Tokens of all rows of the update."""
        return self.trained_rollouts * (self.prompt_tokens + self.reply_tokens)

    @property
    def computed_tokens(self) -> float:
        """Tokens that the update computes: shared prefixes once."""
        return sum(tokens for tokens, _ in self.update_parts())

    def update_parts(self) -> Iterator[tuple[float, float]]:
        """Tokens that the update computes, each with how many tokens it sees on average."""
        rows = self.trained_rollouts
        for call in self.calls:
            shared, own = call.shared_tokens, call.own_tokens + call.reply_tokens
            yield rows * shared / (self.group_size if self.is_sharing else 1), shared / 2
            yield rows * own, shared + own / 2

    @property
    def row_context(self) -> float:
        """Cached tokens of a rollout in the middle of its longest call; what the group shares counts once."""
        return max(
            call.shared_tokens / self.group_size + call.own_tokens + call.reply_tokens / 2
            for call in self.calls
        )

    @property
    def longest_row(self) -> float:
        """Tokens of the longest prompt with its reply at the limit."""
        return max(call.prompt_tokens + call.max_reply for call in self.calls)

    @property
    def longest_rollout(self) -> float:
        """Reply tokens of the longest of all rollouts: skewed lengths as one log-normal sum."""
        num = len(self.calls)
        spread = math.expm1(SIGMA**2) + (num - 1) * math.expm1(CORRELATION * SIGMA**2)
        variance = math.log1p(spread / num)
        z = NormalDist().inv_cdf(1 - 1 / (self.num_rollouts + 1))
        longest = self.reply_tokens * math.exp(math.sqrt(variance) * z - variance / 2)
        return min(longest, sum(call.max_reply for call in self.calls))


def plan_workload(config: TrainConfig, assumed: PlanAssumptions) -> Workload:
    """The work of one step."""
    objective, rollout = config.objective, config.rollout
    has_all = objective.kl_coef > 0 or objective.dynamic_sampling
    calls = _reading_calls if config.agent.name == "memory" else _plain_calls
    return Workload(
        prompts=rollout.prompts,
        group_size=rollout.group_size,
        calls=tuple(calls(config, assumed)),
        trained_share=1.0 if has_all else assumed.signal,
        extra_groups=1 / assumed.signal if objective.dynamic_sampling else 1.0,
    )


def _reading_calls(config: TrainConfig, assumed: PlanAssumptions) -> list[PlannedCall]:
    """The calls of a reading: its sections, then the answer. What stands before the memory is shared."""
    settings = MemorySettings.model_validate({"prompts": "boxed", **config.agent.settings})
    text = text_tokens(config.tasks, assumed)
    filled = 1.0 if settings.section_ends == "exact" else NATURAL_FILL
    num_sections = math.ceil(text / settings.chunk_tokens / filled)
    if settings.max_sections is not None:
        num_sections = min(num_sections, settings.max_sections)
    if num_sections > MOST_SECTIONS:
        raise ConfigError(
            f"a text has {num_sections:,} sections, and at most {MOST_SECTIONS:,} can be planned; lower "
            "`text_tokens`, or raise `chunk_tokens`"
        )
    limit = settings.memory_tokens + settings.reasoning_tokens
    answer_limit = settings.answer_tokens + settings.reasoning_tokens
    reply = min(assumed.reply_tokens or limit / 4, limit)
    sizes = {
        "question": float(QUESTION_TOKENS),
        "section": min(text / num_sections, settings.chunk_tokens),
        "memory": min(reply, settings.memory_tokens),
    }

    def call(template: str, reply: float, max_reply: int) -> PlannedCall:
        before, _, after = template.partition("{memory}")
        shared, own = (
            sum(size * part.count("{" + name + "}") for name, size in sizes.items())
            + len(part) / CHARS_PER_TOKEN
            for part in (before, after)
        )
        return PlannedCall(shared + TEMPLATE_TOKENS, own + sizes["memory"], reply, max_reply)

    prompts = open_prompts(settings.prompts)
    read = call(prompts.read, reply, limit)
    last = call(prompts.answer, min(64, answer_limit / 4), answer_limit)
    # the memory of the first section is empty, so the group shares its whole prompt
    first = replace(read, shared_tokens=read.prompt_tokens - sizes["memory"], own_tokens=0.0)
    return [first, *[read] * (num_sections - 1), last]


def _plain_calls(config: TrainConfig, assumed: PlanAssumptions) -> list[PlannedCall]:
    """The calls of another agent: its turns, as far as its settings name them."""
    settings = config.agent.settings
    turns = max(1, int(settings.get("max_turns", 1)) // 2)
    limit = int(settings.get("max_tokens", config.rollout.max_tokens))
    reply = min(assumed.reply_tokens or limit / 4, limit)
    text = text_tokens(config.tasks, assumed) if turns == 1 else 0.0
    first = PlannedCall(PLAIN_PROMPT_TOKENS + text, QUESTION_TOKENS, reply, limit)
    return [first, *[replace(first, shared_tokens=0.0)] * (turns - 1)]


def text_tokens(sources: Sequence[TaskSource], assumed: PlanAssumptions) -> float:
    """Mean tokens of the texts, by the weights of their sources."""
    if assumed.text_tokens is not None:
        return float(assumed.text_tokens)
    weighed = [(source.weight, length) for source in sources if (length := _length(source))]
    total = sum(weight for weight, _ in weighed)
    return sum(weight * length for weight, length in weighed) / total if weighed else 1024.0


def _length(source: TaskSource) -> float | None:
    """Mean tokens of the texts of a source; None if they are not known."""
    if source.docs is not None:
        return DOC_TOKENS * sum(source.docs) / len(source.docs)
    if source.tokens is not None:
        return sum(source.tokens) / len(source.tokens)
    manifests = [read_manifest(Path(file)) for file in source.files]
    means = [(one.get("tokens") or {}).get("mean") for one in manifests if one is not None]
    known = [float(mean) for mean in means if mean]
    return sum(known) / len(known) if known else None


# --- a use of GPUs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs are used: some train, some generate, or all do both in turn."""

    num_trainers: int = 1
    num_replicas: int = 1
    tensor_parallel: int = 1
    is_colocated: bool = True
    max_staleness: int = 0
    """0: synchronous."""

    @property
    def num_engine_gpus(self) -> int:
        return self.num_replicas * self.tensor_parallel

    @property
    def num_gpus(self) -> int:
        if self.is_colocated:
            return max(self.num_trainers, self.num_engine_gpus)
        return self.num_trainers + self.num_engine_gpus

    @property
    def is_single(self) -> bool:
        """One process that trains and generates."""
        return self.is_colocated and self.num_gpus == 1

    @property
    def changes(self) -> tuple[str, ...]:
        """The settings that make it."""
        placement = "colocated" if self.is_colocated else "separate"
        return (
            f"cluster.trainer_ranks={self.num_trainers}",
            f"cluster.engine_replicas={self.num_replicas}",
            f"cluster.tensor_parallel_size={self.tensor_parallel}",
            f"cluster.placement={placement}",
        )


def layout_of(config: TrainConfig) -> Layout:
    """The layout that a config names; one GPU without a cluster."""
    cluster, staleness = config.cluster, 0
    if config.rollout.asynchronous:
        staleness = config.objective.max_staleness or 0
    if cluster is None:
        return Layout(max_staleness=staleness)
    return Layout(
        num_trainers=cluster.trainer_ranks,
        num_replicas=cluster.engine_replicas,
        tensor_parallel=cluster.tensor_parallel_size,
        is_colocated=cluster.placement == "colocated",
        max_staleness=staleness,
    )


def resized(layout: Layout, num_gpus: int) -> Layout:
    """A layout in the same proportions on another number of GPUs."""
    size = min(layout.tensor_parallel, num_gpus)
    if layout.is_colocated or num_gpus == 1:
        return Layout(num_trainers=num_gpus, num_replicas=num_gpus // size, tensor_parallel=size)
    trainers = round(num_gpus * layout.num_trainers / layout.num_gpus)
    trainers = min(max(1, trainers), num_gpus - size)
    if trainers < 1:
        raise ConfigError(
            f"{num_gpus} GPUs are too few for a trainer and an engine of {size}; lower "
            "`cluster.tensor_parallel_size`"
        )
    replicas = (num_gpus - trainers) // size
    return replace(layout, num_trainers=trainers, num_replicas=replicas, tensor_parallel=size)


# --- a step ---------------------------------------------------------------------------------------

Place = Literal["trainer", "engine", "packs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the GPUs of a layout hold, and how long a step takes."""

    layout: Layout
    trainer: GpuMemory
    engine: GpuMemory
    max_rows: int
    """Rollouts that an engine replica has room for."""
    rollout_seconds: float
    scoring_seconds: float
    update_seconds: float
    publish_seconds: float
    step_seconds: float
    trainer_busy: float
    """Share of the step that the trainer computes."""
    engines_busy: float
    """Share of the step that the replicas generate."""


class Planner:
    """Memory and times of a config on one kind of GPU, in a layout."""

    def __init__(
        self,
        config: TrainConfig,
        gpu: Accelerator,
        assumed: PlanAssumptions | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.config, self.gpu, self.assumed = config, gpu, assumed or PlanAssumptions()
        self.layout = layout or layout_of(config)
        self.shape = model_shape(config.model)
        self.work = plan_workload(config, self.assumed)
        self.num_trained = num_trained(self.shape, config)
        self.is_merged = not config.has_adapter or config.rollout.merged is not False
        """Whether generation uses plain weights: no adapter, or a merged one."""

    def changed(self, changes: Sequence[str], layout: Layout | None = None) -> Planner:
        """The same with some settings changed."""
        values = {**self.config.model_dump(), "preset": None}
        config = parse_config(values, changes=changes)
        return Planner(config, self.gpu, self.assumed, layout or self.layout)

    # --- memory

    @cached_property
    def trainer(self) -> GpuMemory:
        """What a trainer rank holds."""
        replies = self.work.trained_rollouts * self.work.reply_tokens
        share = min(1.0, replies / self.work.computed_tokens)
        ranks = self.layout.num_trainers
        return trainer_memory(self.shape, self.config, num_ranks=ranks, loss_share=share)

    @cached_property
    def engine(self) -> GpuMemory:
        """What the GPU of an engine holds while it generates; its cache is no larger than needed."""
        resident = self.trainer if self.layout.is_colocated else GpuMemory()
        wanted = self.work.num_rollouts / self.layout.num_replicas * self.row_bytes
        has_trainer = self.layout.is_single
        free = self.gpu.gib * GIB * SLACK - resident.resident - self._engine_weights
        cache = min(max(0.0, cache_bytes(free, has_trainer=has_trainer)), wanted)
        return resident.generating_with(engine_weights=self._engine_weights, cache=cache)

    @property
    def _engine_weights(self) -> float:
        """A copy for generation; an engine in the trainer's process uses its weights, or merged ones."""
        has_copy = not self.layout.is_single or (self.config.has_adapter and self.is_merged)
        return self.shape.weight_bytes / self.layout.tensor_parallel if has_copy else 0.0

    @property
    def row_bytes(self) -> float:
        """Bytes of the cache that a rollout takes on one GPU of a replica."""
        return self.shape.kv_bytes / self.layout.tensor_parallel * self.work.row_context

    @property
    def max_rows(self) -> int:
        """Rollouts that the cache of a replica has room for."""
        return int(self.engine.cache / self.row_bytes + 1e-6)

    def misfits(self) -> Iterator[tuple[Place, float, float]]:
        """What does not fit: where, what it needs, and what there is."""
        usable = self.gpu.gib * GIB * SLACK
        kept = self.engine.cache + self._engine_weights if self.layout.is_single else 0.0
        if self.trainer.training + kept > usable:
            yield "trainer", self.trainer.training + kept, usable
        wanted = min(MIN_ROWS, math.ceil(self.work.num_rollouts / self.layout.num_replicas))
        if self.max_rows < wanted:
            cache = wanted * self.row_bytes / cache_bytes(1.0, has_trainer=self.layout.is_single)
            resident = self.trainer.resident if self.layout.is_colocated else OVERHEAD
            yield "engine", resident + self._engine_weights + cache, usable
        if self.work.longest_row > self.config.update.max_tokens:
            yield "packs", self.work.longest_row, self.config.update.max_tokens

    # --- seconds

    def plan(self) -> StepPlan:
        """Memory and times of a step. What does not fit is timed as if it did."""
        rows = max(MIN_ROWS, self.max_rows)
        update, scoring = self.update_seconds(self.work), self._scoring_seconds()
        rollout, publish = self.rollout_seconds(rows), self._publish_seconds()
        training = update + scoring
        if staleness := self.layout.max_staleness:
            rollout = self.flowing_seconds(rows, staleness)
            step = max(training, rollout) + publish
        else:
            step = rollout + training + publish
        return StepPlan(
            layout=self.layout,
            trainer=self.trainer,
            engine=self.engine,
            max_rows=self.max_rows,
            rollout_seconds=rollout,
            scoring_seconds=scoring,
            update_seconds=update,
            publish_seconds=publish,
            step_seconds=step,
            trainer_busy=training / step,
            engines_busy=min(1.0, rollout / step),
        )

    def rollout_seconds(self, max_rows: int) -> float:
        """All rollouts of a step, from the first call to the end of the longest."""
        work = self.work
        rollouts = work.num_rollouts / self.layout.num_replicas
        tokens = rollouts * work.reply_tokens
        decoding_steps = max(work.longest_rollout, tokens / min(max_rows, rollouts))
        seconds = self._prefill_seconds() + decoding_steps * self._decode_seconds()
        return seconds + tokens * self._row_seconds() + self._host_seconds() / 2

    def flowing_seconds(self, max_rows: int, staleness: int) -> float:
        """As many rollouts where the next ones start before these have ended."""
        work = self.work
        rollouts = work.num_rollouts / self.layout.num_replicas
        at_once = min(max_rows, rollouts * (1 + staleness))
        token = self._decode_seconds() / at_once + self._row_seconds()
        generating = self._prefill_seconds() + rollouts * work.reply_tokens * token
        longest = work.longest_rollout * (self._decode_seconds() + at_once * self._row_seconds())
        return max(generating, longest / (1 + staleness), self._host_seconds())

    def _prefill_seconds(self) -> float:
        """Prompts of the rollouts of a replica."""
        flops = traffic = 0.0
        rollouts = self.work.num_rollouts / self.layout.num_replicas
        for call in self.work.calls:
            shared = rollouts / self.work.group_size * call.shared_tokens
            own = rollouts * call.own_tokens
            flops += shared * self._token_flops(call.shared_tokens / 2)
            flops += own * self._token_flops(call.shared_tokens + call.own_tokens / 2)
            traffic += shared + own
        moved = traffic * TRAFFIC * FORWARD_SHARE * COMPILED_TRAFFIC * self._traffic_width
        seconds = flops / self._peak + moved / self.gpu.bandwidth
        return seconds / self.layout.tensor_parallel

    def _decode_seconds(self) -> float:
        """A decoding step, whatever is in it."""
        layer = LAYER_SECONDS + (0.0 if self.is_merged else ADAPTER_LAYER_SECONDS)
        size = self.layout.tensor_parallel
        weights = self.shape.weight_bytes / WEIGHT_BANDWIDTH / self.gpu.bandwidth / size
        return self.shape.num_layers * layer * (1 + 0.25 * math.log2(size)) + weights

    def _row_seconds(self) -> float:
        """What a rollout adds to a decoding step."""
        output = self.shape.vocab_size * self.shape.hidden_size
        products = 2 * (self.shape.layer_parameters + output)
        cached = self.shape.kv_bytes * self.work.row_context / CACHE_BANDWIDTH
        seconds = products / self._peak + cached / self.gpu.bandwidth
        return seconds / self.layout.tensor_parallel

    def _host_seconds(self) -> float:
        """The driver's, for all calls of a step."""
        call = HOST_SECONDS if self.layout.is_single else CLUSTER_HOST_SECONDS
        return self.work.num_calls * call

    def update_seconds(self, work: Workload, updates: int | None = None) -> float:
        """Optimizer steps on the rows of some work."""
        again = 1.0 if self.config.update.checkpointing else 0.0
        backward = 1.0 if self.config.has_adapter else 2.0
        updates = updates or self.config.update.updates
        cluster = self.config.cluster
        is_offloaded = cluster is not None and cluster.offload
        bandwidth = HOST_LINK / 2 if is_offloaded else self.gpu.bandwidth
        optimizer = OPTIMIZER_BYTES * self.num_trained / self.layout.num_trainers / bandwidth
        return updates * (UPDATE_SECONDS + optimizer) + self._pass_seconds(
            work,
            weights=1 + again + backward,
            attention=1 + again + 2.5,
            traffic=1 + again * FORWARD_SHARE,
            updates=updates,
        )

    def _scoring_seconds(self) -> float:
        """Passes without gradient: old log-probabilities, reference."""
        objective, updates = self.config.objective, self.config.update.updates
        is_masked = objective.mask is not None and updates > 1
        is_recomputed = objective.old_logprobs == "recompute" or is_masked
        num_passes = int(is_recomputed) + int(objective.kl_coef > 0)
        return num_passes * self._pass_seconds(
            self.work, weights=1, attention=1, traffic=FORWARD_SHARE, updates=updates
        )

    def _pass_seconds(
        self, work: Workload, *, weights: float, attention: float, traffic: float, updates: int
    ) -> float:
        """The tokens of an update through the model, in multiples of a forward pass, and of an update's traffic.

        Packs are shared out over the ranks; the last round waits for the longest, and FSDP gathers beside it.
        """
        ranks, tokens = self.layout.num_trainers, work.computed_tokens
        products = weights * 2 * self.shape.layer_parameters * tokens
        seen = attention * sum(
            num * self._attention_flops(seen) for num, seen in work.update_parts()
        )
        left = COMPILED_TRAFFIC if self.config.update.compiled else 1.0
        moved = TRAFFIC * left * traffic * tokens * self._traffic_width
        seconds = (products + seen) / self._peak + moved / self.gpu.bandwidth
        packs = max(tokens / self.config.update.max_tokens, updates)
        rounds = updates * math.ceil(packs / updates / ranks)
        has_gradients = traffic >= 1
        gathered = self.shape.weight_bytes * (2 if has_gradients else 1)
        gathered += GRADIENT_BYTES * self.num_trained if has_gradients else 0
        link = self._link if ranks <= GPUS_PER_NODE else NETWORK_GB_S * 1e9
        gathering = rounds * gathered * (1 - 1 / ranks) / (link * LINK_SHARE)
        return max(seconds / ranks, rounds * seconds / packs, gathering)

    def _publish_seconds(self) -> float:
        """New weights to the engines."""
        if self.layout.is_single:
            return 0.1 if self.config.has_adapter and self.is_merged else 0.0
        link = self._link if self.layout.is_colocated else NETWORK_GB_S * 1e9
        num_bytes = min(BF16 * self.num_trained, self.shape.weight_bytes)
        return PAUSE_SECONDS + num_bytes / (link * LINK_SHARE)

    def _token_flops(self, seen: float) -> float:
        return 2 * self.shape.layer_parameters + self._attention_flops(seen)

    def _attention_flops(self, seen: float) -> float:
        return 4 * self.shape.num_layers * self.shape.attention_size * seen

    @property
    def _traffic_width(self) -> int:
        """What operations between matrix products read and write is in proportion to it."""
        return self.shape.num_layers * (4 * self.shape.hidden_size + 2 * self.shape.ffn_size)

    @property
    def _peak(self) -> float:
        """Arithmetic a second in products of this model."""
        width = self.shape.hidden_size
        return self.gpu.flops * PEAK * width / (width + HALF_WIDTH)

    @property
    def _link(self) -> float:
        return self.gpu.link_gb_s * 1e9


# --- what fits, and what is best ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that does not fit."""

    place: Place
    needs: float
    """Bytes of a GPU, or tokens of a pack."""
    has: float
    changes: tuple[str, ...]
    """Settings that make it fit; empty if none were found."""


def find_problems(planner: Planner) -> list[Problem]:
    """What does not fit, each with the first change that makes it fit."""
    found = []
    for place, needs, has in planner.misfits():
        changes = next((one for one in remedies(planner, place) if _fits(planner, one, place)), ())
        found.append(Problem(place=place, needs=needs, has=has, changes=changes))
    return found


def _fits(planner: Planner, changes: Sequence[str], place: Place) -> bool:
    changed = planner.changed(changes)
    if any(change.startswith("cluster.") for change in changes):
        changed = planner.changed(changes, layout_of(changed.config))
    return all(where != place for where, _, _ in changed.misfits())


def remedies(planner: Planner, place: Place) -> Iterator[tuple[str, ...]]:
    """Changes that may help, the least costly first: shorter packs, checkpointing, offloading, more GPUs."""
    config, layout = planner.config, planner.layout
    longest = 1 << (int(planner.work.longest_row) - 1).bit_length()
    if place == "packs":
        yield (f"update.max_tokens={longest}",)
        return
    if place == "trainer" or layout.is_single:
        if 2 * longest <= config.update.max_tokens:
            yield (f"update.max_tokens={config.update.max_tokens // 2}",)
        yield ("update.checkpointing=true",)
        if longest < config.update.max_tokens:
            yield (f"update.max_tokens={longest}", "update.checkpointing=true")
    if place == "trainer" and not layout.is_single:
        yield ("cluster.offload=true",)
    for factor in (2, 4, 8, 16, 32, 64):
        if layout.is_colocated:
            yield resized(layout, factor * layout.num_gpus).changes
        elif place == "trainer":
            yield (f"cluster.trainer_ranks={factor * layout.num_trainers}",)
        elif config.rollout.engine is not None and factor * layout.tensor_parallel <= GPUS_PER_NODE:
            yield (f"cluster.tensor_parallel_size={factor * layout.tensor_parallel}",)
    if not config.has_adapter:
        yield ("model.lora_rank=32", "optim.lr=1e-5")


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """All of it."""

    gpu: Accelerator
    shape: ModelShape
    num_trained: float
    workload: Workload
    steps: int
    chosen: StepPlan
    """The layout of the config."""
    problems: tuple[Problem, ...]
    warm_start_seconds: float
    validation_seconds: float
    """All validations of the run together."""
    checkpoint_seconds: float
    """All checkpoints."""
    price: float | None
    """The price of a GPU for an hour."""

    @property
    def run_seconds(self) -> float:
        """Seconds of the whole run."""
        steps = self.steps * self.chosen.step_seconds
        return steps + self.warm_start_seconds + self.validation_seconds + self.checkpoint_seconds

    @property
    def gpu_hours(self) -> float:
        return self.chosen.layout.num_gpus * self.run_seconds / 3600

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self) | {
            "run_seconds": self.run_seconds,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
        }


def make_plan(
    config: TrainConfig,
    *,
    gpu: str = "H200",
    num_gpus: int | None = None,
    price: float | None = None,
    assumed: PlanAssumptions | None = None,
) -> TrainingPlan:
    """The plan of a config on some GPUs; by default those that it names itself, or one."""
    if config.steps == 0:
        raise ConfigError("`steps=0`: the plan is for reinforcement learning; set `steps`")
    layout = layout_of(config)
    if num_gpus not in (None, layout.num_gpus):
        layout = resized(layout, num_gpus)
    planner = Planner(config, find_accelerator(gpu), assumed, layout)
    chosen = planner.plan()
    nodes = math.ceil(layout.num_gpus / GPUS_PER_NODE)
    checkpoints = math.ceil(config.steps / config.checkpoint.every)
    return TrainingPlan(
        gpu=planner.gpu,
        shape=planner.shape,
        num_trained=planner.num_trained,
        workload=planner.work,
        steps=config.steps,
        chosen=chosen,
        problems=tuple(find_problems(planner)),
        warm_start_seconds=_warm_start_seconds(planner),
        validation_seconds=_validation_seconds(config, chosen),
        checkpoint_seconds=checkpoints
        * CHECKPOINT_BYTES
        * planner.num_trained
        / nodes
        / DISK_BANDWIDTH,
        price=price,
    )


def _warm_start_seconds(planner: Planner) -> float:
    """Supervised steps before the first: rows of the same lengths, nothing shared."""
    warm = planner.config.warm_start
    if warm is None:
        return 0.0
    batch = replace(planner.work, prompts=warm.batch, group_size=1, is_sharing=False)
    batch = replace(batch, trained_share=1.0)
    return warm.steps * planner.update_seconds(batch, updates=1)


def _validation_seconds(config: TrainConfig, chosen: StepPlan) -> float:
    """Rollouts of all validations, at the speed of the rollouts of a step."""
    validation = config.validation
    if validation is None:
        return 0.0
    num_sets = sum(
        max(1, len(source.tasks) + len(source.files)) * len(source.lengths)
        for source in validation.tasks
    )
    rollouts = validation.num * num_sets * validation.samples
    share = rollouts / (config.rollout.prompts * config.rollout.group_size)
    return (1 + math.ceil(config.steps / validation.every)) * share * chosen.rollout_seconds
