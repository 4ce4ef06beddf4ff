"""`memagent train export RUN OUT`: the trained model or adapter as a folder."""

from __future__ import annotations

from pathlib import Path

import click

from memagent.engines.base import check_engine
from memagent.errors import ConfigError, RunError


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=1), help="Checkpoint to take. [default: the newest]"
)
@click.option(
    "--merge", is_flag=True, help="Merge an adapter into its model, and write the whole model."
)
def command(run: Path, out: Path, step: int | None, merge: bool) -> int:
    """Write the model or adapter of a run as a folder that transformers, peft and vLLM load.

    \b
      memagent train export runs/tiny my-adapter
      memagent train export runs/tiny my-model --merge
      memagent ask report.pdf -q "..." --engine local:smollm2-135m --adapter my-adapter
    """
    check_engine("local")
    from memagent.rl.weights.checkpoint import export, list_checkpoints

    if not run.is_dir():
        raise RunError(f"{run} is not a run folder")
    found = list_checkpoints(run)
    if not found:
        raise RunError(f"{run} has no checkpoint yet")
    if step is not None and step not in found:
        raise ConfigError(
            f"there is no checkpoint of step {step}; there are {', '.join(map(str, found))}"
        )
    checkpoint = found[step if step is not None else max(found)]
    export(checkpoint, out, merge=merge)
    click.echo(f"{out}: from {checkpoint.name}")
    return 0
