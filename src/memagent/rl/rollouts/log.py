"""Finished rollouts that are not learnt from yet, on disk: a killed run does not draw them again.

    RUN/rollouts/step-000012.jsonl      one rollout per line, until a checkpoint has learnt from them

With the `free` driver each rollout counts as soon as it is written. With `lockstep` what is computed
together is repeated together, so rollouts count in waves: a wave that was not finished is drawn
again as a whole, and comes out the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from memagent.errors import RunError
from memagent.rl.rollouts.records import rollout_from_dict, rollout_to_dict
from memagent.rl.types import Rollout

FOLDER = "rollouts"
WAVE = "wave"


class RolloutLog:
    """The rollouts of one step."""

    def __init__(self, run: Path, step: int) -> None:
        self._path = _path(run, step)
        self._path.parent.mkdir(exist_ok=True)
        self._waves = self._read()
        """Finished waves; the last entry holds what belongs to none yet."""

    @property
    def waves(self) -> list[list[Rollout]]:
        """The rollouts of each finished wave."""
        return self._waves[:-1]

    @property
    def finished(self) -> list[Rollout]:
        """All rollouts, of whatever wave."""
        return [rollout for wave in self._waves for rollout in wave]

    def add(self, rollout: Rollout) -> None:
        """Keep a rollout."""
        self._append([json.dumps(rollout_to_dict(rollout))])

    def add_wave(self, rollouts: Sequence[Rollout]) -> None:
        """Keep the rollouts of a wave, all or none."""
        self._forget_torn()
        lines = [json.dumps(rollout_to_dict(rollout)) for rollout in rollouts]
        self._append([*lines, json.dumps({WAVE: len(rollouts)})])

    def _append(self, lines: Sequence[str]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise RunError(f"cannot write to {self._path}: {error.strerror or error}") from None

    def _forget_torn(self) -> None:
        """Remove what belongs to a wave that was not finished."""
        if self._waves[-1]:
            kept = self.waves
            self._waves = [[]]
            self._path.unlink()
            for wave in kept:
                self.add_wave(wave)
            self._waves = [*kept, []]

    def _read(self) -> list[list[Rollout]]:
        waves: list[list[Rollout]] = [[]]
        if not self._path.exists():
            return waves
        num_good = 0
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the process was killed while it wrote
                record = json.loads(line)
                num_good += len(line)
                if WAVE in record:
                    waves.append([])
                else:
                    waves[-1].append(rollout_from_dict(record))
        os.truncate(self._path, num_good)
        return waves


def forget_rollouts(run: Path, *, until: int) -> None:
    """Remove the rollouts of steps that a checkpoint has learnt from."""
    for path in (run / FOLDER).glob("step-*.jsonl"):
        if int(path.stem.removeprefix("step-")) <= until:
            path.unlink()


def _path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:06}.jsonl"
