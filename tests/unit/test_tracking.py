"""Numbers on disk, bit for bit; on boards, as their libraries want them."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from memagent.errors import ConfigError, RunError
from memagent.tracking import Tracker, comparable, read_metrics


def tracker(folder: Path, **changes: Any) -> Tracker:
    return Tracker(folder, **{"config": {"lr": 1e-5}, "name": "first", **changes})


def lines_of(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


# --- the file -------------------------------------------------------------------------------------


def test_a_line_has_step_and_kind_and_then_names_in_order(tmp_path: Path) -> None:
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(3, {"reward": 0.5, "clipped": 1})
        numbers.log(3, {"accuracy": 1.0}, kind="validation")
        assert lines_of(tmp_path) == [
            '{"step": 3, "kind": "train", "clipped": 1, "reward": 0.5}',
            '{"step": 3, "kind": "validation", "accuracy": 1.0}',
        ]


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, -0.0, 1e300, float(np.nextafter(1, 2)), math.pi]
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(0, {f"n{i}": value for i, value in enumerate(values)})
        numbers.log(1, {"small": np.float32(0.1)})  # scalars of other libraries are taken too
    first, second = read_metrics(tmp_path)
    found = [first[f"n{i}"] for i in range(len(values))]
    assert np.array(found).tobytes() == np.array(values).tobytes()
    assert second["small"] == float(np.float32(0.1))


def test_what_json_has_no_number_for_is_a_string_in_the_file_and_a_number_again(
    tmp_path: Path,
) -> None:
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(0, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(lines_of(tmp_path)[0], parse_constant=refuse)
    assert record == {"step": 0, "kind": "train", "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    found = read_metrics(tmp_path)[0]
    assert math.isnan(found["a"])
    assert (found["b"], found["c"]) == (math.inf, -math.inf)


def test_a_run_opened_again_goes_on_after_its_lines(tmp_path: Path) -> None:
    for step in range(3):
        with tracker(tmp_path, trackers=[]) as numbers:
            assert numbers.num_lines == step
            numbers.log(step, {"reward": step / 2})
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(0, {"reward": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "ki')
    assert len(read_metrics(tmp_path)) == 1
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(1, {"reward": 1.0})
    assert [record["reward"] for record in read_metrics(tmp_path)] == [0.5, 1.0]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0\n{"step": 1, "kind": "train"}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 1, is damaged"):
        tracker(tmp_path)


def test_lines_after_the_checkpoint_are_cut(tmp_path: Path) -> None:
    with tracker(tmp_path, trackers=[]) as numbers:
        for step in range(5):
            numbers.log(step, {"reward": step / 4, "note": math.nan})
    before = lines_of(tmp_path)
    with tracker(tmp_path, trackers=[], num_lines=3) as numbers:
        assert numbers.num_lines == 3
        assert lines_of(tmp_path) == before[:3]
        numbers.log(3, {"reward": 9.0})
    assert [record["reward"] for record in read_metrics(tmp_path)] == [0.0, 0.25, 0.5, 9.0]
    with tracker(tmp_path, trackers=[], num_lines=0):
        assert lines_of(tmp_path) == []


def test_lines_that_the_checkpoint_counts_on_must_be_there(tmp_path: Path) -> None:
    with tracker(tmp_path, trackers=[]) as numbers:
        numbers.log(0, {"reward": 0.5})
    with pytest.raises(RunError, match="has 1 lines, and the checkpoint expects 2"):
        tracker(tmp_path, num_lines=2)


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read .*metrics\.jsonl: No such file"):
        read_metrics(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write metrics to .*file"):
        tracker(tmp_path / "file")


def test_two_runs_compare_without_the_clock() -> None:
    record = {"step": 1, "kind": "train", "reward": 0.5, "time/update": 1.2, "speed/tokens": 900.0}
    assert comparable(record) == {"step": 1, "kind": "train", "reward": 0.5}


# --- TensorBoard ----------------------------------------------------------------------------------


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: the steps and values of each name."""
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = board.Tags()["scalars"]
    return {tag: sorted((one.step, one.value) for one in board.Scalars(tag)) for tag in tags}


