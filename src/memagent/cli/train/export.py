"""`memagent train export RUN OUT`: the trained model or adapter as a folder."""

from __future__ import annotations

from pathlib import Path

import click

from memagent.cli.train.run import check_libraries
from memagent.errors import ConfigError


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=1), help="Checkpoint to take. [default: the newest]"
)
@click.option(
    "--best", is_flag=True, help="Take the checkpoint with the highest validation reward."
)
@click.option(
    "--merge", is_flag=True, help="Merge an adapter into its model, and write the whole model."
)
def command(run: Path, out: Path, step: int | None, best: bool, merge: bool) -> int:
    """Write the model or adapter of a run as a folder that transformers, peft and vLLM load.

    \b
      memagent train export runs/tiny my-adapter
      memagent train export runs/tiny my-model --merge
      memagent train export runs/tiny my-best-model --best
      memagent ask report.pdf -q "..." --engine local:smollm2-135m --adapter my-adapter
    """
    check_libraries()
    if best and step is not None:
        raise ConfigError("give either --step or --best")
    from memagent.rl.weights.checkpoint import export, find_checkpoint

    checkpoint = find_checkpoint(run, step, best=best)
    export(checkpoint, out, merge=merge)
    click.echo(f"{out}: from {checkpoint.name}")
    return 0
