"""The plan of a run: what it holds, how long it takes, what it costs, what would be better.

plan = make_plan(read_config("paper_7b"), gpu="H100", num_gpus=32, price=2.5)
plan.chosen.step_seconds, plan.run_seconds, plan.cost
plan.best                   the best split between training and rollouts
plan.problems               what does not fit, each with the smallest change that makes it fit
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from memagent.errors import ConfigError
from memagent.rl.planning.accelerators import Accelerator, find_accelerator
from memagent.rl.planning.layouts import Layout, candidate_layouts, colocated, layout_of
from memagent.rl.planning.memory import (
    MIN_ROWS,
    OVERHEAD,
    SLACK,
    GpuMemory,
    TrainerMemory,
    longest_row,
    row_context,
)
from memagent.rl.planning.rates import MEASURED, Rates
from memagent.rl.planning.shapes import ModelShape, model_shape
from memagent.rl.planning.simulation import Schedule, Simulated, SimulatedCall, simulate
from memagent.rl.planning.times import EngineTimes, TrainerTimes, num_scored, publish_seconds
from memagent.rl.planning.workload import PlanAssumptions, Workload, plan_workload
from memagent.rl.settings import TrainConfig, parse_config

HOUR = 3600.0
ADAPTER_RANK = 16
"""Rank of an adapter whose folder is not read."""
CHECKPOINT_BYTES = 14
"""On disk for each trained parameter: weights, masters and moments."""
ROUNDING = 1e-6
"""Of a rollout: a cache of exactly its size has room for it."""
SYNC_STEPS = 4
ASYNC_STEPS = 10
"""Steps that are simulated."""
SEARCHED = 3
"""Layouts that are simulated, of those that are estimated to be best."""

ProblemPlace = Literal["trainer", "engine", "packs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """One layout: what its GPUs hold, and how a step goes."""

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
    simulated: Simulated
    mfu: float
    """Useful arithmetic of a step, as a share of what all GPUs could do in its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that does not fit."""

    place: ProblemPlace
    needs: float
    """Bytes of a GPU, or tokens of a pack."""
    has: float
    changes: tuple[str, ...]
    """The smallest change that makes it fit, as settings; empty if none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """All of it."""

    gpu: Accelerator
    shape: ModelShape
    num_trained: float
    workload: Workload
    step_flops: float
    steps: int
    chosen: LayoutPlan
    """The layout of the config."""
    best: LayoutPlan | None
    """The fastest layout of as many GPUs; None if none fits."""
    scaled: tuple[LayoutPlan, ...]
    """The fastest layouts of more GPUs, if asked for."""
    problems: tuple[Problem, ...]
    warm_start_seconds: float
    validation_seconds: float
    """All validations of the run together."""
    checkpoint_seconds: float
    """All checkpoints."""
    price: float | None
    """Of a GPU for an hour."""
    assumptions: tuple[str, ...]

    @property
    def run_seconds(self) -> float:
        """Of the whole run."""
        steps = self.steps * self.chosen.step_seconds
        return steps + self.warm_start_seconds + self.validation_seconds + self.checkpoint_seconds

    @property
    def gpu_hours(self) -> float:
        return self.chosen.layout.num_gpus * self.run_seconds / HOUR

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.price * self.gpu_hours

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        values = asdict(self)
        values["run_seconds"] = self.run_seconds
        values["gpu_hours"] = self.gpu_hours
        values["cost"] = self.cost
        for name, one in (("chosen", self.chosen), ("best", self.best)):
            if one is not None:
                values[name]["trainer"]["together"] = one.trainer.training
                values[name]["engine"]["together"] = one.engine.generating
        values["tokens"] = {
            "prompts": self.workload.prompt_tokens,
            "replies": self.workload.reply_tokens,
            "prompts_computed": self.workload.prefill_tokens,
            "trained": self.workload.trained_tokens,
            "trained_computed": self.workload.computed_tokens,
            "calls": self.workload.num_calls,
        }
        return values


