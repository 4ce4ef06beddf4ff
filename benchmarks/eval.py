"""How busy an evaluation keeps an endpoint: concurrent calls over allowed calls, as the endpoint sees it.

    memagent eval ──── 16 calls at once ────▶ loopback endpoint, 50 ms a call, in its own process
          └── examples generated in worker processes

The endpoint sums the durations of all calls. Divided by the time from the first call's start to the last
one's end and by the 16 slots, that is the busy share. It includes the tail, in which few items are left.

    python -m benchmarks.eval                       # 500 items at each of 5 lengths
    python -m benchmarks.eval --num 50 --out eval.json

Texts are short, so that thousands of items finish in minutes: 500 to 2,500 tokens in sections of 250, or
3 to 11 calls per item.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.loopback import running

MEMAGENT = Path(sys.executable).parent / "memagent"
LENGTHS = (2000, 4000, 6000, 8000, 10000)
"""In bytes, which is how the lengths are counted here: about 500 to 2,500 tokens."""
SECTION = 1000
LATENCY_MS = 50.0
REQUIRED_SHARE = 0.95


def measure(*, num: int, concurrency: int, method: str, work: Path) -> dict[str, Any]:
    """One evaluation against a fresh endpoint."""
    with running(latency_ms=LATENCY_MS, max_concurrency=concurrency, reply="keyword") as endpoint:
        command = [
            *(str(MEMAGENT), "eval", "--task", "ruler/niah_multikey_2"),
            *("--lengths", ",".join(map(str, LENGTHS)), "--num", str(num), "--method", method),
            *("--base-url", endpoint.base_url, "--model", "test-model"),
            *("--set", "tokenizer=bytes", "--set", "length_tokenizer=bytes"),
            *("--set", "window=6000", "--set", f"chunk_tokens={SECTION}"),
            *(
                "--set",
                "memory_tokens=400",
                "--set",
                "answer_tokens=200",
                "--concurrency",
                str(concurrency),
            ),
            *("--run-dir", str(work / f"run-{time.time_ns()}"), "--json", "--quiet"),
        ]
        clock = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=False)
        seconds = time.perf_counter() - clock
        if done.returncode:
            sys.exit(f"memagent eval failed: {done.stderr.decode()}")
        stats = endpoint.stats()
    rows = json.loads(done.stdout)
    return {
        "items": sum(row["num"] for row in rows),
        "failed": sum(row["num_failed"] for row in rows),
        "calls": int(stats["calls"]),
        "seconds": seconds,
        "span_seconds": stats["span_seconds"],
        "calls_per_second": stats["calls"] / stats["span_seconds"],
        "busy_share": stats["call_seconds"] / (stats["span_seconds"] * concurrency),
    }


def main() -> None:
    """Measure, print, and fail where the endpoint was less busy than required."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num", type=int, default=500, help="items at each of the five lengths")
    parser.add_argument("--concurrency", type=int, default=16, help="calls allowed at once")
    parser.add_argument("--method", default="reader")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        figures = measure(
            num=arguments.num,
            concurrency=arguments.concurrency,
            method=arguments.method,
            work=Path(work),
        )
    print(f"{figures['items']:,} items, {figures['failed']:,} failed, {figures['calls']:,} calls")
    print(f"command {figures['seconds']:.1f} s, calls {figures['span_seconds']:.1f} s")
    print(f"{figures['calls_per_second']:.1f} calls/s on {os.cpu_count()} cores")
    print(f"busy {100 * figures['busy_share']:.1f} % of {arguments.concurrency} calls at once")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["busy_share"] < REQUIRED_SHARE:
        sys.exit(f"the endpoint was busy less than {100 * REQUIRED_SHARE:.0f} %")


if __name__ == "__main__":
    main()
