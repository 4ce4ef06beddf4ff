"""`memagent data convert`: datasets from one file format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import click

from memagent.data.formats.benchmarks import BenchmarkKind
from memagent.data.formats.original import DatasetKind, convert_dataset

KINDS = get_args(DatasetKind)
BENCHMARKS = get_args(BenchmarkKind)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
def command(
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
