"""Metrics of a reading in training: sizes, what became of the evidence, how well a mode was used.

A reward may take them into account, each with a weight: `agent.bonus`.
"""

from __future__ import annotations

from memagent.agent.evidence.replies import ReplyFormat
from memagent.agent.trace import Trace
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.eval.runner import evidence_scores
from memagent.rewards.evidence import stop_moment

REWARDED = (
    *("captured", "retained", "quoted", "citation_precision", "citation_recall"),
    *(
        "stop_moment",
        "few_rounds",
        "malformed",
        "rounds",
        "kept_memories",
        "cut_memories",
        "sections",
    ),
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
