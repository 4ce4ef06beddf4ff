"""Our reader. Cuts the text itself while it reads; every step is on disk before the next call.

Takes the whole text instead of sections, and also reports when the first call left and how much memory
was needed beyond what the imports took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from importlib.metadata import version
from pathlib import Path

from harness import API_KEY, MODEL, QUESTION, memory_mb

from memagent import Document, Reader, open_engine
from memagent.agent.trace import Trace
from memagent.documents import loaders  # noqa: F401  imported before memory is measured
from memagent.engines import openai  # noqa: F401
from memagent.tokens import tokenizers  # noqa: F401


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--work-dir", type=Path, default=Path())
    return parser.parse_args()


async def read(options: argparse.Namespace) -> tuple[Trace, Document]:
    document = Document.load(options.text)
    engine = open_engine(f"openai:{MODEL}", base_url=options.base_url, api_key=API_KEY)
    reader = Reader(engine, tokenizer=options.tokenizer)
    trace = await reader.aask(QUESTION, document, run_dir=options.work_dir / "run")
    await engine.aclose()
    return trace, document


def main() -> None:
    options = parse_options()
    import_rss_mb = memory_mb("VmRSS")
    began, wall, cpu = time.time(), time.perf_counter(), time.process_time()
    trace, document = asyncio.run(read(options))
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    num_steps = len(trace.steps)
    assert trace.answer, "memagent ended without an answer"
    result = {
        "name": "memagent",
        "steps": num_steps,
        "seconds": round(seconds, 3),
        "ms_per_step": round(seconds * 1000 / num_steps, 3),
        "cpu_ms_per_step": round(cpu_seconds * 1000 / num_steps, 3),
        "peak_rss_mb": memory_mb("VmHWM"),
        "import_rss_mb": import_rss_mb,
        "first_call_s": round(trace.steps[0].started - began, 3),
        "text_tokens": sum(step.section.num_tokens for step in trace.steps if step.section),
        "text_mb": round(document.text.__sizeof__() / 2**20, 1),
        "versions": {package: version(package) for package in ("memagent", "openai")},
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
