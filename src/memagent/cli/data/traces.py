"""`memagent data traces`: warm-start conversations by rule, for training before RL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.options import PanelCommand, settings_options, taking
from memagent.cli.shared.progress import ProgressFrame
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import TaskSettings
from memagent.rl.warmstart.trace_files import write_traces

OF_SAMPLING = ("temperature", "top_p", "seed", "reasoning_tokens")
"""Settings of reading without effect on demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesOptions:
    """What the command line says."""

    file: Path
    out: Path
    tokenizer: str
    skip_refused: bool
    force: bool
    agent: Annotated[dict[str, Any], AgentConfig]


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
@settings_options(
    AgentConfig,
    panel="Reading",
    only=[name for name in AgentConfig.model_fields if name not in OF_SAMPLING],
)
@taking(TracesOptions)
def command(options: TracesOptions) -> int:
    """Write warm-start conversations by rule from examples with evidence.

    For each example of FILE: a conversation per section, whose reply is the memory that a good reader
    would write, and one for the answer. The prompts are those of the reader with the same settings.
    An interrupted call resumes where it stopped.
    """
    with ProgressFrame(CommandConsole(), is_transient=True) as progress:
        num_done = 0

        def on_example(example: Example) -> None:
            nonlocal num_done
            num_done += 1
            progress.show(f"{num_done} examples", completed=num_done, total=None)

        written = write_traces(
            options.file,
            options.out,
            config=AgentConfig.parse(options.agent),
            tokenizer=length_tokenizer(options.tokenizer),
            skip_refused=options.skip_refused,
            force=options.force,
            on_example=on_example,
        )
    skipped = f"; {written.num_refused} skipped" if written.num_refused else ""
    click.echo(
        f"{options.out}: {written.num_examples} examples, "
        f"{written.num_conversations} conversations{skipped}"
    )
    return 0
