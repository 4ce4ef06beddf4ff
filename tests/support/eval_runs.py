"""Run directories of evaluations with known scores, as the runner writes them, without a model.

make_run(folder, [item("hotpotqa", "reader", 7000, index, score=1.0) for index in range(8)])
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memagent.eval.records import KIND, ItemRecord
from memagent.runs import Run

MODEL = "lab/tiny-7B"
LENGTHS = (8192, 32768, 131072)


def item(
    task: str, method: str, tokens: int | None, index: int, *, score: float = 1.0, **values: Any
) -> ItemRecord:
    """A finished item. Its numbers are simple: 10 calls, 1,000 tokens in, 50 out, 2 seconds."""
    defaults: dict[str, Any] = {
        "id": f"{task}-{tokens}-{index}",
        "num_tokens": tokens,
        "seed": index,
        "status": "ok",
        "answer": "so",
        "answers": ("so",),
        "grader": "lenient",
        "num_calls": 10,
        "prompt_tokens": 1000,
        "completion_tokens": 50,
        "seconds": 2.0,
        "trace": {},
    }
    place = {"task": task, "method": method, "target_tokens": tokens, "index": index}
    return ItemRecord(**{**defaults, **place, "score": score, **values})


def failed(task: str, method: str, tokens: int | None, index: int, **values: Any) -> ItemRecord:
    """An item that failed for good."""
    gone = {"status": "failed", "error": "the endpoint failed", "answer": "", "score": 0.0}
    return item(task, method, tokens, index, **{**gone, **values})


def make_run(
    folder: Path, items: Sequence[ItemRecord], *, num_planned: int | None = None, **manifest: Any
) -> Path:
    """A run directory that holds these items."""
    methods = {one.method: {"name": one.method, "settings": {"window": 8192}} for one in items}
    contents = {
        "kind": KIND,
        "created": "2026-03-01T09:30:00+01:00",
        "memagent": "0.1.0",
        "model": MODEL,
        "tokenizer": "bytes",
        "length_tokenizer": "smollm2-135m",
        "methods": methods,
        "suite": "test",
        "seed": 7,
        "num_items": len(items) if num_planned is None else num_planned,
        **manifest,
    }
    with Run.create(folder, contents) as run:
        for one in items:
            run.append(one.to_json())
    return folder


def lifelike(
    tasks: Sequence[str],
    *,
    methods: Sequence[str] = ("reader", "direct"),
    lengths: Sequence[int] = LENGTHS,
    num: int = 40,
    seed: int = 0,
) -> list[ItemRecord]:
    """Items as an evaluation gives them: direct reading falls with length, some items fail."""
    rng = random.Random(seed)
    items = []
    for task in tasks:
        for method in methods:
            for place, tokens in enumerate(lengths):
                chance = 0.85 if method == "reader" else 0.9 - 0.25 * place
                for index in range(num):
                    calls = tokens // 5000 + 2 if method == "reader" else 1
                    make = failed if rng.random() < 0.05 else item
                    score = float(rng.random() < chance) if make is item else 0.0
                    items.append(
                        make(
                            task,
                            method,
                            tokens,
                            index,
                            score=score,
                            depth=random.Random(f"{task}{index}").random(),
                            num_calls=calls,
                            prompt_tokens=tokens + 500 * calls,
                            completion_tokens=200 * calls,
                            seconds=0.5 * calls,
                            is_cut=method == "direct" and tokens > 100_000,
                        )
                    )
    return items
