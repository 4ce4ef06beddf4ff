"""What many questions over one text cost on the embedded engine: prompt tokens that are computed, and time.

    alone     eight questions, one reading each, with the default prompts: nothing is shared
    together  eight questions in one pass, sections before questions: each section is computed once
    later     a ninth question over the same text, while its sections are cached

    python -m benchmarks.many_questions                                 # a tiny random model, on a CPU
    python -m benchmarks.many_questions --model local:smollm2-135m --tokens 6000 --chunk-tokens 1500
    python -m benchmarks.many_questions --model local:memagent-1.5b --device cuda --tokens 448000

The model may be any that the local engine reads; the counts do not depend on its answers. The first line says how many
prompt tokens are computed, and how long that takes at 150,000 a second (`--rate`): at 448,000 tokens, half a minute
and the replies. With `--rows FILE` what is measured is kept there as JSON, and the same command goes on after a kill;
the two ways that share a text are measured again together. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from memagent import Document, Reader, open_engine
from memagent.agent.trace import Trace
from memagent.engines.base import BaseEngine
from memagent.files import write_atomically
from tests.conftest import prose
from tests.support.tiny_models import make_tiny_model

QUESTIONS = [
    f"Who {what}?"
    for what in (
        "sold a red ledger in 1850",
        "found 12 barrels of salt",
        "remembered the north gate",
        "carried home an old map",
        "wrote about cafe chairs",
        "did not mention the ledger",
        "found the map in 1901",
        "sold the chairs",
        "remembered the captain's wife",
    )
]
CHARS_PER_TOKEN = 3.0
RATE = 150_000
"""Prompt tokens a second that the estimate counts with."""


class Row(NamedTuple):
    """One way to ask."""

    way: str
    questions: int
    prompt_tokens: int
    computed_tokens: int
    """Of the prompts of sections: those that went through the model."""
    seconds: float

    @property
    def per_question(self) -> float:
        """Computed prompt tokens of one question."""
        return self.computed_tokens / self.questions


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """All ways on the same text; those that `rows` holds already are not measured again."""
    model = options.model or f"local:{_tiny(folder)}"
    document = Document.from_text(_text(options.tokens), source="text")
    rows = _stored_rows(options) or _keep_rows(options, [_alone(options, model, document)])
    if len(rows) == 1:
        rows = _keep_rows(options, [*rows, *_shared(options, model, document)])
    return rows


def _alone(options: argparse.Namespace, model: str, document: Document) -> Row:
    with _opened(model, _engine_settings(options)) as engine:
        reader = Reader(engine, **_reading(options))
        began = time.perf_counter()
        traces = [reader.ask(question, document) for question in QUESTIONS[:8]]
        return _row("alone", traces, time.perf_counter() - began)


def _shared(options: argparse.Namespace, model: str, document: Document) -> list[Row]:
    """The ways in which a text is computed once."""
    settings = _engine_settings(options)
    together = _reading(options, mode="parallel", rounds=1, notes="asked")
    with _opened(model, settings) as engine:
        rows = [_asked("together", Reader(engine, **together), QUESTIONS[:8], document)]
        rows.append(_asked("later", Reader(engine, **together), QUESTIONS[8:], document))
    return rows


def _engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {"device": options.device, "cache_gb": options.cache_gb}


def _stored_rows(options: argparse.Namespace) -> list[Row]:
    """The rows of an earlier call with the same options."""
    if options.rows is None or not options.rows.exists():
        return []
    stored = json.loads(options.rows.read_bytes())
    if stored["options"] != _asked_for(options):
        raise SystemExit(f"{options.rows} was measured with other options; name another file")
    return [Row(**row) for row in stored["rows"]]


def _keep_rows(options: argparse.Namespace, rows: list[Row]) -> list[Row]:
    if options.rows is not None:
        stored = {"options": _asked_for(options), "rows": [row._asdict() for row in rows]}
        write_atomically(options.rows, json.dumps(stored).encode())
    return rows


def _asked_for(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the rows."""
    names = ("model", "device", "tokens", "chunk_tokens", "window", "cache_gb")
    return {name: getattr(options, name) for name in names}


def _asked(way: str, reader: Reader, questions: list[str], document: Document) -> Row:
    began = time.perf_counter()
    traces = reader.ask_many(questions, document)
    return _row(way, traces, time.perf_counter() - began)


def _row(way: str, traces: list[Trace], seconds: float) -> Row:
    reads = [step.usage for trace in traces for step in trace.steps if step.kind == "read"]
    prompt = sum(usage.prompt_tokens for usage in reads)
    cached = sum(usage.cached_tokens for usage in reads)
    return Row(way, len(traces), prompt, prompt - cached, round(seconds, 2))


def _reading(options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Settings of the reader; replies are short, for only prompts are measured."""
    values = {"window": options.window, "chunk_tokens": options.chunk_tokens, "memory_tokens": 32}
    return {**values, "answer_tokens": 8, "prompts": "default", "temperature": 0.0, **settings}


def _opened(model: str, settings: dict[str, Any]) -> BaseEngine:
    given = {name: value for name, value in settings.items() if value is not None}
    return open_engine(model, **given)


def _tiny(folder: Path) -> Path:
    return make_tiny_model(folder / "tiny", "llama", max_position_embeddings=8192)


def _text(num_tokens: int) -> str:
    num_chars = int(num_tokens * CHARS_PER_TOKEN)
    text = prose(num_chars // 50 + 20, seed=3)
    while len(text) < num_chars:
        text += prose(num_chars // 50, seed=len(text))
    return text[:num_chars]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", help="as open_engine takes it; a tiny random model when not given")
    add("--device")
    add("--tokens", type=int, default=30_000)
    add("--chunk-tokens", type=int, default=5_000)
    add("--window", type=int, default=8_192)
    add("--cache-gb", type=float)
    add("--rate", type=int, default=RATE, help="prompt tokens a second of the estimate")
    add("--rows", type=Path, metavar="FILE", help="keep what is measured here, and go on from it")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_options()
    computed = (8 + 1) * options.tokens
    print(
        f"about {computed:,} prompt tokens are computed, {computed / options.rate:,.0f} s at "
        f"{options.rate:,} a second",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    reading = rows[0].per_question
    print(
        f"{'':<10}{'questions':>10}{'prompt tokens':>15}{'computed':>12}{'each':>10}{'of a reading':>14}{'seconds':>9}"
    )
    for row in rows:
        share = f"{100 * row.per_question / reading:.1f} %"
        print(
            f"{row.way:<10}{row.questions:>10}{row.prompt_tokens:>15,}{row.computed_tokens:>12,}"
            f"{row.per_question:>10,.0f}{share:>14}{row.seconds:>9.1f}"
        )
    times_fewer = rows[0].computed_tokens / rows[1].computed_tokens
    print(f"eight questions together: {times_fewer:.1f} times fewer prompt tokens computed")


if __name__ == "__main__":
    main()