def make_plan(
    config: TrainConfig,
    *,
    gpu: str = "H200",
    num_gpus: int | None = None,
    price: float | None = None,
    max_gpus: int | None = None,
    assumed: PlanAssumptions | None = None,
    rates: Rates = MEASURED,
) -> TrainingPlan:
    """The plan of a config on some GPUs; by default those that it names itself, or one.

    With `max_gpus`, the best layouts of more GPUs are found too.
    """
    if config.steps == 0:
        raise ConfigError("`steps=0`: the plan is for reinforcement learning; set `steps`")
    planner = Planner(
        config=config,
        gpu=find_accelerator(gpu),
        assumed=assumed or PlanAssumptions(),
        rates=rates,
    )
    layout = layout_of(config, num_gpus)
    chosen = planner.plan_layout(layout)
    return TrainingPlan(
        gpu=planner.gpu,
        shape=planner.shape,
        num_trained=planner.num_trained,
        workload=planner.workload,
        step_flops=planner.trainer_times().step_flops(planner.workload),
        steps=config.steps,
        chosen=chosen,
        best=best_layout(planner, layout),
        scaled=tuple(scaling(planner, layout, max_gpus or 0)),
        problems=tuple(find_problems(planner, layout)),
        warm_start_seconds=_warm_start_seconds(planner, layout),
        validation_seconds=_validation_seconds(config, chosen),
        checkpoint_seconds=_checkpoint_seconds(planner, layout),
        price=price,
        assumptions=tuple(_assumptions(planner)),
    )


