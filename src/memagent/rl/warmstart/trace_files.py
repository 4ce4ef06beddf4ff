"""Files of warm-start conversations: one per line, in the order of the examples.

    train.jsonl ──▶ traces.jsonl.part ──▶ traces.jsonl
                    traces.jsonl.part.json   source and settings of the unfinished file
                                             traces.jsonl.manifest.json

The same source and settings produce the same bytes. After a kill the next call resumes: the unfinished last
example is removed, and all before it are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memagent.agent.prompts import prompts_for
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import dump_json, read_examples
from memagent.data.sources.cache import sha256_of
from memagent.errors import DataError, RunError
from memagent.files import reason_of, replacing, sync_file
from memagent.rl.warmstart.traces import TraceRefused, conversations
from memagent.run_files import LineFile, read_lines, truncate
from memagent.tokens.tokenizers import Tokenizer

FORMAT = 1
ALWAYS_STORED = {"chunk_tokens", "memory_tokens", "answer_tokens", "prompts"}
"""Settings that a manifest has whatever they are; others only where they are not the defaults."""
SAMPLING = {"temperature", "top_p", "seed"}
"""Settings without effect on demonstrations."""
MODE = 0o666
"""Datasets are shared, unlike runs; the umask applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesWritten:
    """Counts of a finished file."""

    num_examples: int
    num_conversations: int
    num_refused: int
    """Examples without a demonstration, which were skipped."""


def write_traces(
    source: Path,
    out: Path,
    *,
    config: AgentConfig,
    tokenizer: Tokenizer,
    skip_refused: bool = False,
    force: bool = False,
    on_example: Callable[[Example], None] | None = None,
) -> TracesWritten:
    """Write the conversations of a file's examples, or resume an unfinished file.

    `on_example` is called with each finished or skipped example.
    """
    if out.exists() and not force:
        raise DataError(f"{out} exists; name another file, or overwrite it with `force`")
    prompts = prompts_for(config)
    identity = {
        "format": FORMAT,
        "kind": "traces",
        "source_sha256": sha256_of(source),
        "tokenizer": tokenizer.name,
        "prompts_sha256": prompts.sha256,
        **({"merging_sha256": prompts.merging_sha256} if config.merges else {}),
        "agent": {
            **config.model_dump(include=ALWAYS_STORED),
            **config.model_dump(mode="json", exclude=SAMPLING, exclude_defaults=True),
        },
    }
    part = out.with_name(out.name + ".part")
    state = out.with_name(out.name + ".part.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        done = _finished(part, state, identity)
        examples = read_examples(source)
        num_read = _skip(examples, done, source, part)
        with LineFile(part, sync=False, mode=MODE) as lines:
            for example in examples:
                num_read += 1
                try:
                    steps = conversations(example, config=config, tokenizer=tokenizer)
                except TraceRefused as error:
                    if not skip_refused:
                        raise TraceRefused(f"{error}; `skip_refused` skips it") from None
                else:
                    lines.append(*(dump_json(step.record()).encode() for step in steps))
                    done.num_examples += 1
                    done.num_conversations += len(steps)
                if on_example is not None:
                    on_example(example)
        sync_file(part)
        written = TracesWritten(
            num_examples=done.num_examples,
            num_conversations=done.num_conversations,
            num_refused=num_read - done.num_examples,
        )
        _write_json(
            out.with_name(out.name + ".manifest.json"),
            {**identity, **asdict(written), "sha256": sha256_of(part)},
        )
        part.replace(out)
        state.unlink()
    except OSError as error:
        raise DataError(f"cannot write {out}: {reason_of(error)}") from None
    return written


@dataclass(slots=True, kw_only=True)
class _Done:
    """What a `.part` file holds."""

    last_id: str | None = None
    num_examples: int = 0
    num_conversations: int = 0


def _finished(part: Path, state: Path, identity: dict[str, Any]) -> _Done:
    """What an unfinished file holds, after its last, incomplete example was removed."""
    if not part.exists():
        _write_json(state, identity)
        return _Done()
    try:
        known = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if known != identity:
        raise DataError(
            f"{part} was started from another source or with other settings; "
            "delete it, or name another file"
        )
    done, end_of_done = _Done(), 0
    try:
        for num_lines, (record, end) in enumerate(read_lines(part), start=1):
            if record.get("kind") == "answer":
                done = _Done(
                    last_id=record["id"],
                    num_examples=done.num_examples + 1,
                    num_conversations=num_lines,
                )
                end_of_done = end
    except RunError as error:
        raise DataError(f"{error}; delete the file to start over") from None
    truncate(part, end_of_done)
    return done


def _skip(examples: Iterator[Example], done: _Done, source: Path, part: Path) -> int:
    """Skip the examples that are done; how many of the source these are."""
    if done.last_id is None:
        return 0
    for number, example in enumerate(examples, start=1):
        if example.id == done.last_id:
            return number
    raise DataError(f"{part} does not belong to {source}: it ends with {done.last_id}; delete it")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
