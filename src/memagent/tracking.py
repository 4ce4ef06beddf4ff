"""Metrics of a run: a file that is always written, and dashboards where they are enabled.

    with Tracker(folder, config=settings, name="my run", trackers=["wandb"]) as tracker:
        tracker.log(3, {"reward": 0.5, "time/update": 1.7})
        tracker.log(3, {"accuracy": 0.8}, kind="validation")

    RUN/
      metrics.jsonl    {"step": 3, "kind": "train", "reward": 0.5, "time/update": 1.7}
      tensorboard/     the same, where TensorBoard is installed
      wandb_id         id of the run at W&B, so that a resumed run continues there

A line is on disk when `log` returns, and values are read back bit for bit. Values that JSON cannot express
are written as the strings "NaN", "Infinity" and "-Infinity"; `read_metrics` turns them into numbers.

Metrics that depend on the clock have names that start with `time/` or `speed/`. All others are reproducible:
`comparable` removes the former, to compare two runs.

To resume, pass the number of lines at the checkpoint (`tracker.num_lines`): later lines are cut from the
file and taken off TensorBoard. W&B cannot remove points; there a repeated step appears twice.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from memagent.errors import ConfigError, RunError, one_line
from memagent.files import make_folders, reason_of, write_atomically
from memagent.plugins import hidden, require
from memagent.run_files import LineFile, make_folder, read_file, read_lines, truncate

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TrackerName = Literal["tensorboard", "wandb"]
WANDB_ID = "wandb_id"
TIMING_PREFIXES = ("time/", "speed/")
"""Prefixes of metrics that differ between repetitions of a run."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Strings for numbers that JSON cannot express."""


class Tracker:
    """Writes the metrics of one run."""

    def __init__(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        name: str,
        trackers: Sequence[TrackerName] = ("tensorboard",),
        num_lines: int | None = None,
    ) -> None:
        """Create or continue the files in `folder`.

        `config` and `name` are shown by W&B. With `num_lines`, later lines are cut: the run resumes there.
        """
        if "wandb" in trackers:
            missing = (
                "wandb is not installed; pip install wandb, or take it out of `logging.trackers`"
            )
            require("wandb", missing)
        self._path = folder / METRICS
        self._file, kept, cut = _opened(self._path, num_lines)
        self.num_lines = len(kept)
        """Lines of the file so far."""
        self._boards: list[_Board] = []
        try:
            if "tensorboard" in trackers and _has_tensorboard():
                self._boards.append(_TensorBoard(folder / TENSORBOARD, kept, cut))
            if "wandb" in trackers:
                self._boards.append(_Wandb(folder, config=config, name=name))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float], *, kind: str = "train") -> None:
        """Write the metrics of a step to disk and to the dashboards."""
        assert not {"step", "kind"} & metrics.keys(), "step and kind are reserved"
        # numbers of other libraries become our own
        values = {
            key: value if isinstance(value := metrics[key], int) else float(value)
            for key in sorted(metrics)
        }
        written = {
            key: value if math.isfinite(value) else json.dumps(value)
            for key, value in values.items()
        }
        line = json.dumps({"step": step, "kind": kind, **written}, ensure_ascii=False)
        try:
            self._file.append(line.encode())
            self.num_lines += 1
            for board in self._boards:
                board.write(step, kind, values)
        except OSError as error:
            raise RunError(
                f"cannot write metrics to {self._path.parent}: {reason_of(error)}"
            ) from None

    def rewind(self, num_lines: int) -> None:
        """Cut later lines: the run goes on from there, as a resumed one does."""
        self._file.close()
        self._file, kept, cut = _opened(self._path, num_lines)
        self.num_lines = len(kept)
        for board in self._boards:
            board.rewind(kept, cut)

    def close(self) -> None:
        """Close the file and the dashboards. Does nothing the second time."""
        self._file.close()
        while self._boards:
            self._boards.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics, in order; each has the keys `step` and `kind`."""
    path = Path(folder) / METRICS
    try:
        records = [line.record for line in read_lines(path)]
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason_of(error)}") from None
    return [_from_json(record) for record in records]


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without those that depend on the clock."""
    return {key: value for key, value in record.items() if not key.startswith(TIMING_PREFIXES)}


# --- the file -------------------------------------------------------------------------------------


def _opened(
    path: Path, num_lines: int | None
) -> tuple[LineFile, list[dict[str, Any]], list[dict[str, Any]]]:
    """The file, which ends with a complete line, the lines that are kept and those that are cut."""
    try:
        make_folders(path.parent, mode=0o700)
        LineFile(path, sync=False).close()
        lines = list(read_lines(path))
        num_kept = len(lines) if num_lines is None else num_lines
        if num_kept > len(lines):
            raise RunError(
                f"{path} has {len(lines)} lines, and the checkpoint expects {num_kept}; restore the file, "
                "or start a new run"
            )
        truncate(path, lines[num_kept - 1].end if num_kept else 0)
        file = LineFile(path)
    except OSError as error:
        raise RunError(f"cannot write metrics to {path}: {reason_of(error)}") from None
    records = [_from_json(line.record) for line in lines]
    return file, records[:num_kept], records[num_kept:]


def _from_json(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value) if key != "kind" and value in NOT_FINITE else value
        for key, value in record.items()
    }


# --- dashboards ---------------------------------------------------------------------------------------


class _Board(Protocol):
    """A dashboard."""

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None: ...
    def rewind(self, kept: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    """Event files. They are append-only, so a restart event removes what was cut."""

    def __init__(
        self, folder: Path, kept: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]
    ) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = event_pb2
        with hidden("tensorflow"):  # it would be loaded only to write files
            self._writer = EventFileWriter(str(folder))
        self.rewind(kept, cut)

    def rewind(self, kept: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]) -> None:
        """A restart drops all events from its step on, so kept lines are written again; the last one may be
        missing, because metrics.jsonl is written first."""
        if not (kept or cut):
            return
        first = min(record["step"] for record in [*kept[-1:], *cut])
        started = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=first, session_log=started))
        for record in kept:
            if record["step"] >= first:
                numbers = {key: record[key] for key in record.keys() - {"step", "kind"}}
                self.write(record["step"], record["kind"], numbers)

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=f"{kind}/{key}", simple_value=value)
            for key, value in metrics.items()
        ]
        summary = summary_pb2.Summary(value=values)
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases. Steps of several kinds overlap, so each kind has its own axis."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any], name: str) -> None:
        wandb = import_module("wandb")
        make_folder(folder, "wandb")  # it writes there
        path = folder / WANDB_ID
        if not path.exists():
            write_atomically(path, secrets.token_hex(4).encode())
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "memagent"),
                name=os.environ.get("WANDB_NAME", name),
                id=read_file(path).decode("utf-8", "replace"),
                resume="allow",
                dir=str(folder),
                config=dict(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"W&B cannot be used ({one_line(error)}); run `wandb login`, set WANDB_MODE=offline, or "
                "take it out of `logging.trackers`"
            ) from None
        self._kinds: set[str] = set()

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        if kind not in self._kinds:
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
            self._kinds.add(kind)
        numbers = {f"{kind}/{key}": value for key, value in metrics.items()}
        self._run.log({f"{kind}/step": step, **numbers})

    def rewind(self, kept: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]) -> None:
        """Points cannot be removed."""

    def close(self) -> None:
        self._run.finish()


def _has_tensorboard() -> bool:
    try:
        import_module("tensorboard.summary.writer.event_file_writer")
    except ModuleNotFoundError:
        return False
    return True
