"""Convert datasets between formats: ours, those of the original MemAgent project, and from benchmarks.

convert_dataset("eval_200.json", "hotpotqa-200.jsonl").num_examples
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast, get_args

from memagent.data.formats.benchmarks import BenchmarkKind, benchmark_of, read_benchmark
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.formats.original import DatasetKind, kind_of, read_original, write_original
from memagent.errors import ConfigError


class Conversion(NamedTuple):
    """What was converted."""

    num_examples: int
    source_kind: DatasetKind | BenchmarkKind
    target_kind: DatasetKind


def convert_dataset(
    source: str | Path,
    target: str | Path,
    *,
    source_kind: DatasetKind | BenchmarkKind | None = None,
    target_kind: DatasetKind | None = None,
    pool: str | Path | None = None,
    task: str | None = None,
) -> Conversion:
    """Write the examples of `source` to `target`.

    Kinds that are not given follow from the contents of `source` and from the name of `target`. `pool`
    and `task` are for files of the original project; see `read_original`.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise ConfigError(f"{source} would be converted to itself; name another file to write")
    source_kind = source_kind or benchmark_of(source) or kind_of(source)
    target_kind = target_kind or _kind_by_name(target)
    if source_kind in get_args(BenchmarkKind):
        if pool:
            raise ConfigError(f"`pool` is for files of the original project; {source} is none")
        examples = read_benchmark(source, cast(BenchmarkKind, source_kind), task=task)
    elif source_kind == "memagent":
        if pool or task:
            raise ConfigError(
                f"`pool` and `task` are for files of the original project; {source} is ours"
            )
        examples = read_examples(source)
    else:
        examples = read_original(source, cast(DatasetKind, source_kind), pool=pool, task=task)
    if target_kind == "memagent":
        num_examples = write_examples(target, examples)
    else:
        num_examples = write_original(target, target_kind, examples)
    return Conversion(num_examples, source_kind, target_kind)


def _kind_by_name(target: Path) -> DatasetKind:
    return "original-eval" if target.name.endswith((".json", ".json.gz")) else "memagent"
