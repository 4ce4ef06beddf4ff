"""What the memory agent reads, and metrics of its readings.

A text is cut into sections once for all rollouts of a group. A reward may take metrics into account, each with a
weight: `agent.bonus`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from memagent.agent.evidence.replies import ReplyFormat
from memagent.agent.trace import Trace
from memagent.config import AgentConfig, SectionEnds
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.errors import ConfigError
from memagent.eval.runner import evidence_scores
from memagent.rewards.evidence import stop_moment
from memagent.tokens.tokenizers import Tokenizer, tokenizer_for_model

LongTexts = Literal["refuse", "cut_middle"]


class TaskSections(NamedTuple):
    """The sections that are read of a text."""

    chunks: Chunks
    is_cut: bool = False
    """Whether the middle of the text was left out."""


def sections_of(
    task: Example,
    *,
    tokenizer: str,
    config: AgentConfig,
    max_sections: int | None,
    long_texts: LongTexts,
) -> TaskSections:
    """The sections of a task's text. A text of more than `max_sections` is refused or cut."""
    text, size, ends = task.text(), config.chunk_tokens, config.section_ends
    chunks = _chunks(task.id, text, tokenizer, size, ends)
    if max_sections is None or chunks.get(max_sections) is None:
        return TaskSections(chunks)
    if long_texts == "refuse":
        raise ConfigError(
            f"the text of {task.id} has {chunks.total()} sections, more than "
            f"`max_sections={max_sections}`; raise it or `chunk_tokens`, or use shorter texts"
        )
    return TaskSections(
        _cut_chunks(task.id, text, tokenizer, size, ends, max_sections), is_cut=True
    )


def without_middle(text: str, tokenizer: Tokenizer, *, max_tokens: int) -> str:
    """The first and the last tokens of a text, half of `max_tokens` each; a short text as it is."""
    measured = tokenizer.measure(text)
    if measured.num_tokens <= max_tokens:
        return text
    num_first = max_tokens // 2
    end = measured.end_of(num_first)
    start = measured.end_of(measured.num_tokens - (max_tokens - num_first))
    return text[:end] + text[start:]


@lru_cache(maxsize=4)
def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a client's model, kept open."""
    return tokenizer_for_model(name)[0]


@lru_cache(maxsize=256)
def _chunks(source: str, text: str, tokenizer: str, size: int, ends: SectionEnds) -> Chunks:
    document = Document.from_text(text, source=source)
    return Chunks(document, tokenizer_of(tokenizer), size, ends=ends)


@lru_cache(maxsize=256)
def _cut_chunks(
    source: str, text: str, tokenizer: str, size: int, ends: SectionEnds, max_sections: int
) -> Chunks:
    """At most `max_sections` of the beginning and the end of a text."""
    num_tokens, less = max_sections * size, 1
    while True:
        shorter = without_middle(text, tokenizer_of(tokenizer), max_tokens=num_tokens)
        chunks = _chunks(source, shorter, tokenizer, size, ends)
        if chunks.get(max_sections) is None:
            return chunks
        num_tokens -= less  # tokens at the seam, and sections that end before their limit
        less = min(4 * less, size // 4)


# --- metrics of a reading -------------------------------------------------------------------------


REWARDED = (
    *("captured", "retained", "quoted", "citation_precision", "citation_recall", "stop_moment"),
    *("few_rounds", "malformed", "rounds", "kept_memories", "cut_memories", "sections"),
)
"""Metrics that a reward may take into account."""


def metrics_of(
    task: Example, trace: Trace, config: AgentConfig, *, is_cut: bool
) -> dict[str, float]:
    """All metrics of a reading. `is_cut`: a part of the text was left out, so places are not known."""
    return {
        **_counts(trace),
        **evidence_scores(task, trace, is_cut=is_cut).known(),
        **_modes(task, trace, config, is_cut=is_cut),
    }


def _counts(trace: Trace) -> dict[str, float]:
    calls = trace.steps[:-1]
    flags = [flag for step in calls for flag in step.flags]
    return {
        "sections": trace.num_chunks,
        "memory_tokens": sum(step.usage.completion_tokens for step in calls) / len(calls),
        "cut_memories": flags.count("reply_cut") + flags.count("memory_cut"),
        "kept_memories": flags.count("memory_kept"),
    }


def _modes(task: Example, trace: Trace, config: AgentConfig, *, is_cut: bool) -> dict[str, float]:
    """Metrics of the modes that are on: replies without format, the moment of the stop, rounds."""
    found: dict[str, float] = {}
    if ReplyFormat.of(config).has_marks:
        found["malformed"] = sum("malformed" in step.flags for step in trace.steps)
    if config.stop_early and task.evidence and not is_cut:
        found["stop_moment"] = stop_moment(
            trace.unread, task.evidence_offsets(), num_chars=len(task.text())
        )
    if config.mode == "parallel":
        num_rounds = max((step.round or 1 for step in trace.steps), default=1)
        found["rounds"] = num_rounds
        found["few_rounds"] = 1 - (num_rounds - 1) / max(1, config.rounds)
        found["merges"] = sum(step.kind == "merge" for step in trace.steps)
        reads = [step for step in trace.steps if step.kind == "read"]
        found["noted_sections"] = sum("nothing" not in step.flags for step in reads)
    return found
