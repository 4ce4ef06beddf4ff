"""`memagent data inspect`: what a dataset holds, in numbers and by example."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import click
from rich.text import Text

from memagent.cli.shared.console import TerminalConsole, print_json
from memagent.data.example import Example
from memagent.data.formats.benchmarks import BenchmarkKind
from memagent.data.formats.original import DatasetKind, convert_dataset
from memagent.data.inspection import (
    AROUND_CHARS,
    Excerpt,
    Spread,
    Summary,
    excerpts,
    inspect_dataset,
)
from memagent.data.tasks.lengths import NUM_TENTHS

BAR_CHARS = 40
UNEVEN_P = 0.001
"""Below this, depths are called uneven."""


@click.command("inspect", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--index",
    "indices",
    type=click.IntRange(min=0),
    multiple=True,
    help="Show this example, counted from 0; may be given several times.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How many of the first examples to show, where --index is not given.",
)
@click.option(
    "--around",
    type=click.IntRange(min=0),
    default=AROUND_CHARS,
    show_default=True,
    help="Characters of text to show on each side of the evidence.",
)
@click.option(
    "--text",
    "with_text",
    is_flag=True,
    help="Rebuild texts that the file has only the origin of: all, or those of --index.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    file: Path, indices: tuple[int, ...], samples: int, around: int, with_text: bool, as_json: bool
) -> None:
    """Show what a dataset holds: tasks, lengths, answers, depth of the evidence, examples.

    \b
      memagent data inspect dev.jsonl
      memagent data inspect dev.parquet --index 12 --around 400
    """
    inspection = inspect_dataset(file, indices=indices, samples=samples, with_text=with_text)
    if as_json:
        print_json(inspection.to_dict(around_chars=around))
        return
    console = TerminalConsole(highlight=False, markup=False, soft_wrap=True)
    _print_summary(console, file, inspection.summary)
    for index, example in inspection.shown.items():
        _print_example(console, index, example, around)


def _print_summary(console: TerminalConsole, file: Path, summary: Summary) -> None:
    console.print(Text(f"{file}: {summary.num_examples:,} examples", style="bold"))
    for name, count in summary.tasks.items():
        console.print(f"  {name:<28}{count:>10,}")
    if summary.num_repeated_ids:
        console.print(f"  {summary.num_repeated_ids:,} have the id of an earlier one", style="red")
    console.print(f"\n{'':<14}{'least':>12}{'median':>12}{'mean':>14}{'most':>12}")
    for name, spread in (
        ("tokens", summary.num_tokens),
        ("documents", summary.num_documents),
        ("answers", summary.num_answers),
        ("evidence", summary.num_evidence),
    ):
        console.print(_spread_line(name, spread))
    graders = ", ".join(f"{name} ({count:,})" for name, count in summary.graders.items())
    console.print(f"\ngraded by {graders}")
    common = ", ".join(f"{answer!r} ({count:,})" for answer, count in summary.answers.items())
    console.print(f"most frequent answers: {common or 'none'}")
    if summary.num_without_text:
        console.print(
            f"{summary.num_without_text:,} are stored without their text; --text rebuilds it"
        )
    if sum(summary.depths):
        _print_depths(console, summary)


def _spread_line(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<14}{'not known':>12}"
    return (
        f"{name:<14}{spread.min:>12,}{spread.median:>12,.0f}{spread.mean:>14,.1f}{spread.max:>12,}"
    )


def _print_depths(console: TerminalConsole, summary: Summary) -> None:
    verdict = "uneven" if summary.depths_p < UNEVEN_P else "no significant unevenness"
    console.print(f"\nevidence by depth ({verdict}; p = {summary.depths_p:.2g})")
    most = max(summary.depths)
    for bucket, count in enumerate(summary.depths):
        low, high = bucket / NUM_TENTHS, (bucket + 1) / NUM_TENTHS
        bar = "#" * round(BAR_CHARS * count / most)
        console.print(f"  {low:.1f}-{high:.1f} {count:>8,}  {bar}".rstrip())


def _print_example(console: TerminalConsole, index: int, example: Example, around: int) -> None:
    console.print(Text(f"\n[{index}] {example.id}", style="bold"))
    console.print(f"question: {example.question}")
    joint = " and " if example.match == "all" else " or "
    console.print(f"answers:  {joint.join(repr(one) for one in example.answers) or 'none'}")
    if example.documents is None:
        console.print("text:     not in the file; --text rebuilds it")
        return
    tokens = f", {example.num_tokens:,} tokens" if example.num_tokens is not None else ""
    num = len(example.documents)
    console.print(f"text:     {num:,} document{'s' if num > 1 else ''}{tokens}")
    for excerpt in excerpts(example, around_chars=around):
        console.print(_marked(excerpt, is_styled=console.is_terminal))


def _marked(excerpt: Excerpt, *, is_styled: bool) -> Text:
    """The evidence in its text: coloured on a terminal, between marks elsewhere."""
    title = f" {excerpt.title}" if excerpt.title else ""
    text = Text(f"  {excerpt.depth:.1%} document {excerpt.document + 1}{title}: ", style="dim")
    text.append(_flat(excerpt.before), style="default")
    text.append(
        _flat(excerpt.text) if is_styled else f">>>{_flat(excerpt.text)}<<<",
        style="not dim black on yellow",
    )
    text.append(_flat(excerpt.after), style="default")
    if excerpt.note:
        text.append(f"  (remember: {_flat(excerpt.note)})", style="dim")
    return text


def _flat(text: str) -> str:
    """On one line; spaces at the ends stay."""
    return text.replace("\n", " ")


# --- conversion -----------------------------------------------------------------------------------

KINDS = get_args(DatasetKind)
BENCHMARKS = get_args(BenchmarkKind)


@click.command("convert", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source_kind",
    type=click.Choice(["auto", *KINDS, *BENCHMARKS]),
    default="auto",
    show_default=True,
    help="Format of IN; auto detects it.",
)
@click.option(
    "--to",
    "target_kind",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    show_default=True,
    help="Format of OUT; auto: original-eval for .json, else memagent.",
)
@click.option(
    "--pool",
    type=click.Path(path_type=Path),
    help="Documents that IN refers to by number: the HotpotQA file that IN was built from.",
)
@click.option("--task", help="Task of the examples. [default: as the file says]")
def convert(
    source: Path,
    target: Path,
    source_kind: DatasetKind | BenchmarkKind | Literal["auto"],
    target_kind: DatasetKind | Literal["auto"],
    pool: Path | None,
    task: str | None,
) -> None:
    """Convert a dataset to another format.

    memagent is our own: .jsonl, .jsonl.gz or .parquet. original-train and original-eval are those of
    the original MemAgent project: .parquet, and .json arrays. Files of LongBench (v1, v2), HELMET and
    LOFT are read; `memagent eval --file` takes them as they are.

    \b
      memagent data convert dev.jsonl dev.parquet
      memagent data convert eval_200.json hotpotqa-200.jsonl
      memagent data convert train.jsonl train.parquet --to original-train
      memagent data convert longbench/hotpotqa.jsonl hotpotqa.jsonl
    """
    conversion = convert_dataset(
        source,
        target,
        source_kind=None if source_kind == "auto" else source_kind,
        target_kind=None if target_kind == "auto" else target_kind,
        pool=pool,
        task=task,
    )
    click.echo(
        f"{target}: {conversion.num_examples:,} examples "
        f"({conversion.source_kind} to {conversion.target_kind})",
        err=True,
    )