class Planner:
    """Sizes and times of a config on one kind of GPU, for any layout."""

    def __init__(
        self, *, config: TrainConfig, gpu: Accelerator, assumed: PlanAssumptions, rates: Rates
    ) -> None:
        self.config, self.gpu, self.assumed, self.rates = config, gpu, assumed, rates
        self.shape = model_shape(config.model)
        self.workload = plan_workload(config, assumed)
        self.num_trained = float(self.shape.num_parameters)
        if config.has_adapter:
            self.num_trained = self.shape.lora_parameters(config.model.lora_rank or ADAPTER_RANK)

    def changed(self, changes: Sequence[str]) -> Planner:
        """The same with some settings changed."""
        values = {**self.config.model_dump(), "preset": None}
        config = parse_config(values, changes=changes)
        return Planner(config=config, gpu=self.gpu, assumed=self.assumed, rates=self.rates)

    def trainer_times(self, *, offload: bool = False) -> TrainerTimes:
        config = self.config
        return TrainerTimes(
            shape=self.shape,
            gpu=self.gpu,
            num_trained=self.num_trained,
            has_adapter=config.has_adapter,
            checkpointing=config.update.checkpointing,
            compiled=config.update.compiled,
            num_updates=config.update.updates,
            num_scored=num_scored(config),
            max_tokens=config.update.max_tokens,
            offload=offload,
            rates=self.rates,
        )

    @property
    def is_merged(self) -> bool:
        """Whether generation uses plain weights: no adapter, or a merged one."""
        return not self.config.has_adapter or self.config.rollout.merged is not False

    @property
    def has_copy(self) -> bool:
        """Whether the engine of a single process has its own copy of the weights."""
        return self.config.has_adapter and self.is_merged

    def trainer_memory(self, layout: Layout) -> GpuMemory:
        """What a trainer rank holds."""
        config = self.config
        memory = TrainerMemory(
            shape=self.shape,
            num_trained=self.num_trained,
            has_reference=config.objective.kl_coef > 0 and not config.has_adapter,
            max_tokens=config.update.max_tokens,
            checkpointing=config.update.checkpointing,
            offload_optimizer=layout.offload_optimizer,
            offload_reference=layout.offload_reference,
        )
        return memory.of_rank(self.workload, layout.num_trainers)

    def engine_memory(self, layout: Layout, trainer: GpuMemory) -> GpuMemory:
        """What the GPU of an engine holds while it generates; its cache is no larger than needed."""
        resident = trainer if layout.is_colocated else GpuMemory()
        base = replace(resident, activations=0.0, logits=0.0, gathered=0.0)
        rows = self.workload.num_rollouts / layout.num_replicas
        wanted = rows * self.row_bytes(layout)
        return replace(
            base,
            engine_weights=self._engine_weights(layout),
            cache=min(self.engine_room(layout, trainer), wanted),
        )

    def engine_room(self, layout: Layout, trainer: GpuMemory) -> float:
        """Bytes that are left for the cache of an engine; below 0 if its weights do not fit.

        In a single process the cache stays while the trainer computes; on a cluster engines sleep then.
        """
        taken = float(OVERHEAD)
        if layout.is_colocated:
            taken = trainer.training if layout.is_single else trainer.resident
        return self.gpu.memory * SLACK - taken - self._engine_weights(layout)

    def row_bytes(self, layout: Layout) -> float:
        """Of the cache that a rollout takes on one GPU of a replica."""
        return self.shape.kv_bytes / layout.tensor_parallel * row_context(self.workload)

    def rows_at_once(self, layout: Layout, engine: GpuMemory) -> int:
        """Rollouts that the cache of a replica has room for."""
        return max(0, int(engine.cache / self.row_bytes(layout) + ROUNDING))

    def _engine_weights(self, layout: Layout) -> float:
        """A copy for generation; an engine in the trainer's process uses its weights."""
        has_copy = self.has_copy or not layout.is_single
        return self.shape.weight_bytes / layout.tensor_parallel if has_copy else 0.0

    def plan_layout(self, layout: Layout, *, num_steps: int | None = None) -> LayoutPlan:
        """Memory and times of a layout. One that does not fit is timed as if it did."""
        trainer = self.trainer_memory(layout)
        engine = self.engine_memory(layout, trainer)
        rows = self.rows_at_once(layout, engine)
        times = self.trainer_times(offload=layout.offload_optimizer)
        update = times.update_seconds(self.workload, layout.num_trainers)
        scoring = times.scoring_seconds(self.workload, layout.num_trainers)
        publish = self._publish_seconds(layout)
        schedule = self._schedule(layout, max_rows=max(MIN_ROWS, rows))
        schedule = replace(schedule, train_seconds=update + scoring, publish_seconds=publish)
        steps = num_steps or (ASYNC_STEPS if layout.max_staleness else SYNC_STEPS)
        simulated = simulate(schedule, num_steps=steps)
        peak = self.gpu.flops * layout.num_gpus * simulated.step_seconds
        return LayoutPlan(
            layout=layout,
            trainer=trainer,
            engine=engine,
            max_rows=rows,
            rollout_seconds=simulated.rollout_seconds,
            scoring_seconds=scoring,
            update_seconds=update,
            publish_seconds=publish,
            step_seconds=simulated.step_seconds,
            simulated=simulated,
            mfu=times.step_flops(self.workload) / peak,
        )

    def estimated_seconds(self, layout: Layout) -> float:
        """A step without waiting: a bound by which layouts are compared before they are simulated."""
        times = self.trainer_times(offload=layout.offload_optimizer)
        training = times.update_seconds(self.workload, layout.num_trainers)
        training += times.scoring_seconds(self.workload, layout.num_trainers)
        schedule = self._schedule(layout, max_rows=1)
        rollouts = self.workload.num_rollouts / layout.num_replicas
        prompts = sum(
            call.own_seconds + call.shared_seconds / schedule.group_size for call in schedule.calls
        )
        rows = min(rollouts, 256)
        token = schedule.step_seconds / rows + schedule.row_seconds
        generating = rollouts * (prompts + token * self.workload.rollout_reply_tokens)
        return max(training, generating) if layout.max_staleness else training + generating

    def _publish_seconds(self, layout: Layout) -> float:
        if layout.is_single:
            return 0.1 if self.has_copy else 0.0
        cluster = self.config.cluster
        return publish_seconds(
            self.shape,
            self.gpu,
            is_colocated=layout.is_colocated,
            is_direct=cluster is None or cluster.weight_transfer != "object_store",
            num_trained=self.num_trained,
            rates=self.rates,
        )

    def _schedule(self, layout: Layout, *, max_rows: int) -> Schedule:
        """The schedule without the trainer's times."""
        engine = EngineTimes(
            shape=self.shape,
            gpu=self.gpu,
            tensor_parallel=layout.tensor_parallel,
            is_merged=self.is_merged,
            rates=self.rates,
        )
        workload, assumed = self.workload, self.assumed
        calls = tuple(
            SimulatedCall(
                shared_seconds=engine.prefill_seconds(call.shared_tokens, call.shared_tokens / 2),
                own_seconds=engine.prefill_seconds(
                    call.own_tokens, call.shared_tokens + call.own_tokens / 2
                ),
                reply_tokens=call.reply_tokens,
                max_reply=call.max_reply,
            )
            for call in workload.calls
        )
        return Schedule(
            calls=calls,
            prompts=round(workload.prompts * workload.extra_groups),
            group_size=workload.group_size,
            num_replicas=layout.num_replicas,
            max_rows=max_rows,
            step_seconds=engine.step_seconds,
            row_seconds=engine.row_seconds(row_context(workload)),
            train_seconds=0.0,
            publish_seconds=0.0,
            host_seconds=(
                self.rates.host_seconds if layout.is_single else self.rates.cluster_host_seconds
            ),
            max_staleness=layout.max_staleness,
            sigma=assumed.reply_sigma,
            correlation=assumed.reply_correlation,
            seed=self.config.seed,
        )


