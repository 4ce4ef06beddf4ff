"""`memagent plan CONFIG`: what a training run needs and takes, before anything is rented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from memagent.cli.shared.console import aligned, print_json
from memagent.cli.shared.options import PanelCommand, panel_option, settings_options, taking
from memagent.cli.shared.progress import duration
from memagent.cli.train.run import CONFIG
from memagent.rl.plan import (
    ACCELERATORS,
    Layout,
    PlanAssumptions,
    Problem,
    TrainingPlan,
    make_plan,
)
from memagent.rl.settings import MOST_GPUS, read_config
from memagent.rl.sizes import GIB

GPUS = "GPUs"
ASSUMPTIONS = "Assumptions"
"""Headings of the help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the options were given."""

    config: Path
    model: str | None
    changes: tuple[str, ...]
    gpu: str
    gpus: int | None
    price: float | None
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
@settings_options(PlanAssumptions, panel=ASSUMPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@taking(PlanOptions)
def command(options: PlanOptions) -> int:
    """Plan a training run: memory, tokens, time, cost, and what does not fit.

    \b
      memagent plan paper_7b --gpu H100 --price 2.50
      memagent plan my_run.toml --gpu A100 --gpus 8
      memagent plan my_run.toml --set update.checkpointing=true --json

    Nothing is loaded and no GPU is needed: sizes come from the model's config.json or its name, rates from
    measurements on one H200. CONFIG is a TOML file, or the name of a config that comes with memagent. Exit code 1:
    the run does not fit.
    """
    changes = list(options.changes)
    if options.model is not None:
        changes.insert(0, f'model.source="{options.model}"')
    plan = make_plan(
        read_config(options.config, changes=changes),
        gpu=options.gpu,
        num_gpus=options.gpus,
        price=options.price,
        assumed=PlanAssumptions.parse(options.assumed),
    )
    if options.as_json:
        print_json(plan.as_json())
    else:
        click.echo("\n".join(plan_lines(plan)))
    return 1 if plan.problems else 0


def plan_lines(plan: TrainingPlan) -> Iterator[str]:
    """The plan as text."""
    layout = plan.chosen.layout
    what = "all" if plan.num_trained == plan.shape.num_parameters else _large(plan.num_trained)
    yield f"model: {_large(plan.shape.num_parameters)} parameters, {what} trained"
    yield f"GPUs: {layout.num_gpus} x {plan.gpu.name}, {_layout(layout)}"
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _step(plan)
    yield ""
    yield from _run(plan)
    if plan.problems:
        yield ""
    yield from map(_problem, plan.problems)
    yield ""
    yield _assumed(plan)


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


PARTS = {
    "weights": "weights",
    "reference": "reference weights",
    "masters": "float32 weights",
    "gradients": "gradients",
    "moments": "optimizer",
    "gathered": "gathered layers",
    "activations": "activations",
    "logits": "logits",
    "engine_weights": "weights of the engine",
    "cache": "KV cache",
    "overhead": "driver and libraries",
}


def _memory(plan: TrainingPlan) -> list[str]:
    trainer, engine = plan.chosen.trainer, plan.chosen.engine
    rows = [("memory of a GPU, GiB", "training", "generating")]
    for name, title in PARTS.items():
        training, generating = getattr(trainer, name) / GIB, getattr(engine, name) / GIB
        if training or generating:
            rows.append((title, _gib(training), _gib(generating)))
    rows.append(("together", f"{trainer.training / GIB:.1f}", f"{engine.generating / GIB:.1f}"))
    return [*aligned(rows, right=(1, 2)), f"of {plan.gpu.gib:.0f} GiB"]


def _gib(value: float) -> str:
    """A cell: a dash for nothing, never a zero for what takes a little."""
    if not value:
        return "-"
    return "<0.1" if value < 0.05 else f"{value:.1f}"


def _step(plan: TrainingPlan) -> list[str]:
    work, chosen = plan.workload, plan.chosen
    generated = work.prefill_tokens + work.num_rollouts * work.reply_tokens
    rows = [
        ("a step", "tokens computed", "seconds"),
        (
            f"rollouts: {work.num_rollouts:,.0f} of {len(work.calls)} calls",
            _large(generated),
            f"{chosen.rollout_seconds:,.1f}",
        ),
        ("scoring: old policy, reference", "-", f"{chosen.scoring_seconds:,.1f}"),
        (
            f"update, shared {work.trained_tokens / work.computed_tokens:.1f} times",
            _large(work.computed_tokens),
            f"{chosen.update_seconds:,.1f}",
        ),
        ("new weights to the engines", "-", f"{chosen.publish_seconds:,.1f}"),
        ("together", "", f"{chosen.step_seconds:,.1f}"),
    ]
    return [
        *aligned(rows, right=(1, 2)),
        f"trainer busy {chosen.trainer_busy:.0%}, engines {chosen.engines_busy:.0%}; each engine has room for "
        f"{chosen.max_rows:,} rollouts at once",
    ]


def _run(plan: TrainingPlan) -> Iterator[str]:
    parts = [f"{plan.steps:,} steps {duration(plan.steps * plan.chosen.step_seconds)}"]
    around = {
        "warm start": plan.warm_start_seconds,
        "validation": plan.validation_seconds,
        "checkpoints": plan.checkpoint_seconds,
    }
    parts += [f"{name} {duration(seconds)}" for name, seconds in around.items() if seconds >= 1]
    days = plan.run_seconds / 86400
    yield (
        f"the run: {duration(plan.run_seconds)}{f' ({days:.2f} days)' if days >= 1 else ''}, "
        f"{plan.gpu_hours:,.1f} GPU-hours: {', '.join(parts)}"
    )
    if plan.cost is not None:
        yield f"cost: {plan.cost:,.2f} at {plan.price:g} for a GPU and hour"


UNITS = {"trainer": "a trainer GPU", "engine": "a GPU of an engine", "packs": "a packed sequence"}


def _problem(one: Problem) -> str:
    need = f"needs {one.needs / GIB:,.1f} GiB and has {one.has / GIB:,.1f}"
    if one.place == "packs":
        need = f"needs {one.needs:,.0f} tokens and has {one.has:,.0f}"
    change = " ".join(f"--set {change}" for change in one.changes) or "a smaller model"
    return f"does not fit: {UNITS[one.place]} {need}; it fits with {change}"


def _assumed(plan: TrainingPlan) -> str:
    """What the plan rests on besides the config."""
    work = plan.workload
    first = work.calls[0]
    signal = ""
    if work.trained_share < 1:
        signal = f"{work.trained_share:.0%} of the groups have a signal and are trained on; "
    return (
        f"assumed: {len(work.calls)} calls a rollout, {work.prompt_tokens:,.0f} tokens of prompts, "
        f"{work.reply_tokens:,.0f} of replies; replies of {first.reply_tokens:,.0f} tokens on average, at most "
        f"{first.max_reply:,}; {signal}rates as measured on one H200 at 135M and 1.5B, carried over by the data "
        "sheets of GPUs"
    )


def _large(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
