"""Reading modes with trained readers: one command for each table, resumed when it is started again.

    modes      configs/eval/modes.toml: every mode on the same items, at 28K, 448K and 3.5M tokens
    reader     configs/eval/modes_reader.toml: the modes that readers trained to read in order know
    counting   configs/eval/modes_counting.toml: the plain loop, quotes, and items that code counts
    citations  configs/eval/modes_citations.toml: citations against supporting facts and known needles

    python -m benchmarks.mode_tables modes --engine local:memagent-1.5b --device cuda
    python -m benchmarks.mode_tables counting --engine local:memagent-1.5b --device cuda
    python -m benchmarks.mode_tables citations --engine local:memagent-1.5b --engine local:memagent-135m --device cuda
    python -m benchmarks.mode_tables reader --estimate                        # the time, and nothing else
    python -m benchmarks.mode_tables reader --engine local:memagent-135m --lengths 1K:1 --tasks beyond/two_hop

The first lines say how many prompt tokens the modes read at least, and how long that takes at `--rate` (150,000 a
second, an H200 with many calls at once). A second round of parallel reading is not in it, and a text of n sections
that is read in order takes n calls one after the other, whatever the rate. Records are kept in
`runs/mode_tables`; the same command goes on where it was killed. The last lines are the table; `+-` is the
difference to the first mode on the same items, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from memagent.cli.shared.progress import duration
from memagent.errors import MemagentError
from memagent.eval.forecast import EvalForecast
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Evaluation
from memagent.eval.setup import EvalRequest, make_request, open_evaluation
from memagent.eval.stats import paired_mean
from memagent.eval.suites import Suite, read_suite
from memagent.runs import MANIFEST

RATE = 150_000
"""Prompt tokens a second that the estimate counts with."""
SHARES = ("captured", "retained", "citation_precision", "citation_recall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One table: its suite, and how many items of each task at each length."""

    suite: str
    lengths: tuple[str, ...]
    """Such as 28K:16, sixteen items of 28K tokens."""
    by_task: bool = False
    """Whether tasks have lines of their own."""


PARTS = {
    "modes": Part(suite="modes", lengths=("28K:16", "448K:4", "3.5M:1")),
    "reader": Part(suite="modes_reader", lengths=("28K:16", "448K:4", "3.5M:1")),
    "counting": Part(suite="modes_counting", lengths=("28K:32", "448K:4"), by_task=True),
    "citations": Part(suite="modes_citations", lengths=("7K:64", "28K:32"), by_task=True),
}


def suite_of(part: Part, options: argparse.Namespace) -> Suite:
    """The suite with the lengths, numbers and tasks that are asked for."""
    suite = read_suite(part.suite, changes=options.changes)
    chosen = [
        {
            **choice.model_dump(exclude_unset=True),
            "tasks": tasks,
            "tokens": [tokens],
            "num": int(num),
        }
        for tokens, _, num in (each.partition(":") for each in options.lengths or part.lengths)
        for choice in suite.tasks
        if (tasks := [task for task in choice.tasks if not options.tasks or task in options.tasks])
    ]
    return Suite.parse({**suite.model_dump(exclude_unset=True), "tasks": chosen})


def request_of(part: Part, engine: str, options: argparse.Namespace) -> EvalRequest:
    """The evaluation of one reader."""
    settings = {"device": options.device} if options.device else {}
    return make_request(suite_of(part, options), engine, engine_settings=settings)


async def estimate(request: EvalRequest, rate: int) -> None:
    """Print what an evaluation takes at least."""
    async with open_evaluation(request, is_dry=True) as evaluation:
        assert evaluation.forecast is not None
        model = evaluation.methods[0].gate.engine.model
        print(time_line(evaluation.forecast, model, rate))


def time_line(forecast: EvalForecast, model: str, rate: int) -> str:
    """What an evaluation takes at least, in words."""
    work = forecast.total
    return (
        f"{model}: at least {work.num_calls:,.0f} calls and {work.prompt_tokens:,.0f} prompt tokens, "
        f"{duration(work.prompt_tokens / rate)} at {rate:,} a second"
    )


async def measure(request: EvalRequest, run: Path, *, model: str, rate: int) -> list[ItemRecord]:
    """The records of an evaluation; those that the run holds already are not made again."""
    async with open_evaluation(
        request, run_dir=run, resume=(run / MANIFEST).exists()
    ) as evaluation:
        if evaluation.forecast is not None:
            print(time_line(evaluation.forecast, model, rate))
        done = f"{len(evaluation.records)} of {evaluation.num_items}"
        print(f"{done} answers are in {run}", flush=True)
        return await evaluation.evaluate(on_record=_reporter(evaluation))


