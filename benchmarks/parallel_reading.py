"""How much sooner an answer comes when sections are read in parallel, at the same accuracy.

One text with facts at known depths is read through a loopback endpoint that takes a fixed time for every call,
however many there are, and replies by rule: it notes the fact in question where the section has it, and nothing
where it has not. Each mode answers the same questions, one after the other, with every step on disk. What differs
is how many calls have to wait for each other.

    python -m benchmarks.parallel_reading                     # 3.5M tokens, 700 sections
    python -m benchmarks.parallel_reading --tokens 448000 --latency-ms 500

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from memagent import Document, Reader, open_engine
from memagent.agent.trace import Trace
from memagent.tokens.tokenizers import Tokenizer, open_tokenizer
from tests.conftest import prose
from tests.support.loopback import running

KEYS = ("bell", "ferry", "orchard", "lantern", "quarry", "tannery", "weir", "gallows")
PARAGRAPH = 12
"""Sentences between places where a fact may stand."""


class Row(NamedTuple):
    """One mode."""

    mode: str
    seconds: float
    """Of one question, on average."""
    calls: float
    in_a_row: int
    """Calls that have to wait for each other, however fast the machine is that reads."""
    num_right: int
    num_asked: int
    times_faster: float


def build_text(num_tokens: int, keys: tuple[str, ...], tokenizer: Tokenizer) -> str:
    """Invented prose with a fact for each key, at depths that are spread over the text."""
    block = [prose(PARAGRAPH, seed=seed) for seed in range(200)]
    sample = "".join(block)
    num_chars = num_tokens * len(sample) // tokenizer.count(sample)
    parts: list[str] = []
    size = number = 0
    while size < num_chars:
        parts.append(f"{block[number % len(block)].strip()}\n\n")
        size += len(parts[-1])
        number += 1
    for place, key in enumerate(keys):
        at = (place * len(parts) + len(parts) // 2) // len(keys)
        parts[at] = f"The price of the {key} is {value_of(key)}.\n\n" + parts[at]
    return "".join(parts)


def value_of(key: str) -> str:
    """What the text says about a key."""
    return f"{sum(key.encode()) * 37} crowns"


def ask_all(reader: Reader, document: Document, keys: tuple[str, ...], folder: Path) -> list[Trace]:
    """One question after the other, so that no question speeds up another."""
    return [
        reader.ask(f'What is the price? It is given for "{key}".', document, run_dir=folder / key)
        for key in keys
    ]


def measure(options: argparse.Namespace) -> list[Row]:
    """All modes on the same text and questions."""
    keys = KEYS[: options.questions]
    tokenizer = open_tokenizer(options.tokenizer)
    document = Document.from_text(build_text(options.tokens, keys, tokenizer))
    modes: dict[str, dict[str, Any]] = {
        "in order": {},
        "parallel": {"mode": "parallel"},
    }
    found: list[Row] = []
    with (
        running(log=None, reply="keyword", latency_ms=options.latency_ms) as endpoint,
        tempfile.TemporaryDirectory() as folder,
    ):
        for number, (name, settings) in enumerate(modes.items()):
            engine = open_engine(
                "openai:test-model", base_url=endpoint.base_url, concurrency=options.concurrency
            )
            reader = Reader(
                engine, tokenizer=tokenizer, chunk_tokens=options.chunk_tokens, **settings
            )
            began = time.perf_counter()
            traces = ask_all(reader, document, keys, Path(folder) / str(number))
            seconds = (time.perf_counter() - began) / len(keys)
            engine.close()
            in_a_row = max(calls_in_a_row(trace, options) for trace in traces)
            found.append(_row(name, keys, traces, seconds, found, in_a_row))
    return found


def calls_in_a_row(trace: Trace, options: argparse.Namespace) -> int:
    """The calls of a reading that wait for others, where as many are sent at once as may be."""
    at_once = Counter(step.round for step in trace.steps if step.kind == "read")
    num_merges = sum(step.kind == "merge" for step in trace.steps)
    lanes = 1 if None in at_once else options.concurrency
    return sum(-(-num // lanes) for num in at_once.values()) + num_merges + 1


def _row(
    mode: str,
    keys: tuple[str, ...],
    traces: list[Trace],
    seconds: float,
    before: list[Row],
    in_a_row: int,
) -> Row:
    answers = [trace.final_answer for trace in traces]
    return Row(
        mode=mode,
        seconds=round(seconds, 2),
        calls=sum(trace.usage.calls for trace in traces) / len(traces),
        in_a_row=in_a_row,
        num_right=sum(value_of(key) == said for key, said in zip(keys, answers, strict=True)),
        num_asked=len(keys),
        times_faster=round((before[0].seconds if before else seconds) / seconds, 1),
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--tokens", type=int, default=3_500_000)
    add("--chunk-tokens", type=int, default=5_000)
    add("--latency-ms", type=float, default=2000.0)
    add("--concurrency", type=int, default=64)
    add("--questions", type=int, default=1, choices=range(1, len(KEYS) + 1))
    add("--tokenizer", default="estimate")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_options()
    rows = measure(options)
    print(
        f"{options.tokens:,} tokens, {options.latency_ms:g} ms a call, {options.concurrency} at once"
    )
    print(f"{'mode':<14}{'seconds':>9}{'calls':>8}{'in a row':>10}{'right':>9}{'faster':>9}")
    for row in rows:
        right = f"{row.num_right}/{row.num_asked}"
        print(
            f"{row.mode:<14}{row.seconds:>9.1f}{row.calls:>8.0f}{row.in_a_row:>10}{right:>9}{row.times_faster:>8.1f}x"
        )
    print(json.dumps([row._asdict() for row in rows]))


if __name__ == "__main__":
    main()
