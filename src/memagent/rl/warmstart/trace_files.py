"""Warm-start traces in a file: one conversation per line, in the order of the examples.

    train.jsonl ──▶ traces.jsonl.part ──▶ traces.jsonl
                    traces.jsonl.part.json   what is being written: source, settings
                                             traces.jsonl.manifest.json

The same source and settings give the same bytes. After a kill the next call goes on: the last example
that was not finished is removed, and all before it are kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.agent.prompts import open_prompts
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import dump_json, read_examples, replacing_dataset
from memagent.data.sources.cache import sha256_of
from memagent.documents.tokenizers import Tokenizer
from memagent.errors import DataError
from memagent.rl.warmstart.traces import TraceRefused, conversations

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesWritten:
    """What a file of traces holds."""

    num_examples: int
    num_conversations: int
    num_refused: int
    """Examples that were left out because no trace could be made."""


def write_traces(
    source: Path,
    out: Path,
    *,
    config: AgentConfig,
    tokenizer: Tokenizer,
    skip_refused: bool = False,
    force: bool = False,
    check: Callable[[Example], object] | None = None,
    on_example: Callable[[Example], None] | None = None,
) -> TracesWritten:
    """Write the traces of a file's examples, or go on where that stopped.

    `check` may raise for an example that the reader could not read with these settings;
    `on_example` is told each example when it is done.
    """
    if out.exists() and not force:
        raise DataError(f"{out} exists; name another file, or overwrite it with --force")
    identity = {
        "format": FORMAT,
        "kind": "traces",
        "source_sha256": sha256_of(source),
        "tokenizer": tokenizer.name,
        "prompts_sha256": open_prompts(config.prompts).sha256,
        "agent": config.model_dump(
            include={"chunk_tokens", "memory_tokens", "answer_tokens", "prompts"}
        ),
    }
    part = out.with_name(out.name + ".part")
    state = out.with_name(out.name + ".part.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        done = _finished(part, state, identity)
        examples = read_examples(source)
        num_passed = _pass(examples, done, source, part)
        with part.open("ab") as file:
            for example in examples:
                num_passed += 1
                if check is not None:
                    check(example)
                steps = conversations(example, config=config, tokenizer=tokenizer)
                try:
                    for step in steps:
                        file.write(dump_json(step.record()).encode("utf-8") + b"\n")
                        done.num_conversations += 1
                    done.num_examples += 1
                    file.flush()
                except TraceRefused as error:
                    if not skip_refused:
                        raise TraceRefused(f"{error}; --skip-refused leaves it out") from None
                if on_example is not None:
                    on_example(example)
            file.flush()
            os.fsync(file.fileno())
        written = TracesWritten(
            num_examples=done.num_examples,
            num_conversations=done.num_conversations,
            num_refused=num_passed - done.num_examples,
        )
        _write_json(
            out.with_name(out.name + ".manifest.json"),
            {**identity, **_counts(written), "sha256": sha256_of(part)},
        )
        part.replace(out)
        state.unlink()
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from None
    return written


@dataclass(slots=True, kw_only=True)
class _Done:
    """What a `.part` file holds already."""

    last_id: str | None = None
    num_examples: int = 0
    num_conversations: int = 0


def _finished(part: Path, state: Path, identity: dict[str, Any]) -> _Done:
    """What was finished before, with the rest removed; nothing where nothing was begun."""
    if not part.exists():
        _write_json(state, identity)
        return _Done()
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if known != identity:
        raise DataError(
            f"{part} was begun from another source or with other settings; "
            "delete it, or name another file"
        )
    done, position, good, num_steps = _Done(), 0, 0, 0
    with part.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            position += len(line)
            num_steps += 1
            if record["kind"] == "answer":
                done = _Done(
                    last_id=record["id"],
                    num_examples=done.num_examples + 1,
                    num_conversations=num_steps,
                )
                good = position
    os.truncate(part, good)
    return done


def _pass(examples: Iterator[Example], done: _Done, source: Path, part: Path) -> int:
    """Pass over the examples that are done; how many of the source these are."""
    if done.last_id is None:
        return 0
    for number, example in enumerate(examples, start=1):
        if example.id == done.last_id:
            return number
    raise DataError(f"{part} does not belong to {source}: it ends with {done.last_id}; delete it")


def _counts(written: TracesWritten) -> dict[str, int]:
    return {
        "num_examples": written.num_examples,
        "num_conversations": written.num_conversations,
        "num_refused": written.num_refused,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing_dataset(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
