"""`memagent train export RUN OUT`: the trained model or adapter as a folder, or as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memagent.cli.train.run import check_libraries
from memagent.errors import ConfigError

if TYPE_CHECKING:
    from memagent.rl.weights.gguf_export import GgufKind


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
@click.option(
    "--gguf",
    type=click.Choice(["f16", "q8_0"]),
    help="Merge an adapter into its model, a GGUF file, and write the whole as one, for llama.cpp.",
)
@click.option(
    "--gguf-adapter",
    is_flag=True,
    help="Write an adapter of a GGUF file as a GGUF file of its own, for llama.cpp.",
)
@click.option(
    "--model",
    help="Model that the adapter is for: a pulled one or a path. [default: the one it names]",
)
def command(
    run: Path,
    out: Path,
    step: int | None,
    best: bool,
    merge: bool,
    gguf: GgufKind | None,
    gguf_adapter: bool,
    model: str | None,
) -> int:
    """Write the model or adapter of a run as a folder that transformers, peft and vLLM load, or as a GGUF file.

    \b
      memagent train export runs/tiny my-adapter
      memagent train export runs/tiny my-model --merge
      memagent train export runs/tiny my-best-model --best
      memagent train export adapters/memagent-1.5b reader.gguf --gguf q8_0 --model qwen2.5-coder-1.5b
      memagent train export adapters/memagent-1.5b reader.gguf --gguf-adapter --model qwen2.5-coder-1.5b
      memagent ask report.pdf -q "..." --engine local:smollm2-135m --set adapter=my-adapter

    RUN may also be the folder of an adapter.
    """
    check_libraries()
    if best and step is not None:
        raise ConfigError("give either --step or --best")
    from memagent.rl.weights.checkpoint import export, export_gguf, find_checkpoint

    checkpoint = find_checkpoint(run, step, best=best)
    if gguf is not None and gguf_adapter:
        raise ConfigError("give either --gguf or --gguf-adapter")
    if gguf is not None or gguf_adapter:
        export_gguf(checkpoint, out, kind=gguf, model=model)
    else:
        export(checkpoint, out, merge=merge, model=model)
    click.echo(f"{out}: from {checkpoint.name}")
    return 0
