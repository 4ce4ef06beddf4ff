"""The time our reader adds to a model's own, beside bare loops and other libraries, in one run.

Every contender reads the same text through the same loopback endpoint, which answers at once with a
fixed memory of 400 characters; what is left is the reader's own cost per step. Contenders are
processes of their own and take turns, so that a busy moment of the machine affects all of them equally. The
others get sections of 5,000 tokens that were cut before their clock starts; memagent gets the file,
and loads, cuts and journals it within the clock.

    python -m benchmarks.reader --setup-peers          # once: makes .venv-peers*
    python -m benchmarks.reader --steps 200            # quick
    python -m benchmarks.reader --out reader.json      # all sections, three rounds
    python -m benchmarks.reader --latency-ms 50        # sections are cut while a reply is awaited

A second table shows how memagent's memory use and first call depend on the length of the text. A new
contender is a line in `CONTENDERS` and a script that takes `--base-url --sections --work-dir` and
prints a line as peers/harness.py does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tokenizer import smollm2_tokenizer
from memagent.documents.chunking import split
from memagent.documents.document import Document
from memagent.tokens.tokenizers import open_tokenizer
from tests.support.loopback import Endpoint, running

ROOT = Path(__file__).resolve().parents[1]
BOOKS = ROOT.parent / "shared" / "data" / "books"
SECTION_TOKENS = 5_000
MEMORY_CHARS = 400
SHARES = (0.1, 1.0)
"""Parts of the text for the table of memory use."""

OURS = Path(sys.prefix)
LANGCHAIN = ROOT / ".venv-peers"
LLAMA_INDEX = ROOT / ".venv-peers-llamaindex"
PEER_REQUIREMENTS: dict[Path, str] = {
    LANGCHAIN: "requirements-peers.txt",
    LLAMA_INDEX: "requirements-peers-llamaindex.txt",
}
"""LlamaIndex asks for openai<3, which would make the others 16 to 39 % slower."""


class Contender(NamedTuple):
    venv: Path
    script: str
    """In benchmarks/peers."""
    is_durable: bool
    """What was paid for survives a kill: a new run resumes where the old one was stopped."""


MEMAGENT = Contender(OURS, "memagent_reader.py", True)
CONTENDERS: dict[str, Contender] = {
    "memagent": MEMAGENT,
    "bare-httpx": Contender(OURS, "bare_httpx.py", False),
    "bare-openai": Contender(OURS, "bare_openai.py", False),
    "bare-openai-async": Contender(OURS, "bare_openai_async.py", False),
    "langchain": Contender(LANGCHAIN, "langchain_refine.py", False),
    "langchain-classic": Contender(LANGCHAIN, "langchain_classic_refine.py", False),
    "langchain-cached": Contender(LANGCHAIN, "langchain_cached.py", True),
    "langgraph": Contender(LANGCHAIN, "langgraph_refine.py", True),
    "llama-index": Contender(LLAMA_INDEX, "llamaindex_refine.py", False),
}


# --- the text -------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    return path.read_text()


def find_texts(given: Sequence[Path]) -> list[Path]:
    paths = list(given) or sorted(BOOKS.glob("*.txt.gz"))
    missing = [str(path) for path in paths if not path.is_file()]
    if not paths or missing:
        where = ", ".join(missing) or f"{BOOKS}/*.txt.gz"
        sys.exit(f"skipped: there is no text at {where}; name files with --text PATH...")
    return paths


class Material(NamedTuple):
    """What is read, as files: the whole text, and the sections it is cut into."""

    text: Path
    sections: Path
    num_sections: int
    tokenizer: str


def make_material(text: str, tokenizer: str, work: Path, *, steps: int | None = None) -> Material:
    """Cut the text as memagent would; keep the first `steps` sections."""
    cut = split(Document.from_text(text), open_tokenizer(tokenizer), chunk_tokens=SECTION_TOKENS)
    sections = [chunk.text for chunk in islice(cut, steps)]
    folder = Path(tempfile.mkdtemp(dir=work))
    (folder / "text.txt").write_text("".join(sections))
    (folder / "sections.json").write_text(json.dumps(sections))
    return Material(folder / "text.txt", folder / "sections.json", len(sections), tokenizer)


# --- the peers' environment -----------------------------------------------------------------------


def set_up_peers() -> None:
    for venv, requirements in PEER_REQUIREMENTS.items():
        set_up(venv, ROOT / "benchmarks" / requirements)


def set_up(venv: Path, requirements: Path) -> None:
    """Make a virtual environment; a dependency on torch stops it instead of filling the disk."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("torch<0\n")
        constraints.flush()
        install = [str(python_of(venv)), "-m", "pip", "install", "-q"]
        subprocess.run([*install, "-r", str(requirements), "-c", constraints.name], check=True)
    print(f"made {venv}")


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def choose(only: str | None) -> dict[str, Contender]:
    """The contenders to run: those asked for, without those whose environment is missing."""
    names = list(CONTENDERS) if only is None else only.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        sys.exit(f"unknown contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    chosen = {name: CONTENDERS[name] for name in names}
    ready = {name: c for name, c in chosen.items() if python_of(c.venv).exists()}
    if len(ready) < len(chosen):
        skipped = ", ".join(name for name in chosen if name not in ready)
        print(f"skipped: {skipped}: no peers environment; make it with --setup-peers")
    return ready


# --- running --------------------------------------------------------------------------------------


def contender_environment() -> dict[str, str]:
    """Ours, without what would make a library trace its calls or take a detour."""
    unwanted = ("LANGCHAIN_", "LANGSMITH_", "OPENAI_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(unwanted) and not name.lower().endswith("_proxy")
    }
    return {**kept, "PYTHONWARNINGS": "ignore"}


def run_once(
    contender: Contender, endpoint: Endpoint, material: Material, work: Path
) -> dict[str, Any]:
    """One contender, once, in a fresh folder: its result line and the calls the server saw."""
    folder = Path(tempfile.mkdtemp(dir=work))
    calls_before = endpoint.num_calls()
    given = ("--sections", str(material.sections))
    if contender is MEMAGENT:
        given = ("--text", str(material.text), "--tokenizer", material.tokenizer)
    command = [
        *(str(python_of(contender.venv)), str(ROOT / "benchmarks/peers" / contender.script)),
        *("--base-url", endpoint.base_url, "--work-dir", str(folder), *given),
    ]
    done = subprocess.run(
        command, env=contender_environment(), cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(folder)
    return {**result, "calls": endpoint.num_calls() - calls_before}


def run_rounds(
    contenders: dict[str, Contender],
    endpoint: Endpoint,
    material: Material,
    work: Path,
    *,
    repeat: int,
) -> dict[str, list[dict[str, Any]]]:
    """All results by contender; in every round each contender has one turn."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(repeat):
        for name, contender in contenders.items():
            result = run_once(contender, endpoint, material, work)
            results[name].append(result)
            report = f"round {number + 1}/{repeat} {name}: {result['ms_per_step']:.2f} ms/step"
            print(report, file=sys.stderr, flush=True)
    return results


def run_lengths(text: str, endpoint: Endpoint, tokenizer: str, work: Path) -> list[dict[str, Any]]:
    """Our reader alone, over a part of the text and over all of it."""
    parts = [text[: int(len(text) * share)] for share in SHARES]
    materials = [make_material(part, tokenizer, work) for part in parts]
    return [run_once(MEMAGENT, endpoint, material, work) for material in materials]


# --- the report -----------------------------------------------------------------------------------


def summarize(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    def values(field: str) -> list[float]:
        return [result[field] for result in results]

    return {
        "contender": name,
        "name": results[0]["name"],
        "steps": results[0]["steps"],
        "ms_per_step_median": statistics.median(values("ms_per_step")),
        "ms_per_step_min": min(values("ms_per_step")),
        "cpu_ms_per_step_median": statistics.median(values("cpu_ms_per_step")),
        "seconds_median": statistics.median(values("seconds")),
        "calls": sorted(set(values("calls"))),
        "peak_rss_mb": max(values("peak_rss_mb")),
        "import_rss_mb": max(values("import_rss_mb")),
        "is_durable": CONTENDERS[name].is_durable,
        "versions": results[0]["versions"],
    }


COLUMNS = (
    "contender",
    "ms/step",
    "ratio",
    "min",
    "cpu",
    "total s",
    "calls",
    "peak MB",
    "import MB",
    "durable",
)


def table(rows: list[dict[str, Any]]) -> str:
    """The contenders, with the time of each as a multiple of the bare openai loop's."""
    times = {row["contender"]: row["ms_per_step_median"] for row in rows}
    bare = times.get("bare-openai")
    cells = [
        (
            row["name"],
            f"{row['ms_per_step_median']:.2f}",
            f"{row['ms_per_step_median'] / bare:.2f}" if bare else "-",
            f"{row['ms_per_step_min']:.2f}",
            f"{row['cpu_ms_per_step_median']:.2f}",
            f"{row['seconds_median']:.2f}",
            "/".join(str(calls) for calls in row["calls"]),
            f"{row['peak_rss_mb']:.0f}",
            f"{row['import_rss_mb']:.0f}",
            "yes" if row["is_durable"] else "no",
        )
        for row in rows
    ]
    return aligned([COLUMNS, *cells])


LENGTH_COLUMNS = ("tokens", "calls", "ms/step", "first call s", "MB over import", "text MB", "rest")


def length_table(rows: list[dict[str, Any]]) -> str:
    """Memory use by length: above the process after its imports, with and without the text."""
    cells = []
    for row in rows:
        above = row["peak_rss_mb"] - row["import_rss_mb"]
        cells.append(
            (
                f"{row['text_tokens']:,}",
                str(row["calls"]),
                f"{row['ms_per_step']:.2f}",
                f"{row['first_call_s']:.2f}",
                f"{above:.0f}",
                f"{row['text_mb']:.0f}",
                f"{above - row['text_mb']:.0f}",
            )
        )
    return aligned([LENGTH_COLUMNS, *cells])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reader", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--setup-peers",
        action="store_true",
        help="make the virtual environments of the peers and stop",
    )
    add("--text", type=Path, nargs="+", default=[], help="texts to read instead of the novels")
    add("--tokenizer", help="folder of a Hugging Face tokenizer; SmolLM2's where absent")
    add("--steps", type=int, help="read the first so many sections; all where absent")
    add("--repeat", type=int, default=3)
    add("--latency-ms", type=float, default=0, help="the time the endpoint takes for a reply")
    add("--only", help="contenders, separated by commas")
    add("--out", type=Path, help="write all results as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.setup_peers:
        set_up_peers()
        return
    text = "\n".join(read_text(path) for path in find_texts(arguments.text))
    contenders = choose(arguments.only)
    tokenizer = arguments.tokenizer or str(smollm2_tokenizer())
    runs = ROOT / "runs"
    runs.mkdir(exist_ok=True)
    with (
        # beside the project, not in /tmp: durable contenders must write to a real disk
        tempfile.TemporaryDirectory(dir=runs, prefix="benchmark-") as folder,
        running(
            reply="fixed", reply_chars=MEMORY_CHARS, latency_ms=arguments.latency_ms
        ) as endpoint,
    ):
        work = Path(folder)
        material = make_material(text, tokenizer, work, steps=arguments.steps)
        print(
            f"{material.num_sections} sections of at most {SECTION_TOKENS:,} tokens; medians of {arguments.repeat}"
        )
        results = run_rounds(contenders, endpoint, material, work, repeat=arguments.repeat)
        lengths = [] if arguments.steps else run_lengths(text, endpoint, tokenizer, work)
    rows = [summarize(name, results[name]) for name in contenders]
    print(table(rows))
    if lengths:
        print(f"\nmemagent by length\n{length_table(lengths)}")
    if arguments.out is not None:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
        report = {"machine": machine, "rows": rows, "lengths": lengths, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
