"""`memagent data traces`: warm-start traces by rule, for training before reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memagent.agent.budget import check_budget
from memagent.agent.prompts import open_prompts
from memagent.cli.shared.options import PanelCommand, given, settings_options
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import TaskSettings
from memagent.rl.warmstart.trace_files import write_traces

OF_SAMPLING = ("temperature", "top_p", "seed", "reasoning_tokens")
"""Settings of reading that decide nothing about a trace by rule."""


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
@click.option("--skip-refused", is_flag=True, help="Leave out what no rule has a trace for.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@settings_options(AgentConfig, panel="Reading", skip=OF_SAMPLING)
def command(
    file: Path, out: Path, tokenizer: str, skip_refused: bool, force: bool, **options: Any
) -> None:
    """Write warm-start traces by rule from examples with evidence.

    For each example of FILE: a conversation per section, whose reply is the memory that a good reader
    would write, and one for the answer. The prompts are those of the reader with the same settings.
    A call that was interrupted goes on where it stopped.
    """
    config = AgentConfig.parse(given(AgentConfig, options))
    prompts, counter = open_prompts(config.prompts), length_tokenizer(tokenizer)
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.completed} examples"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("traces", total=None)

        def check(example: Example) -> object:
            return check_budget(example.question.strip(), config, prompts, counter)

        written = write_traces(
            file,
            out,
            config=config,
            tokenizer=counter,
            skip_refused=skip_refused,
            force=force,
            check=check,
            on_example=lambda _: progress.advance(bar),
        )
    left_out = f"; {written.num_refused} left out" if written.num_refused else ""
    click.echo(
        f"{out}: {written.num_examples} examples, {written.num_conversations} conversations{left_out}"
    )
