"""What every contender of benchmarks/reader.py shares: the prompt, the clock and the result line.

A contender is a script that hands `run` a function from (options, sections) to the last memory:

    python benchmarks/peers/bare_httpx.py --base-url http://127.0.0.1:8000/v1 --sections s.json

It prints one JSON line. The clock covers making the client and reading all sections; importing
libraries and loading the sections come before it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

MODEL = "test-model"
API_KEY = "none"
MAX_TOKENS = 1024
QUESTION = "What happens to the people in these books, and why?"
NO_MEMORY = "No memory yet."
PROMPT = """You read a long text section by section and keep a memory of what matters for a question.
Rewrite the memory: keep what still helps to answer the question, add what this section tells about it, and \
leave out the rest. Reply with the new memory only.

<question>{question}</question>

<memory>
{memory}
</memory>

<section>
{section}
</section>

New memory:"""


def user_message(section: str, memory: str) -> list[dict[str, str]]:
    content = PROMPT.format(question=QUESTION, memory=memory, section=section)
    return [{"role": "user", "content": content}]


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (highest so far) of this process.

    Not `getrusage`: its peak is inherited from the parent process.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    raise LookupError(f"/proc/self/status has no {field}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--sections", type=Path, required=True, help="JSON list of texts")
    parser.add_argument("--limit", type=int, help="read the first so many sections")
    parser.add_argument("--work-dir", type=Path, default=Path(), help="where databases go")
    return parser.parse_args()


def run(
    name: str,
    read: Callable[[argparse.Namespace, list[str]], str],
    *,
    packages: Sequence[str],
) -> None:
    """Time `read` over the sections and print the result; it must return the last memory."""
    options = parse_options()
    import_rss_mb = memory_mb("VmRSS")
    sections = json.loads(options.sections.read_text())[: options.limit]
    wall, cpu = time.perf_counter(), time.process_time()
    memory = read(options, sections)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    assert memory, f"{name} ended without a memory"
    result = {
        "name": name,
        "steps": len(sections),
        "seconds": round(seconds, 3),
        "ms_per_step": round(seconds * 1000 / len(sections), 3),
        "cpu_ms_per_step": round(cpu_seconds * 1000 / len(sections), 3),
        "peak_rss_mb": memory_mb("VmHWM"),
        "import_rss_mb": import_rss_mb,
        "versions": {package: version(package) for package in packages},
    }
    print(json.dumps(result), flush=True)
