"""Rollouts as plain values: finished ones are saved, and taken over when a run goes on.

    line = json.dumps(rollout_to_dict(rollout))
    collect(..., finished=[rollout_from_dict(json.loads(line))])

Drawn tokens come in runs, so a row keeps its ids, where the runs are, and the log-probabilities of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memagent.errors import RunError
from memagent.rl.types import Rollout, Sample


def rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    """The rollout as JSON takes it; floats come back bit for bit."""
    return {
        "task_id": rollout.task_id,
        "index": rollout.index,
        "samples": [_sample_to_dict(sample) for sample in rollout.samples],
        "reward": rollout.reward,
        "status": rollout.status,
        "error": rollout.error,
        "metrics": dict(rollout.metrics),
        "record": dict(rollout.record),
    }


def rollout_from_dict(values: Mapping[str, Any]) -> Rollout:
    """A rollout as `rollout_to_dict` made it. Raises RunError when it is damaged."""
    try:
        samples = tuple(_sample_from_dict(sample) for sample in values["samples"])
        if values["status"] not in ("ok", "failed"):
            raise ValueError("unknown status")
        return Rollout(
            task_id=values["task_id"],
            index=values["index"],
            samples=samples,
            reward=float(values["reward"]),
            status=values["status"],
            error=values["error"],
            metrics=dict(values["metrics"]),
            record=dict(values["record"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"a saved rollout is damaged ({type(error).__name__}: {error}); remove it to have it "
            "made again"
        ) from None


def _sample_to_dict(sample: Sample) -> dict[str, Any]:
    runs = _runs(sample.is_sampled)
    return {
        "ids": list(sample.ids),
        "runs": runs,
        "logprobs": [logprob for start, end in runs for logprob in sample.logprobs[start:end]],
        "policy_version": sample.policy_version,
    }


def _sample_from_dict(values: Mapping[str, Any]) -> Sample:
    ids = tuple(int(token) for token in values["ids"])
    is_sampled, logprobs = [False] * len(ids), [0.0] * len(ids)
    drawn = [position for start, end in values["runs"] for position in range(start, end)]
    for position, logprob in zip(drawn, values["logprobs"], strict=True):
        if not 0 <= position < len(ids):
            raise ValueError("a run of tokens lies outside of its row")
        is_sampled[position], logprobs[position] = True, float(logprob)
    return Sample(
        ids=ids,
        is_sampled=tuple(is_sampled),
        logprobs=tuple(logprobs),
        policy_version=int(values["policy_version"]),
    )


def _runs(is_sampled: tuple[bool, ...]) -> list[list[int]]:
    """Where marked tokens are, as [first, past the last] pairs."""
    runs: list[list[int]] = []
    num_left, end = is_sampled.count(True), 0
    while num_left:
        start = is_sampled.index(True, end)
        end = is_sampled.index(False, start) if False in is_sampled[start:] else len(is_sampled)
        runs.append([start, end])
        num_left -= end - start
    return runs