def _reporter(evaluation: Evaluation) -> Callable[[ItemRecord], None]:
    def report(record: ItemRecord) -> None:
        done = f"{len(evaluation.records)} of {evaluation.num_items}"
        print(
            f"{done}: {record.method}, {record.task}, {record.seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    return report


# --- the table ------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What a line of the table is about."""

    engine: str
    task: str
    """Empty for all tasks."""
    length: int | None
    method: str


def cells_of(
    engine: str, records: Sequence[ItemRecord], suite: Suite, *, by_task: bool
) -> dict[Cell, list[ItemRecord]]:
    """Records by line: texts from short to long, modes in the order of the suite."""
    cells: dict[Cell, list[ItemRecord]] = {}
    titles = [method.title for method in suite.methods]
    for record in sorted(records, key=lambda one: (one.task, one.target_tokens or 0)):
        task = record.task if by_task else ""
        cell = Cell(engine, task, record.target_tokens, record.method)
        cells.setdefault(cell, []).append(record)
    places = {(cell.task, cell.length): None for cell in cells}
    order = [Cell(engine, *place, title) for place in places for title in titles]
    return {cell: cells[cell] for cell in order if cell in cells}


def lines_of(cells: dict[Cell, list[ItemRecord]]) -> Iterator[list[str]]:
    """The lines of the table, the first one its head."""
    yield [
        "reader",
        "task",
        "length",
        "mode",
        "items",
        "score",
        "+-",
        "calls",
        "tokens",
        "s",
        *SHARES,
    ]
    first: list[ItemRecord] = []
    place: tuple[Any, ...] = ()
    for cell, records in cells.items():
        if cell[:3] != place:
            place, first = cell[:3], records
        yield [
            cell.engine,
            cell.task or "all",
            f"{cell.length:,}" if cell.length else "",
            cell.method,
            str(len(records)),
            f"{100 * fmean(record.score for record in records):.1f}",
            _difference(records, first),
            f"{fmean(record.num_calls for record in records):,.1f}",
            f"{fmean(record.prompt_tokens for record in records):,.0f}",
            f"{fmean(record.seconds for record in records):,.1f}",
            *(_share(records, name) for name in SHARES),
        ]


def _difference(records: Sequence[ItemRecord], first: Sequence[ItemRecord]) -> str:
    if records is first:
        return ""
    before = {_item(record): record.score for record in first}
    pairs = [one.score - before[_item(one)] for one in records if _item(one) in before]
    if not pairs:
        return ""
    found = paired_mean(pairs)
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def _item(record: ItemRecord) -> tuple[str, int | None, int]:
    return record.task, record.target_tokens, record.index


def _share(records: Sequence[ItemRecord], name: str) -> str:
    known = [value for record in records if (value := getattr(record, name)) is not None]
    return f"{fmean(known):.2f}" if known else "-"


def print_table(cells: dict[Cell, list[ItemRecord]]) -> None:
    lines = list(lines_of(cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


def run_dir_of(engine: str, options: argparse.Namespace) -> Path:
    name = engine.rpartition(":")[2].strip("/").replace("/", "-")
    return Path(options.run_dir, f"{options.part}-{name}")


async def run(options: argparse.Namespace) -> None:
    """Estimate, measure and print."""
    part = PARTS[options.part]
    requests = {engine: request_of(part, engine, options) for engine in options.engines}
    cells: dict[Cell, list[ItemRecord]] = {}
    for engine, request in requests.items():
        if options.estimate:
            await estimate(request, options.rate)
            continue
        folder = run_dir_of(engine, options)
        records = await measure(request, folder, model=engine, rate=options.rate)
        cells |= cells_of(engine, records, request.suite, by_task=part.by_task)
    if cells:
        print_table(cells)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--engine", action="append", dest="engines", help="repeatable; local:memagent-1.5b")
    add("--device")
    add("--lengths", nargs="+", metavar="LENGTH:NUM", help="such as 28K:16 448K:4")
    add("--tasks", nargs="+", help="some tasks of the suite")
    add("--set", action="append", dest="changes", default=[], metavar="NAME=VALUE")
    add("--run-dir", type=Path, default=Path("runs/mode_tables"))
    add("--rate", type=int, default=RATE, help="prompt tokens a second of the estimate")
    add("--estimate", action="store_true", help="print the estimate only")
    options = parser.parse_args(arguments)
    options.engines = options.engines or ["local:memagent-1.5b"]
    return options


def main() -> None:
    try:
        asyncio.run(run(parse_options()))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    except MemagentError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
