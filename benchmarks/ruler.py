"""Time to generate one long example of each RULER task.

python -m benchmarks.ruler [--tokens 4000000] [--sources FOLDER] [--tokenizer NAME]

One process. A line per task: seconds to open it (sources are read and cached), seconds to generate the
first example, its length, and the share of the requested length. Fails when a task takes more than
`MOST_SECONDS` or misses its length by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from memagent.data.tasks.lengths import LEAST_SHARE, length_tokenizer
from memagent.data.tasks.registry import TASKS, open_task

SOURCES = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
MOST_SECONDS = 10.0


def sources_of(task: str, folder: Path) -> dict[str, Any]:
    if task == "ruler/qa_1":
        return {"questions": str(folder / "squad")}
    if task == "ruler/qa_2":
        hotpotqa = str(folder / "hotpotqa")
        return {"questions": hotpotqa, "paragraphs": hotpotqa}
    return {"essays": str(folder / "books")} if task.startswith("ruler/niah") else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ruler", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--tokenizer", default="smollm2-135m")
    arguments = parser.parse_args()

    length_tokenizer(arguments.tokenizer)
    is_good = True
    print(f"{'task':24}{'open s':>8}{'gen s':>8}{'tokens':>12}{'share':>8}")
    for name in TASKS:
        if not name.startswith("ruler/"):
            continue
        settings = {"tokens": arguments.tokens, "tokenizer": arguments.tokenizer}
        started = time.perf_counter()
        task = open_task(name, {**settings, **sources_of(name, arguments.sources)})
        opened = time.perf_counter()
        num_tokens = task.example(0).num_tokens or 0
        made = time.perf_counter()
        share = num_tokens / arguments.tokens
        print(f"{name:24}{opened - started:8.2f}{made - opened:8.2f}{num_tokens:12,}{share:8.3f}")
        is_good &= made - started < MOST_SECONDS and LEAST_SHARE <= share <= 1
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
