"""What we do by hand beside the library that also does it, for docs/design/by-hand.md.

    pip install ijson gguf markdownify inscriptis charset-normalizer      # in an environment of its own
    python -m benchmarks.by_hand [--gguf model.gguf]

Each figure is the best of three. A library that is not installed has none.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from memagent.data.formats.json_stream import read_records
from memagent.documents.encoding import decode
from memagent.documents.formats.html import html_text
from memagent.gguf_format import read_contents
from memagent.run_files import LineFile

NUM_LINES = 2000
LINE = json.dumps({"text": "The mill was sold in 1873. " * 40}).encode()


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def peak_mb(work: Callable[[], object]) -> float:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def row(what: str, who: str, work: Callable[[], object], *, with_memory: bool = False) -> None:
    try:
        figure = f"{seconds(work):8.3f} s"
        figure += f"  {peak_mb(work):8.1f} MB at most" if with_memory else ""
    except ModuleNotFoundError as error:
        figure = f"{error.name} is not installed"
    except Exception as error:
        figure = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    print(f"{what:<28} {who:<22} {figure}")


def arrays(folder: Path) -> None:
    """Datasets as one JSON array, of texts (60 MB) and of many small values (30 MB), read example by example."""
    path = folder / "array.json"

    def by_ijson() -> int:
        with path.open("rb") as file:
            return sum(1 for _ in import_module("ijson").items(file, "item"))

    values = {"texts": "word " * 4000, "numbers": [{"at": n} for n in range(800)]}
    for what, value in values.items():
        path.write_text(json.dumps([{"input": value, "n": n} for n in range(3000)]))
        name = f"JSON array of {what}"
        row(name, "ours", lambda: sum(1 for _ in read_records(path)), with_memory=True)
        row(name, "ijson", by_ijson, with_memory=True)
        row(name, "json.loads", lambda: json.loads(path.read_bytes()), with_memory=True)


def lines(folder: Path) -> None:
    """Replies that are on disk, each before the next."""

    def ours() -> None:
        with LineFile(folder / "own.jsonl", checksums=True) as file:
            for _ in range(NUM_LINES):
                file.append(LINE)

    def by_sqlite() -> None:
        with sqlite3.connect(folder / "lines.db") as database:
            database.execute("pragma synchronous = full")
            database.execute("create table if not exists lines (line blob)")
            for _ in range(NUM_LINES):
                database.execute("insert into lines values (?)", (LINE,))
                database.commit()

    row(f"{NUM_LINES} replies to disk", "ours", ours)
    row(f"{NUM_LINES} replies to disk", "sqlite3", by_sqlite)


def pages() -> None:
    """A page of 3 MB, and one whose elements are nested 5,000 deep."""
    section = "<h2>Part {0}</h2><p>It <b>rained</b> on day {0}.</p><table><tr><td>{0}</td><td>2</td></tr></table>"
    long = "<html><body>" + "".join(section.format(n) for n in range(30_000)) + "</body></html>"
    deep = "<div>" * 5000 + "The mill was sold." + "</div>" * 5000
    readers: dict[str, Callable[[str], Any]] = {
        "ours": lambda page: html_text(page, "page.html"),
        "markdownify": lambda page: import_module("markdownify").markdownify(page),
        "inscriptis": lambda page: import_module("inscriptis").get_text(page),
    }
    for name, read in readers.items():
        row("HTML of 3 MB", name, partial(read, long))
        row("HTML nested 5,000 deep", name, partial(read, deep))


def encodings() -> None:
    """A text of 4 MB in UTF-8, and one in windows-1252."""
    text = "The café on the quay was sold in 1873 for £12 — “too little”, they said.\n" * 55_000
    for name in ("utf-8", "cp1252"):
        data = text.encode(name)
        row(f"text in {name}", "ours", partial(decode, data, "a.txt"))
        row(
            f"text in {name}",
            "charset-normalizer",
            lambda data=data: str(import_module("charset_normalizer").from_bytes(data).best()),  # type: ignore[misc]
        )


def headers(path: Path) -> None:
    """What a GGUF file says of itself."""
    row("GGUF header", "ours", lambda: read_contents(path))
    row("GGUF header", "gguf.GGUFReader", lambda: import_module("gguf").GGUFReader(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="a model, for its header")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        arrays(Path(folder))
        lines(Path(folder))
    pages()
    encodings()
    if options.gguf:
        headers(options.gguf)


if __name__ == "__main__":
    main()
