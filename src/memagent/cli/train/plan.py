"""`memagent plan CONFIG`: what a training run needs and takes, before anything is rented."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from memagent.cli.shared.options import PanelCommand, panel_option, settings_options, taking
from memagent.cli.shared.progress import duration
from memagent.cli.shared.run_command import print_json
from memagent.cli.train.options import CONFIG
from memagent.rl.planning.accelerators import ACCELERATORS, GIB
from memagent.rl.planning.layouts import Layout
from memagent.rl.planning.memory import GpuMemory
from memagent.rl.planning.plan import LayoutPlan, Problem, TrainingPlan, make_plan
from memagent.rl.planning.workload import PlanAssumptions
from memagent.rl.settings import MOST_GPUS, read_config

GPUS = "GPUs"
ASSUMPTIONS = "Assumptions"
"""Headings of the help."""
DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the options were given."""

    config: Path
    model: str | None
    changes: tuple[str, ...]
    gpu: str
    gpus: int | None
    price: float | None
    scale_to: int | None
    assumed: Annotated[dict[str, Any], PlanAssumptions]
    as_json: bool


@click.command("plan", cls=PanelCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@panel_option("--model", panel=CONFIG, help="Model in place of the config's.")
@panel_option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    panel=CONFIG,
    help="Any setting of the config, such as rollout.prompts=64; may be given several times.",
)
@panel_option(
    "--gpu",
    default="H200",
    show_default=True,
    panel=GPUS,
    help=f"Kind of GPU: {', '.join(ACCELERATORS)}.",
)
@panel_option(
    "--gpus",
    type=click.IntRange(min=1, max=MOST_GPUS),
    panel=GPUS,
    help="Number of GPUs. [default: as many as [cluster] of the config names, else 1]",
)
@panel_option(
    "--price",
    type=click.FloatRange(min=0),
    panel=GPUS,
    help="Price of a GPU for an hour, in any currency; the cost of the run follows.",
)
@panel_option(
    "--scale-to",
    type=click.IntRange(min=1, max=MOST_GPUS),
    panel=GPUS,
    help="Also show the best split of 2, 4, 8 ... times as many GPUs, up to this number.",
)
@settings_options(PlanAssumptions, panel=ASSUMPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@taking(PlanOptions)
def command(options: PlanOptions) -> int:
    """Plan a training run: memory, tokens, time, cost, and how to split GPUs.

    \b
      memagent plan paper_7b --gpu H100 --price 2.50
      memagent plan my_run.toml --gpu A100 --gpus 8
      memagent plan my_run.toml --set update.checkpointing=true --json

    Nothing is loaded and no GPU is needed: sizes come from the model's config.json or its name, rates from
    measurements on one H200, and the schedule of rollouts and updates is simulated. CONFIG is a TOML file, or the
    name of a config that comes with memagent. Exit code 1: the run does not fit.
    """
    changes = list(options.changes)
    if options.model is not None:
        changes.insert(0, f'model.source="{options.model}"')
    plan = make_plan(
        read_config(options.config, changes=changes),
        gpu=options.gpu,
        num_gpus=options.gpus,
        price=options.price,
        max_gpus=options.scale_to,
        assumed=PlanAssumptions.parse(options.assumed),
    )
    if options.as_json:
        print_json(plan.as_json())
    else:
        click.echo("\n".join(plan_lines(plan)))
    return 1 if plan.problems else 0


def plan_lines(plan: TrainingPlan) -> list[str]:
    """The plan as text."""
    return [
        *_heading(plan),
        "",
        *_memory(plan),
        "",
        *_step(plan),
        "",
        *_run(plan),
        *_problems(plan.problems),
        *_best(plan),
        *_scaling(plan),
        "",
        "assumed: " + "; ".join(plan.assumptions),
    ]


def _heading(plan: TrainingPlan) -> list[str]:
    what = "all" if plan.num_trained == plan.shape.num_parameters else _large(plan.num_trained)
    return [
        f"model: {_large(plan.shape.num_parameters)} parameters, {what} trained",
        f"GPUs: {plan.chosen.layout.num_gpus} x {plan.gpu.name}, {_layout(plan.chosen.layout)}",
    ]


def _layout(layout: Layout) -> str:
    replicas = f"{layout.num_replicas} engine replicas"
    if layout.tensor_parallel > 1:
        replicas += f" of {layout.tensor_parallel} GPUs, with vLLM"
    if layout.is_single:
        return "which trains and generates in turn"
    if layout.is_colocated:
        return f"all train ({layout.num_trainers} ranks) and generate ({replicas}) in turn"
    how = f"staleness up to {layout.max_staleness}" if layout.max_staleness else "synchronous"
    return f"{layout.num_trainers} train, {layout.num_engine_gpus} generate ({replicas}), {how}"


PARTS = (
    ("weights", "weights"),
    ("reference", "reference weights"),
    ("masters", "float32 weights"),
    ("gradients", "gradients"),
    ("moments", "optimizer"),
    ("gathered", "gathered layers"),
    ("activations", "activations"),
    ("logits", "logits"),
    ("engine_weights", "weights of the engine"),
    ("cache", "KV cache"),
    ("overhead", "driver and libraries"),
)
TRAINING_ONLY = ("gathered", "activations", "logits")
GENERATING_ONLY = ("engine_weights", "cache")


def _memory(plan: TrainingPlan) -> list[str]:
    trainer, engine = plan.chosen.trainer, plan.chosen.engine
    rows: list[tuple[str, ...]] = [("memory of a GPU, GiB", "training", "generating")]
    for name, title in PARTS:
        training = None if name in GENERATING_ONLY else _gib(trainer, name)
        generating = None if name in TRAINING_ONLY else _gib(engine, name)
        if training or generating:
            rows.append((title, _number(training), _number(generating)))
    rows.append(("together", f"{trainer.training / GIB:.1f}", f"{engine.generating / GIB:.1f}"))
    return [*_table(rows), f"of {plan.gpu.memory / GIB:.0f} GiB"]


def _gib(memory: GpuMemory, name: str) -> float:
    value: float = getattr(memory, name)
    return max(0.0, value) / GIB


def _number(value: float | None) -> str:
    """Gibibytes as a cell: a dash for nothing, never a zero for what takes a little."""
    if not value:
        return "-"
    return "<0.1" if value < 0.05 else f"{value:.1f}"


def _step(plan: TrainingPlan) -> list[str]:
    work, chosen = plan.workload, plan.chosen
    total = plan.chosen.step_seconds
    rows: list[tuple[str, ...]] = [
        ("a step", "tokens computed", "seconds"),
        (
            f"rollouts: {work.num_rollouts:,.0f} of {len(work.calls)} calls",
            _large(work.prefill_tokens + work.reply_tokens),
            f"{chosen.rollout_seconds:,.1f}",
        ),
        ("scoring: old policy, reference", "-", f"{chosen.scoring_seconds:,.1f}"),
        (
            f"update, shared {work.sharing:.1f} times",
            _large(work.computed_tokens),
            f"{chosen.update_seconds:,.1f}",
        ),
        ("new weights to the engines", "-", f"{chosen.publish_seconds:,.1f}"),
        ("together", f"{plan.step_flops:.2g} FLOPs", f"{total:,.1f}"),
    ]
    return [*_table(rows), _busy(chosen)]


def _busy(one: LayoutPlan) -> str:
    simulated = one.simulated
    return (
        f"trainer busy {simulated.trainer_busy:.0%}, engines {simulated.engines_busy:.0%} "
        f"({simulated.mean_rows:,.0f} of at most {one.max_rows:,} rollouts at once), driver "
        f"{simulated.driver_busy:.0%}; {one.mfu:.0%} of peak arithmetic"
    )


def _run(plan: TrainingPlan) -> list[str]:
    parts = [f"{plan.steps:,} steps {duration(plan.steps * plan.chosen.step_seconds)}"]
    around = (
        ("warm start", plan.warm_start_seconds),
        ("validation", plan.validation_seconds),
        ("checkpoints", plan.checkpoint_seconds),
    )
    parts += [f"{name} {duration(seconds)}" for name, seconds in around if seconds >= 1]
    days = plan.run_seconds / DAY
    lines = [
        f"the run: {duration(plan.run_seconds)}{f' ({days:.2f} days)' if days >= 1 else ''}, "
        f"{plan.gpu_hours:,.1f} GPU-hours: {', '.join(parts)}"
    ]
    if plan.cost is not None:
        lines.append(f"cost: {plan.cost:,.2f} at {plan.price:g} for a GPU and hour")
    return lines


UNITS = {"trainer": "a trainer GPU", "engine": "a GPU of an engine", "packs": "a packed sequence"}


def _problems(problems: Iterable[Problem]) -> list[str]:
    lines = []
    for one in problems:
        if one.place == "packs":
            need = f"needs {one.needs:,.0f} tokens and has {one.has:,.0f}"
        else:
            need = f"needs {one.needs / GIB:,.1f} GiB and has {one.has / GIB:,.1f}"
        change = " ".join(f"--set {change}" for change in one.changes) or "a smaller model"
        lines.append(f"does not fit: {UNITS[one.place]} {need}; smallest change: {change}")
    return ["", *lines] if lines else []


def _best(plan: TrainingPlan) -> list[str]:
    best = plan.best
    if best is None:
        return ["", "best split: none of as many GPUs fits"]
    if best.layout == plan.chosen.layout:
        return ["", "best split: this one"]
    gain = plan.chosen.step_seconds / best.step_seconds
    return [
        "",
        f"best split: {_layout(best.layout)}: {best.step_seconds:,.1f} s a step, {gain:.2f} times as fast",
        f"  {_busy(best)}",
    ]


def _scaling(plan: TrainingPlan) -> list[str]:
    if not plan.scaled:
        return []
    rows: list[tuple[str, ...]] = [
        ("GPUs", "train", "generate", "s a step", "trainer busy", "engines busy", "driver busy")
    ]
    for one in plan.scaled:
        layout, simulated = one.layout, one.simulated
        rows.append(
            (
                f"{layout.num_gpus:,}",
                f"{layout.num_trainers:,}",
                "in turn" if layout.is_colocated else f"{layout.num_engine_gpus:,}",
                f"{one.step_seconds:,.1f}",
                f"{simulated.trainer_busy:.0%}",
                f"{simulated.engines_busy:.0%}",
                f"{simulated.driver_busy:.0%}",
            )
        )
    return ["", *_table(rows)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _large(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
