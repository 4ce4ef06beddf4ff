"""How long the viewer takes for large runs, in processor time of the server.

    python -m benchmarks.viewer

    10,000 items, 234 MB    first view 0.51 s    items 0.14 s    one trace 0.08 s
    1,000 steps, 1 MB    first view 0.07 s    one step 0.02 s

A first view is what the server does from its start until the page of the run is shown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memagent.run_files import LineFile
from memagent.viewer.api import ViewerApi
from memagent.viewer.library import Library
from tests.support.eval_runs import item, make_run
from tests.support.viewer_runs import make_reading, trace_of


def main() -> None:
    """Make the runs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(_of_items(Path(folder) / "evaluation", options.items))
        print(_of_steps(Path(folder) / "reading", options.steps))


def _of_items(path: Path, num: int) -> str:
    trace = trace_of(24)
    items = [
        item("hotpotqa", method, 8192, index, score=float(index % 3 > 0), trace=trace)
        for method in ("reader", "direct")
        for index in range(num // 2)
    ]
    make_run(path, items[:1], num_planned=num)
    with LineFile(path / "steps.jsonl", sync=False, checksums=True) as lines:
        lines.append(*(each.to_json() for each in items[1:]))
    api, run = _opened(path)
    return "    ".join(
        [
            f"{num:,} items, {_megabytes(path):.0f} MB",
            _timed("first view", lambda: (api.runs(), api.run(run), api.cells(run))),
            _timed("items", lambda: api.items(run, offset=num // 2)),
            _timed("one trace", lambda: api.trace(run, f"i{num // 2}")),
        ]
    )


def _of_steps(path: Path, num: int) -> str:
    make_reading(path, num_sections=num)
    api, run = _opened(path)
    return "    ".join(
        [
            f"{num:,} steps, {_megabytes(path):.0f} MB",
            _timed("first view", lambda: (api.runs(), api.run(run), api.trace(run, "q0"))),
            _timed("one step", lambda: api.step(run, "q0", num // 2)),
        ]
    )


def _opened(path: Path) -> tuple[ViewerApi, str]:
    """A viewer that has read nothing yet, and the id of the run."""
    [listed] = ViewerApi(Library([path])).runs()["runs"]
    return ViewerApi(Library([path])), str(listed["id"])


def _megabytes(path: Path) -> float:
    return (path / "steps.jsonl").stat().st_size / 1e6


def _timed(name: str, work: Callable[[], object]) -> str:
    started = time.process_time()
    work()
    return f"{name} {time.process_time() - started:.2f} s"


if __name__ == "__main__":
    main()
