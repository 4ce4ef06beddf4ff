"""`memagent data convert`: datasets from one file format to another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click

from memagent.data.example import Example
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.formats.original import Kind, kind_of, read_original, write_original
from memagent.errors import ConfigError

KINDS = get_args(Kind)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source_kind",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    show_default=True,
    help="What IN is; auto looks into it.",
)
@click.option(
    "--to",
    "target_kind",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    show_default=True,
    help="What OUT becomes; auto takes original-eval for .json, else memagent.",
)
@click.option(
    "--pool",
    type=click.Path(path_type=Path),
    help="Documents that IN holds only the numbers of: the HotpotQA file it was made from.",
)
@click.option("--task", help="Name of the examples' task; the file tells it when not given.")
def command(
    source: Path,
    target: Path,
    source_kind: str,
    target_kind: str,
    pool: Path | None,
    task: str | None,
) -> None:
    """Turn a dataset into another format.

    memagent is our own: .jsonl, .jsonl.gz or .parquet. original-train and original-eval are those of
    the original MemAgent project: .parquet, and .json arrays.

    \b
      memagent data convert dev.jsonl dev.parquet
      memagent data convert eval_200.json hotpotqa-200.jsonl
      memagent data convert train.jsonl train.parquet --to original-train
    """
    if source.resolve() == target.resolve():
        raise ConfigError("IN and OUT are the same file; name another for OUT")
    source_is = _kind(source_kind) or kind_of(source)
    target_is = _kind(target_kind) or _kind_for(target)
    if source_is == "memagent" and (pool or task):
        raise ConfigError(
            f"--pool and --task are for files of the original project; {source} is ours"
        )
    examples = _read(source, source_is, pool, task)
    if target_is == "memagent":
        num_written = write_examples(target, examples)
    else:
        num_written = write_original(target, target_is, examples)
    click.echo(f"{target}: {num_written:,} examples ({source_is} to {target_is})", err=True)


def _read(source: Path, kind: Kind, pool: Path | None, task: str | None) -> Iterator[Example]:
    if kind == "memagent":
        return read_examples(source)
    return read_original(source, kind, pool=pool, task=task)


def _kind(name: str) -> Kind | None:
    return next((kind for kind in KINDS if kind == name), None)


def _kind_for(target: Path) -> Kind:
    return "original-eval" if target.name.endswith((".json", ".json.gz")) else "memagent"