# --- what fits, and what is best ------------------------------------------------------------------


def misfits(planner: Planner, layout: Layout) -> list[tuple[ProblemPlace, float, float]]:
    """What does not fit: where, what it needs, and what there is."""
    found: list[tuple[ProblemPlace, float, float]] = []
    usable = planner.gpu.memory * SLACK
    trainer = planner.trainer_memory(layout)
    engine = planner.engine_memory(layout, trainer)
    if trainer.training > usable:
        found.append(("trainer", trainer.training, usable))
    wanted = min(MIN_ROWS, math.ceil(planner.workload.num_rollouts / layout.num_replicas))
    if planner.rows_at_once(layout, engine) < wanted:
        least = wanted * planner.row_bytes(layout)
        found.append(("engine", usable - planner.engine_room(layout, trainer) + least, usable))
    row = longest_row(planner.workload)
    if row > planner.config.update.max_tokens:
        found.append(("packs", row, planner.config.update.max_tokens))
    return found


def find_problems(planner: Planner, layout: Layout) -> list[Problem]:
    """What does not fit, each with the smallest change that makes it fit."""
    return [
        Problem(
            place=place,
            needs=needs,
            has=has,
            changes=tuple(smallest_change(planner, layout, place)),
        )
        for place, needs, has in misfits(planner, layout)
    ]


def smallest_change(planner: Planner, layout: Layout, place: ProblemPlace) -> list[str]:
    """The least change of settings or GPUs after which `place` fits; empty if there is none here."""

    def fits(changes: Sequence[str], other: Layout) -> bool:
        changed = planner.changed(changes)
        return all(where != place for where, _, _ in misfits(changed, other))

    if place == "packs":
        return [f"update.max_tokens={_rounded_up(longest_row(planner.workload))}"]
    done: list[str] = []
    for change in _setting_changes(planner, layout, place):
        if fits([change], layout):
            return [change]
    for change in _setting_changes(planner, layout, place):
        if not any(change.partition("=")[0] == one.partition("=")[0] for one in done):
            done.append(change)
            if fits(done, layout):
                return done
    for changes, other in layout.larger(place):
        if fits([], other):
            return [*_engine_changes(planner.config, other), *changes]
    if not planner.config.has_adapter and fits(["model.lora_rank=32"], layout):
        return ["model.lora_rank=32", "optim.lr=1e-5"]
    return []


