"""Runs of an evaluation as small records, which `tools/make_results.py` makes the results page from.

    python tools/keep_results.py results/trained RUN...                        # runs of memagent eval
    python tools/keep_results.py results/base RUN --method direct --method bm25    # only these methods of it
    python tools/keep_results.py results/trained --validation FILE --model memagent-1.5b    # a validation of a training run

Each becomes a folder that `memagent report` reads too: a manifest without paths, and records without traces. What
traces say about reading is kept as numbers: seconds of a section, tokens of a reply, memories that were kept or cut.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from memagent.eval.records import ItemRecord, read_evaluation, read_items
from memagent.files import write_atomically
from memagent.rewards.verifiers import grade
from memagent.run_files import read_lines
from memagent.runs import read_manifest

FIRST_SECTIONS = 14
"""Sections of 2,048 tokens in a text of 28K: the first of a long reading are compared with all of it."""
MAX_ANSWER_CHARS = 300
KEPT = (
    "memagent",
    "created",
    "model",
    "suite",
    "seed",
    "length_tokenizer",
    "num_items",
    "methods",
    "sources",
)
"""Fields of a manifest that say nothing about the machine."""
VALIDATION_GRADERS = {
    "hotpotqa": ("original_sub_em_boxed", "lenient", "f1"),
    "ruler": ("original_ruler_boxed",),
}
"""Further graders, by group of tasks; the score of a validation is `strict`."""


def reading(trace: dict[str, Any]) -> dict[str, float]:
    """What a trace says about its sections; empty for a method that reads none."""
    steps = [step for step in trace.get("steps", ()) if step["kind"] == "read"]
    if not steps:
        return {}
    seconds = [float(step.get("seconds") or 0.0) for step in steps]
    replies = [float((step.get("usage") or {}).get("completion_tokens", 0)) for step in steps]
    flags = [set(step.get("flags") or ()) for step in steps]
    return {
        "section_seconds": round(fmean(seconds), 4),
        "first_section_seconds": round(fmean(seconds[:FIRST_SECTIONS]), 4),
        "reply_tokens": round(fmean(replies), 1),
        "kept_memories": sum("memory_kept" in some for some in flags),
        "cut_memories": sum("memory_cut" in some for some in flags),
    }


def _reading(record: ItemRecord) -> dict[str, float]:
    """From the trace, or as an earlier call has kept it."""
    kept: dict[str, float] = record.metadata.get("reading", {})
    return reading(record.trace) or kept


def small(record: ItemRecord) -> dict[str, Any]:
    """A record without its trace and without what has its default."""
    record = replace(
        record,
        answer=record.answer[-MAX_ANSWER_CHARS:],
        depth=None if record.depth is None else round(record.depth, 4),
        depths=tuple(round(depth, 4) for depth in record.depths),
        extracted=None,
        seconds=round(record.seconds, 2),
        metadata={"reading": found} if (found := _reading(record)) else {},
        trace={},
    )
    defaults = {
        one.name: one.default_factory() if one.default_factory is not MISSING else one.default
        for one in fields(ItemRecord)
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for one in fields(ItemRecord)
        if (value := getattr(record, name := one.name)) != defaults[name]
    }


def keep(out: Path, manifest: dict[str, Any], records: Iterable[ItemRecord]) -> None:
    """Write a manifest and small records, in the order of their items."""
    kept = sorted(
        records,
        key=lambda one: (one.task, one.target_tokens or 0, one.method, one.index, one.sample),
    )
    lines = [json.dumps(small(one), ensure_ascii=False, separators=(",", ":")) for one in kept]
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "run.json", (json.dumps(manifest, indent=1) + "\n").encode())
    write_atomically(out / "steps.jsonl", "".join(f"{line}\n" for line in lines).encode())


def of_run(run: Path, methods: Sequence[str] = ()) -> tuple[dict[str, Any], Iterable[ItemRecord]]:
    """The manifest and the records of an evaluation, of all its methods or of some."""
    read_evaluation(run)  # refuses other kinds of runs
    manifest = read_manifest(run)
    kept = {
        "format": manifest.get("format", 1),
        "kind": "eval",
        **{name: manifest[name] for name in KEPT if manifest.get(name) is not None},
        "model": Path(manifest.get("model", "")).name,
    }
    if not methods:
        return kept, read_items(run)
    if unknown := sorted(set(methods) - set(kept["methods"])):
        raise SystemExit(f"{run} has no method {unknown[0]}, only {', '.join(kept['methods'])}")
    records = [record for record in read_items(run) if record.method in methods]
    some = {name: one for name, one in kept["methods"].items() if name in methods}
    return {**kept, "num_items": len(records), "methods": some}, records


def of_validation(file: Path, model: str) -> dict[str, tuple[dict[str, Any], list[ItemRecord]]]:
    """A manifest and records for each task group and length of a validation."""
    found: dict[str, list[ItemRecord]] = defaultdict(list)
    for values, _ in read_lines(file):
        record = ItemRecord.from_dict(values)
        group = record.task.partition("/")[0]
        found[f"{group}-{(record.target_tokens or 0) // 1024}k"].append(_graded(record, group))
    manifest = {
        **{"format": 1, "kind": "eval", "model": model, "suite": "validation", "seed": 7},
        **{"length_tokenizer": "qwen2.5-coder-1.5b", "methods": {"reader": {}}},
    }
    return {name: ({**manifest, "num_items": len(some)}, some) for name, some in found.items()}


def _graded(record: ItemRecord, group: str) -> ItemRecord:
    """A record of a validation as an evaluation has it."""
    metrics: dict[str, float] = record.metadata.get("method", {}).get("metrics", {})
    match = record.match or "any"
    scores = {
        name: grade(name, record.answer, record.answers, match).value
        for name in VALIDATION_GRADERS.get(group, ())
    }
    return replace(
        record,
        method="reader",
        grader="strict",
        scores=scores,
        captured=metrics.get("captured"),
        retained=metrics.get("retained"),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path, help="folder of a method, such as results/trained")
    parser.add_argument("runs", type=Path, nargs="*", help="runs of memagent eval")
    parser.add_argument("--method", action="append", default=[], help="keep only this method")
    parser.add_argument("--validation", type=Path, help="file of a training run's validation")
    parser.add_argument("--model", default="memagent-1.5b", help="model of the validation")
    given = parser.parse_args(arguments)
    for run in given.runs:
        keep(given.out / run.resolve().name, *of_run(run, given.method))
    if given.validation:
        for name, (manifest, records) in of_validation(given.validation, given.model).items():
            keep(given.out / name, manifest, records)


if __name__ == "__main__":
    main()
