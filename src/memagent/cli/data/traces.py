"""`memagent data traces`: warm-start conversations by rule, for training before RL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memagent.cli.shared.options import PanelCommand, given, settings_options
from memagent.config import AgentConfig
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import TaskSettings
from memagent.rl.warmstart.trace_files import write_traces

OF_SAMPLING = ("temperature", "top_p", "seed", "reasoning_tokens")
"""Settings of reading without effect on demonstrations."""


@click.command("traces", cls=PanelCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="File to write, such as x.jsonl."
)
@click.option(
    "--tokenizer",
    default=TaskSettings.model_fields["tokenizer"].default,
    show_default=True,
    help="Tokenizer of the model that will be trained: it decides where sections end.",
)
@click.option("--skip-refused", is_flag=True, help="Skip examples without a demonstration by rule.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@settings_options(AgentConfig, panel="Reading", skip=OF_SAMPLING)
def command(
    file: Path, out: Path, tokenizer: str, skip_refused: bool, force: bool, **options: Any
) -> None:
    """Write warm-start conversations by rule from examples with evidence.

    For each example of FILE: a conversation per section, whose reply is the memory that a good reader
    would write, and one for the answer. The prompts are those of the reader with the same settings.
    An interrupted call resumes where it stopped.
    """
    config = AgentConfig.parse(given(AgentConfig, options))
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.completed} examples"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("traces", total=None)
        written = write_traces(
            file,
            out,
            config=config,
            tokenizer=length_tokenizer(tokenizer),
            skip_refused=skip_refused,
            force=force,
            on_example=lambda _: progress.advance(bar),
        )
    skipped = f"; {written.num_refused} skipped" if written.num_refused else ""
    click.echo(
        f"{out}: {written.num_examples} examples, {written.num_conversations} conversations{skipped}"
    )
