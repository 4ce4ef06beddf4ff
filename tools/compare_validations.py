"""Validations of a training run as a table: accuracy by task and length, and what became of the evidence.

    python tools/compare_validations.py RUN                    # the first and the last validation
    python tools/compare_validations.py RUN/validation/step-000000.jsonl OTHER/validation/step-000060.jsonl

Right is the reward of training. Captured and retained are the questions whose evidence was, word for word, in any of
the memories and in the last one. Differences are of the second file to the first, on the same questions.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from memagent.eval.records import ItemRecord
from memagent.eval.stats import compare, mean_interval
from memagent.run_files import read_lines

Kind = tuple[str, int]


def read(path: Path) -> dict[Kind, list[ItemRecord]]:
    """Records by task and length, in the order of their ids."""
    found: dict[Kind, list[ItemRecord]] = defaultdict(list)
    for values, _ in read_lines(path):
        record = ItemRecord.from_dict(values)
        found[record.task, record.target_tokens or 0].append(record)
    return {kind: sorted(found[kind], key=lambda record: record.id) for kind in sorted(found)}


def row(records: Sequence[ItemRecord]) -> list[str]:
    """Figures of one task and length."""
    right = mean_interval([record.score for record in records])
    kept = [one for record in records if "captured" in (one := _metrics(record))]
    cells = [
        f"{len(records)}",
        f"{100 * right.value:.1f} % ({100 * right.low:.1f} to {100 * right.high:.1f})",
    ]
    for name in ("captured", "retained"):
        whole = [float(one[name] == 1.0) for one in kept]
        cells.append(f"{100 * fmean(whole):.1f} %" if whole else "-")
    holds = [record for record in records if _metrics(record).get("retained") == 1.0]
    cells.append(f"{sum(record.score == 1.0 for record in holds)} of {len(holds)}")
    for name in ("memory_tokens", "kept_memories", "sections"):
        cells.append(f"{fmean(_metrics(record).get(name, 0.0) for record in records):.1f}")
    return cells


def _metrics(record: ItemRecord) -> dict[str, Any]:
    found: dict[str, Any] = record.metadata.get("method", {}).get("metrics", {})
    return found


def table(files: Sequence[Path]) -> Iterable[str]:
    yield "| task | length | questions | right | captured | retained | right if retained | tokens of a reply | sections kept | sections |"
    yield "|" + " --- |" * 10
    read_files = [read(path) for path in files]
    for path, kinds in zip(files, read_files, strict=True):
        yield f"| **{path.parent.parent.name}/{path.stem}** |" + " |" * 9
        for (task, length), records in kinds.items():
            yield f"| {task} | {length} | " + " | ".join(row(records)) + " |"
    if len(read_files) < 2:
        return
    yield ""
    first, second = read_files[0], read_files[-1]
    for kind in first.keys() & second.keys():
        scores = [{record.id: record.score for record in some[kind]} for some in (first, second)]
        ids = sorted(scores[0].keys() & scores[1].keys())
        found = compare([scores[1][one] for one in ids], [scores[0][one] for one in ids])
        change = found.difference
        yield (
            f"{kind[0]} at {kind[1]}: {100 * change.value:+.1f} points ({100 * change.low:+.1f} to "
            f"{100 * change.high:+.1f}; {found.num_better} better, {found.num_worse} worse, p = {found.p_value:.3g})"
        )


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit(__doc__)
    files = [
        file
        for path in paths
        for file in (sorted((path / "validation").glob("*.jsonl")) if path.is_dir() else [path])
    ]
    sys.stdout.write("\n".join(table([files[0], files[-1]] if len(files) > 1 else files)) + "\n")


if __name__ == "__main__":
    main()
