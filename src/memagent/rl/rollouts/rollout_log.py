"""Rollouts on disk: finished ones that no checkpoint covers yet, so that a killed run can reuse them.

    RUN/rollouts/step-000012.jsonl      one rollout per line, until a checkpoint covers the step

With `rollout.asynchronous` a rollout is in the file of the last step that may train on it.

With the `free` driver each rollout counts as soon as it is written. With `lockstep` whole waves are
reproducible, so rollouts count in waves: the rollouts of an unfinished wave are discarded and sampled again.

    line = json.dumps(rollout_to_dict(rollout))
    rollout_from_dict(json.loads(line)) == rollout

Sampled tokens come in runs, so a row stores its ids, the bounds of the runs, and their log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from memagent.agent.trace import Trace
from memagent.errors import RunError
from memagent.rl.types import Group, Rollout, Sample
from memagent.run_files import LineFile, make_folder, read_lines, truncate

FOLDER = "rollouts"
WAVE = "wave"
"""Key of the line that ends a wave."""


class RolloutLog:
    """The rollouts of one step."""

    def __init__(self, run: Path, step: int) -> None:
        """Opens the file of a step, if there is one. Raises RunError when it is damaged."""
        self._path = _file(run, step)
        self.waves: list[list[Rollout]] = []
        """The rollouts of each finished wave."""
        self._rest: list[Rollout] = []
        """Rollouts after the last finished wave."""
        self._waves_end = 0
        """Bytes of the finished waves."""
        try:
            make_folder(run, FOLDER)
            if self._path.exists():
                self._read()
            self._lines = LineFile(self._path, sync=False, checksums=True)
        except OSError as error:
            raise self._cannot_write(error) from None

    @property
    def finished(self) -> list[Rollout]:
        """All rollouts, in a finished wave or not."""
        return [rollout for wave in (*self.waves, self._rest) for rollout in wave]

    def add(self, rollout: Rollout) -> None:
        """Append a rollout."""
        self._append(rollout_to_dict(rollout))

    def add_wave(self, rollouts: Sequence[Rollout]) -> None:
        """Append the rollouts of a wave, all or none. Those of an unfinished wave are removed first."""
        if self._rest:
            truncate(self._path, self._waves_end)
            self._rest = []
        self._append(*map(rollout_to_dict, rollouts), {WAVE: len(rollouts)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, *records: dict[str, Any]) -> None:
        try:
            self._lines.append(*(json.dumps(record).encode() for record in records))
        except OSError as error:
            raise self._cannot_write(error) from None

    def _read(self) -> None:
        end = 0
        for number, (record, end) in enumerate(read_lines(self._path), start=1):
            if WAVE in record:
                self.waves.append(self._rest)
                self._rest, self._waves_end = [], end
                continue
            try:
                self._rest.append(rollout_from_dict(record))
            except RunError as error:
                raise RunError(f"{self._path}, line {number}: {error}") from None
        truncate(self._path, end)

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(f"cannot write to {self._path}: {error.strerror or error}")


def saved_steps(run: Path) -> list[int]:
    """Steps with saved rollouts."""
    paths = (run / FOLDER).glob("step-*.jsonl")
    return sorted(int(path.stem.removeprefix("step-")) for path in paths)


def forget_rollouts(run: Path, *, until: int) -> None:
    """Remove the rollouts of the steps that a checkpoint covers."""
    for step in saved_steps(run):
        if step <= until:
            _file(run, step).unlink()


def _file(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06}.jsonl"


# --- rollouts as plain values -----------------------------------------------------------------------


def rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    """The rollout as plain JSON values; floats are restored bit for bit."""
    return {
        "task_id": rollout.task_id,
        "index": rollout.index,
        "samples": [_sample_to_dict(sample) for sample in rollout.samples],
        **_for_people(rollout),
    }


def readable_group(
    group: Group, task: object, advantages_G: Sequence[float | None]
) -> Iterator[dict[str, Any]]:
    """The rollouts of a group for people to read: everything but the tokens, the advantage, and the rewards of all of them."""
    rewards = [rollout.reward for rollout in group.rollouts]
    for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
        yield {
            "task_id": rollout.task_id,
            "question": getattr(task, "question", None),
            "answers": list(getattr(task, "answers", ())),
            "index": rollout.index,
            **_for_people(rollout),
            "advantage": advantage,
            "group_rewards": rewards,
        }


def rollout_from_dict(values: Mapping[str, Any]) -> Rollout:
    """A rollout from `rollout_to_dict`. Raises RunError when it is damaged."""
    try:
        samples = tuple(_sample_from_dict(sample) for sample in values["samples"])
        if values["status"] not in ("ok", "failed"):
            raise ValueError("unknown status")
        trace = values.get("trace")
        return Rollout(
            task_id=values["task_id"],
            index=values["index"],
            samples=samples,
            reward=float(values["reward"]),
            status=values["status"],
            failed_by=values.get("failed_by"),
            is_penalised=bool(values.get("is_penalised", False)),
            error=values["error"],
            trace=None if trace is None else Trace.from_dict(trace),
            metrics=dict(values["metrics"]),
            record=dict(values["record"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"a saved rollout is damaged ({type(error).__name__}: {reason}); remove it to sample it again"
        ) from None


def _for_people(rollout: Rollout) -> dict[str, Any]:
    return {
        "reward": rollout.reward,
        "status": rollout.status,
        "error": rollout.error,
        **(
            {}
            if rollout.is_ok
            else {"failed_by": rollout.failed_by, "is_penalised": rollout.is_penalised}
        ),
        "metrics": dict(rollout.metrics),
        "trace": None if rollout.trace is None else rollout.trace.to_dict(),
        "record": dict(rollout.record),
    }


def _sample_to_dict(sample: Sample) -> dict[str, Any]:
    runs = _runs(sample.is_sampled)
    return {
        "ids": list(sample.ids),
        "runs": runs,
        "logprobs": [logprob for start, end in runs for logprob in sample.logprobs[start:end]],
        "policy_version": sample.policy_version,
        **({} if sample.token_versions is None else {"versions": list(sample.token_versions)}),
    }


def _sample_from_dict(values: Mapping[str, Any]) -> Sample:
    ids = tuple(int(token) for token in values["ids"])
    versions = values.get("versions")
    is_sampled, logprobs = [False] * len(ids), [0.0] * len(ids)
    sampled = [position for start, end in values["runs"] for position in range(start, end)]
    for position, logprob in zip(sampled, values["logprobs"], strict=True):
        if not 0 <= position < len(ids):
            raise ValueError("a run of tokens lies outside of its row")
        is_sampled[position], logprobs[position] = True, float(logprob)
    return Sample(
        ids=ids,
        is_sampled=tuple(is_sampled),
        logprobs=tuple(logprobs),
        policy_version=int(values["policy_version"]),
        token_versions=None if versions is None else tuple(int(version) for version in versions),
    )


def _runs(is_sampled: tuple[bool, ...]) -> list[list[int]]:
    """Where sampled tokens are, as [first, past the last] pairs."""
    runs: list[list[int]] = []
    num_left, end = is_sampled.count(True), 0
    while num_left:
        start = is_sampled.index(True, end)
        end = is_sampled.index(False, start) if False in is_sampled[start:] else len(is_sampled)
        runs.append([start, end])
        num_left -= end - start
    return runs