def test_tensorboard_shows_all_lines(tmp_path: Path) -> None:
    with tracker(tmp_path) as numbers:
        numbers.log(0, {"reward": 0.5})
        numbers.log(1, {"reward": 0.75})
        numbers.log(1, {"accuracy": 1.0}, kind="validation")
        assert shown(tmp_path) == {
            "train/reward": [(0, 0.5), (1, 0.75)],
            "validation/accuracy": [(1, 1.0)],
        }


def test_tensorboard_forgets_what_was_cut_and_nothing_else(tmp_path: Path) -> None:
    with tracker(tmp_path) as numbers:
        for step in range(4):  # a warm start, whose steps are those of the rest too
            numbers.log(step, {"loss": float(step)}, kind="sft")
        for step in range(4):
            numbers.log(step, {"reward": float(step)})
    with tracker(tmp_path, num_lines=6) as numbers:
        numbers.log(2, {"reward": 20.0})
    expected = {
        "sft/loss": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)],
        "train/reward": [(0, 0.0), (1, 1.0), (2, 20.0)],
    }
    assert shown(tmp_path) == expected
    with tracker(tmp_path):  # nothing is cut: all stays
        assert shown(tmp_path) == expected


def test_a_run_that_goes_back_cuts_its_lines_here_and_on_tensorboard(tmp_path: Path) -> None:
    with tracker(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward": step / 2})
        log.rewind(1)
        assert log.num_lines == 1
        log.log(2, {"reward": 9.0})
    assert [record["reward"] for record in read_metrics(tmp_path)] == [0.5, 9.0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("train/reward")] == [(1, 0.5), (2, 9.0)]


def test_without_tensorboard_nothing_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    with tracker(tmp_path) as numbers:
        numbers.log(0, {"reward": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# --- W&B: a fake with the arguments of wandb 0.31 -------------------------------------------------


class FakeWandb(ModuleType):
    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []
        self.is_logged_in = True

    def init(
        self,
        *,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str | None = None,
    ) -> Any:
        if not self.is_logged_in:
            raise self.Error("api_key not configured (no-tty).\ncall wandb.login()")
        assert isinstance(config, dict)
        assert resume == "allow"
        assert dir is not None
        assert Path(dir).is_dir()
        self.calls.append(("init", project, name, id, config))
        return SimpleNamespace(log=self.log, define_metric=self.define_metric, finish=self.finish)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", data, step))

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_an_axis_for_each_kind(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "reading")
    with tracker(tmp_path, trackers=["wandb"]) as numbers:
        numbers.log(0, {"reward": 0.5})
        numbers.log(1, {"reward": 0.75})
        numbers.log(1, {"accuracy": 1.0}, kind="validation")
    start, *rest = wandb.calls
    assert start == ("init", "reading", "first", start[3], {"lr": 1e-5})
    assert rest == [
        ("define", "train/*", "train/step"),
        ("log", {"train/step": 0, "train/reward": 0.5}, None),
        ("log", {"train/step": 1, "train/reward": 0.75}, None),
        ("define", "validation/*", "validation/step"),
        ("log", {"validation/step": 1, "validation/accuracy": 1.0}, None),
        ("finish", None),
    ]


def test_a_resumed_run_goes_on_as_the_same_run_of_wandb(tmp_path: Path, wandb: FakeWandb) -> None:
    for _ in range(2):
        tracker(tmp_path / "one", trackers=["wandb"]).close()
    tracker(tmp_path / "two", trackers=["wandb"]).close()
    first, again, other = (call[3] for call in wandb.calls if call[0] == "init")
    assert first == again != other


def test_wandb_without_a_login_says_what_to_do(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.is_logged_in = False
    with pytest.raises(ConfigError, match="run `wandb login`, set WANDB_MODE=offline") as caught:
        tracker(tmp_path, trackers=["wandb"])
    assert "\n" not in str(caught.value)


def test_a_board_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pip install wandb"):
        tracker(tmp_path / "run", trackers=["wandb"])
    assert not (tmp_path / "run").exists()
