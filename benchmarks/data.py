"""Throughput of generating long examples: HotpotQA-long as a stream, against the tokenizer alone.

python -m benchmarks.data [--num 128] [--tokens 3500000] [--source FOLDER] [--tokenizer NAME]

Each example is generated (question, fillers, order, text, fingerprint), its length counted by the
tokenizer, and its line written to disk with its origin in place of its text. Then the same tokenizer counts
the same text once more; that time is measured separately. One process, one pass. Token counts of the pool
are on disk after the first example, which is generated before the clock starts and reported separately.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from memagent.data.build import stored_example
from memagent.data.tasks.hotpotqa import HotpotTask, open_hotpotqa
from memagent.data.tasks.lengths import length_tokenizer

SOURCES = Path(__file__).resolve().parents[1] / ".." / "shared" / "data" / "hotpotqa"
LEAST_RATIO = 0.5
MOST_MEGABYTES = 1000


def peak_megabytes() -> float:
    """Peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def open_task(source: Path, tokens: int, tokenizer: str) -> HotpotTask:
    settings = {"dev": str(source), "paragraphs": str(source), "tokens": tokens, "seed": 7}
    return open_hotpotqa("hotpotqa", {**settings, "tokenizer": tokenizer})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--num", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=3_500_000)
    parser.add_argument("--source", type=Path, default=SOURCES)
    parser.add_argument("--tokenizer", default="smollm2-135m")
    arguments = parser.parse_args()

    started = time.perf_counter()
    task = open_task(arguments.source, arguments.tokens, arguments.tokenizer)
    stored_example(task.example(0), "auto")
    print(f"opening and the first example: {time.perf_counter() - started:.1f} s")

    count = length_tokenizer(arguments.tokenizer).count
    num_tokens = num_bytes = 0
    seconds_generating = seconds_counting = 0.0
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "x.jsonl").open("wb") as file:
        for index in range(arguments.num):
            started = time.perf_counter()
            example = task.example(index)
            line = stored_example(example, "auto").line + b"\n"
            file.write(line)
            file.flush()
            seconds_generating += time.perf_counter() - started
            text = example.text()
            started = time.perf_counter()
            counted = count(text)
            seconds_counting += time.perf_counter() - started
            assert counted == example.num_tokens
            assert 0.98 * arguments.tokens <= counted <= arguments.tokens
            num_tokens += counted
            num_bytes += len(line)

    generating, counting = num_tokens / seconds_generating, num_tokens / seconds_counting
    print(
        f"{arguments.num} examples of {num_tokens / arguments.num:,.0f} tokens: {seconds_generating:.1f} s"
    )
    print(f"generating, with lengths: {generating / 1e6:6.1f} million tokens/s")
    print(f"tokenizer alone:          {counting / 1e6:6.1f} million tokens/s")
    print(f"ratio:                    {generating / counting:6.2f}  (at least {LEAST_RATIO})")
    print(f"peak memory:              {peak_megabytes():6.0f} MB (below {MOST_MEGABYTES})")
    print(f"on disk:                  {num_bytes / arguments.num / 1e3:6.1f} kB an example")
    is_good = generating / counting >= LEAST_RATIO and peak_megabytes() < MOST_MEGABYTES
    sys.exit(os.EX_OK if is_good else 1)


if __name__ == "__main__":
    main()