def _engine_changes(config: TrainConfig, layout: Layout) -> list[str]:
    """What replicas of several GPUs need: vLLM."""
    if layout.tensor_parallel == 1 or config.rollout.engine is not None:
        return []
    return [f"rollout.engine=vllm:{config.model.source or 'MODEL'}"]


def _setting_changes(planner: Planner, layout: Layout, place: ProblemPlace) -> list[str]:
    """Settings that take less memory, the least costly first."""
    if place == "engine" and not layout.is_single:
        return []
    update = planner.config.update
    changes = [] if update.checkpointing else ["update.checkpointing=true"]
    smaller, least = update.max_tokens // 2, longest_row(planner.workload)
    sizes = []
    while smaller >= least:
        sizes.append(f"update.max_tokens={smaller}")
        smaller //= 2
    return [*sizes[:1], *changes, *reversed(sizes[1:])]


def _rounded_up(tokens: float) -> int:
    """A power of two."""
    return 1 << (int(tokens) - 1).bit_length()


def best_layout(planner: Planner, layout: Layout) -> LayoutPlan | None:
    """The fastest layout of as many GPUs that fits."""
    fitting = [
        one
        for one in candidate_layouts(layout)
        if not [place for place, _, _ in misfits(planner, one) if place != "packs"]
    ]
    ranked = sorted(fitting, key=planner.estimated_seconds)[:SEARCHED]
    plans = [planner.plan_layout(one) for one in ranked]
    return min(plans, key=lambda plan: plan.step_seconds, default=None)


def scaling(planner: Planner, layout: Layout, max_gpus: int) -> list[LayoutPlan]:
    """The best layouts of 2, 4, 8 ... times as many GPUs, up to a number."""
    found, num_gpus = [], 2 * layout.num_gpus
    while num_gpus <= max_gpus:
        best = best_layout(planner, colocated(num_gpus))
        if best is not None:
            found.append(best)
        num_gpus *= 2
    return found


# --- around the steps -----------------------------------------------------------------------------


def _warm_start_seconds(planner: Planner, layout: Layout) -> float:
    """Supervised steps before the first: rows of the same lengths, nothing shared."""
    warm = planner.config.warm_start
    if warm is None:
        return 0.0
    workload = replace(
        planner.workload, prompts=warm.batch, group_size=1, trained_share=1.0, is_sharing=False
    )
    times = replace(planner.trainer_times(offload=layout.offload_optimizer), num_updates=1)
    return warm.steps * times.update_seconds(workload, layout.num_trainers)


def _validation_seconds(config: TrainConfig, chosen: LayoutPlan) -> float:
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
    times = 1 + -(-config.steps // validation.every)
    return times * share * chosen.rollout_seconds


def _checkpoint_seconds(planner: Planner, layout: Layout) -> float:
    num = -(-planner.config.steps // planner.config.checkpoint.every)
    num_bytes = CHECKPOINT_BYTES * planner.num_trained
    return num * num_bytes / layout.num_nodes / planner.rates.disk_bandwidth


def _assumptions(planner: Planner) -> list[str]:
    """What the plan rests on besides the config."""
    workload, assumed = planner.workload, planner.assumed
    reads = workload.calls[0]
    lines = [
        f"{len(workload.calls)} calls a rollout, {workload.rollout_prompt_tokens:,.0f} tokens of prompts, "
        f"{workload.rollout_reply_tokens:,.0f} of replies",
        f"replies of {reads.reply_tokens:,.0f} tokens on average, at most {reads.max_reply:,}, skewed "
        f"(sigma {assumed.reply_sigma:g})",
    ]
    if workload.trained_share < 1:
        lines.append(f"{workload.trained_share:.0%} of the groups have a signal and are trained on")
    lines += [
        "rates of the trainer and the engine as measured on one H200 at 135M and 1.5B, carried over by "
        "arithmetic and bandwidth of the data sheets",
        f"links between nodes of {planner.gpu.network / 1e9:,.0f} GB/s for each GPU, "
        f"{planner.rates.link_share:.0%} of it used",
    ]
    return lines
