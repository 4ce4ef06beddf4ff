"""The training loop in this process: the files of a run, and resuming bit for bit."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.engines.local.loading import load
from memagent.errors import ConfigError, RunError
from memagent.rl import trainer
from memagent.rl.settings import parse_config
from memagent.rl.trainer import TimeLimit, TrainingCallbacks, open_training, resume_training
from memagent.rl.update import learner as update
from memagent.rl.weights.checkpoint import find_checkpoint, latest_checkpoint
from memagent.runs import MANIFEST, Run
from memagent.tracking import comparable, read_metrics
from tests.support.tiny_server import serving_tiny
from tests.support.tiny_training import tiny_run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


class Stop(TrainingCallbacks):
    """Cancels the run after a step of a kind, or after a number of rollouts."""

    def __init__(self, kind: str = "", step: int = 0, *, rollouts: int = 0) -> None:
        self._at = (kind, step)
        self._rollouts = rollouts

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if (kind, step) == self._at:
            _cancel()

    def on_rollout(self, stats: Any, *, num_wanted: int) -> None:
        self._rollouts -= 1
        if self._rollouts == 0:
            _cancel()


class Notes(TrainingCallbacks):
    """Keeps notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def _cancel() -> None:
    task = next(task for task in asyncio.all_tasks() if task.get_name() == "the run")
    task.cancel()


def run(
    config: dict[str, Any],
    folder: Path,
    callbacks: TrainingCallbacks | None = None,
    *,
    changes: Sequence[str] = (),
    max_minutes: float | None = None,
) -> bool:
    """Start or resume a run; whether it was not cancelled."""

    options: Any = {"callbacks": callbacks, "max_minutes": max_minutes}

    async def train() -> None:
        if (folder / MANIFEST).exists():
            opened = resume_training(folder, changes=changes, **options)
        else:
            opened = open_training(parse_config(config), folder, **options)
        async with opened as trainer:
            await trainer.train()

    async def named() -> bool:
        task = asyncio.create_task(train(), name="the run")
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    return asyncio.run(named())


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [comparable(record) for record in read_metrics(folder)]


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(tiny_run(files), folder)
    return folder


def test_a_run_writes_metrics_samples_answers_checkpoints_and_a_model(whole: Path) -> None:
    records = read_metrics(whole)
    kinds = [(record["kind"], record["step"]) for record in records]
    assert kinds[:6] == [("warm_start", step) for step in range(1, 7)]
    assert kinds[6:] == [
        ("validation", 0), ("train", 1), ("train", 2), ("validation", 2), ("train", 3),
        ("validation", 3),
    ]  # fmt: skip
    step = next(record for record in records if record["kind"] == "train")
    for name in ("reward", "best_reward", "pass_at_1", "pass_at_4", "group_std", "kl", "mismatch_kl", "clip_high", "entropy",
                 "grad_norm", "lr", "agent/memory_tokens", "speed/rollout_tokens",
                 "speed/update_tokens", "time/rollout", "time/update"):  # fmt: skip
        assert name in step, name
    samples = (whole / "samples" / "step-000001.jsonl").read_bytes().splitlines()
    assert len(samples) == 2
    first, second = map(json.loads, samples)
    assert {"question", "answers", "reward", "record"} <= first.keys()
    assert first["task_id"] == second["task_id"], "rollouts of a group are saved together"
    rewards = first["group_rewards"]
    assert first["advantage"] == first["reward"] - sum(rewards) / len(rewards)
    assert len((whole / "validation" / "step-000002.jsonl").read_bytes().splitlines()) == 6
    assert not list((whole / "rollouts").iterdir()), "all of them are in a checkpoint"
    newest = latest_checkpoint(whole)
    assert newest is not None
    assert newest.name == "step-000003"
    best = find_checkpoint(whole, best=True).name
    names = {path.name for path in (whole / "checkpoints").iterdir()}
    assert names == {"step-000002", "step-000003", best}
    assert [record["time/left"] > 0 for record in records if record["kind"] == "train"] == [
        True, True, False,
    ]  # fmt: skip
    assert load(str(newest / "model")).window == 256
    final, last = (folder / "model.safetensors" for folder in (whole / "final", newest / "model"))
    assert final.read_bytes() == last.read_bytes()


def test_the_engine_and_the_trainer_agree_on_the_first_update(whole: Path) -> None:
    for record in read_metrics(whole):
        if record["kind"] == "train":
            assert record["num_updates"] == 2
            assert record["mismatch_kl"] < 1e-3, "the second update is off-policy, a little"
            assert record["skipped"] == 0


def test_the_same_config_gives_the_same_metrics(files: Path, whole: Path, tmp_path: Path) -> None:
    assert run(tiny_run(files), tmp_path / "again")
    assert metrics_of(tmp_path / "again") == metrics_of(whole)
    assert run(tiny_run(files, seed=4), tmp_path / "other")
    assert metrics_of(tmp_path / "other") != metrics_of(whole)


@pytest.mark.parametrize(
    "stop",
    [
        Stop("warm_start", 3),
        Stop("validation", 0),
        Stop("train", 1),
        Stop(rollouts=8),
        Stop("validation", 2),
    ],
    ids=["warm start", "first validation", "step", "rollouts", "validation"],
)
def test_an_interrupted_run_resumes_bit_for_bit(
    files: Path, whole: Path, tmp_path: Path, stop: Stop
) -> None:
    folder = tmp_path / "run"
    assert not run(tiny_run(files), folder, stop)
    assert run(tiny_run(files), folder)
    assert metrics_of(folder) == metrics_of(whole)


def test_finished_rollouts_are_not_sampled_again(files: Path, whole: Path, tmp_path: Path) -> None:
    """As after a kill right after the updates of a step: the newest checkpoint is older."""
    folder, kept = tmp_path / "run", tmp_path / "kept"

    class Kill(Stop):
        def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
            if (kind, step) == ("train", 1):
                shutil.copytree(folder, kept)
                _cancel()

    assert not run(tiny_run(files), folder, Kill())
    assert (kept / "rollouts" / "step-000001.jsonl").exists()
    sampled = []

    class Count(Stop):
        def on_rollout(self, stats: Any, *, num_wanted: int) -> None:
            sampled.append(stats)

    assert not run(tiny_run(files), kept, Count("train", 1))
    assert not sampled
    assert run(tiny_run(files), kept)
    assert metrics_of(kept) == metrics_of(whole)


def test_steps_can_be_added_to_a_finished_run(files: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(tiny_run(files, steps=2), folder)
    assert run({}, folder, changes=["steps=3"])
    # step 2, the last of the short run, is validated either way
    assert metrics_of(folder) == metrics_of(whole)


def test_a_warm_start_alone(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(tiny_run(files, steps=0), folder)
    kinds = [record["kind"] for record in read_metrics(folder)]
    assert kinds == ["warm_start"] * 6 + ["validation"]
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert newest.name == "warm-000006"


class Clock(TrainingCallbacks):
    """Stands still until a step of a kind, and then shows that the time is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, step: int) -> None:
        self._at = (kind, step)
        self._share = 0.0
        monkeypatch.setattr(TimeLimit, "share", property(lambda _: self._share))

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        if (kind, step) == self._at:
            self._share = 1.0


@pytest.mark.parametrize(
    ("at", "last", "checkpoint"),
    [
        (("train", 1), [("train", 1), ("validation", 1)], "step-000001"),
        (("warm_start", 3), [("warm_start", 3), ("validation", 0)], "warm-000003"),
    ],
)
def test_when_the_time_is_over_a_run_validates_saves_and_can_be_resumed(
    files: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: tuple[str, int],
    last: list[tuple[str, int]],
    checkpoint: str,
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        assert run(tiny_run(files), folder, Clock(patch, *at), max_minutes=1.0)
    kinds = [(record["kind"], record["step"]) for record in read_metrics(folder)]
    assert kinds[-2:] == last
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert newest.name == checkpoint
    assert (folder / "final" / "model.safetensors").exists()
    assert run(tiny_run(files), folder)
    steps = [one for one in metrics_of(folder) if one["kind"] != "validation"]
    assert steps == [one for one in metrics_of(whole) if one["kind"] != "validation"]


def test_a_time_limit_without_a_finished_step_is_an_error(files: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="raise `max_minutes=1e-09`"):
        run(tiny_run(files), tmp_path / "run", max_minutes=1e-9)


def test_the_learning_rate_of_a_warm_start_alone_ends_with_its_time(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.0, 0.0, 0.0, 0.7, 1.0])  # before each step, and in it
    monkeypatch.setattr(TimeLimit, "share", property(lambda _: next(shares)))
    config = tiny_run(files, steps=0)
    config["warm_start"]["optim"] = {"lr": 0.01, "schedule": "linear", "final_lr_share": 0.0}
    del config["validation"]
    assert run(config, tmp_path / "run", max_minutes=1.0)
    rates = [record["lr"] for record in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([0.01, 0.002])


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_adapter_is_trained_and_the_model_left_as_it_is(
    files: Path, whole: Path, tmp_path: Path, is_merged: bool
) -> None:
    newest = latest_checkpoint(whole)
    assert newest is not None
    source = str(newest / "model")
    config = tiny_run(files, model={"source": source, "lora_rank": 4}, warm_start={"steps": 2})
    config["rollout"]["merged"] = is_merged
    folder = tmp_path / "run"
    assert not run(config, folder, Stop("train", 1))
    assert run(config, folder)
    assert run(config, tmp_path / "uninterrupted")
    assert metrics_of(folder) == metrics_of(tmp_path / "uninterrupted")
    assert all(one["mismatch_kl"] < 1e-5 for one in metrics_of(folder) if one["kind"] == "train")
    last = latest_checkpoint(folder)
    assert last is not None
    assert (last / "adapter" / "adapter_model.safetensors").exists()
    assert not (last / "model").exists()
    load(source, adapter=str(last / "adapter"))


def test_rollouts_may_come_from_an_endpoint_that_keeps_its_weights(
    files: Path, whole: Path, tmp_path: Path
) -> None:
    newest = latest_checkpoint(whole)
    assert newest is not None
    folder = newest / "model"
    with serving_tiny(folder) as server:
        config = tiny_run(
            files,
            steps=2,
            model={"source": str(folder), "lora_rank": 4},
            warm_start=None,
            rollout={
                "prompts": 2,
                "group_size": 4,
                "engine": f"openai:{server.engine.model}",
                "engine_settings": {"base_url": server.base_url, "api_key": "none"},
                "sync": "none",
            },
            objective={"max_staleness": 0},
        )
        del config["warm_start"], config["validation"]
        assert run(config, tmp_path / "run")
    first, second = [one for one in read_metrics(tmp_path / "run") if one["kind"] == "train"]
    assert first["num_failed"] == 0
    assert first["num_stale"] == 0
    assert first["mismatch_kl"] < 1e-3, "a new adapter changes nothing"
    assert second["num_stale"] > 0, "the endpoint has the weights of the start"
    assert second["num_updates"] == 0


def test_an_endpoint_that_samples_from_another_distribution_is_refused_with_the_numbers(
    files: Path, whole: Path, tmp_path: Path
) -> None:
    newest = latest_checkpoint(whole)
    assert newest is not None
    folder = newest / "model"
    with serving_tiny(folder) as server:
        settings = {"base_url": server.base_url, "api_key": "none"}
        rollout = {
            "prompts": 2,
            "group_size": 4,
            "engine": f"openai:{server.engine.model}",
            "engine_settings": {**settings, "extra_body": {"temperature": 0.3}},
            "sync": "none",
        }
        config = tiny_run(
            files, model={"source": str(folder), "lora_rank": 4}, warm_start=None, rollout=rollout
        )
        del config["warm_start"], config["validation"]
        message = r"they differ by \d\.\d+ per token .*; mean -\d\.\d+ there, -\d\.\d+ here"
        with pytest.raises(ConfigError, match=message):
            run(config, tmp_path / "run")
    assert not any(one["kind"] == "train" for one in metrics_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": {"name": "memroy"}}, "did you mean memory"),
        ({"agent": {"name": "missing.py:agent"}}, "missing.py"),
        ({"agent": {"name": "memory", "reward": "missing.py:score"}}, "missing.py"),
        ({"agent": {"name": "memory", "reward": "stricct"}}, "did you mean strict"),
        ({"agent": {"name": "memory", "settings": {"chunk_tokns": 3}}}, "chunk_tokns"),
        ({"model": {"source": "./nowhere"}}, "nowhere"),
    ],
)
def test_mistakes_are_reported_before_the_first_rollout_and_leave_no_run(
    files: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run(tiny_run(files, **changes), tmp_path / "run")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / MANIFEST).exists()


def test_no_more_groups_are_replaced_than_allowed(files: Path, tmp_path: Path) -> None:
    reward = files / "always.py"
    reward.write_text("async def score(task, outcome):\n    return 1.0\n")
    config = tiny_run(files, steps=1, objective={"dynamic_sampling": True})
    config["agent"] = {**config["agent"], "reward": f"{reward}:score"}
    for driver in ("lockstep", "free"):
        config["rollout"] = {"prompts": 3, "group_size": 2, "driver": driver}
        callbacks = Notes()
        assert run(config, tmp_path / driver, callbacks)
        (step,) = [one for one in read_metrics(tmp_path / driver) if one["kind"] == "train"]
        assert step["num_groups"] == step["num_unwanted"] == 3 + 9
        assert step["num_updates"] == 0
        assert "no update in this step" in callbacks.notes[0]


@pytest.mark.parametrize(("before", "after"), [(2, 6), (4, 2)])
def test_saved_waves_are_reused_with_another_concurrency(
    files: Path, tmp_path: Path, before: int, after: int
) -> None:
    config = tiny_run(files, steps=1, objective={}, warm_start=None, validation=None)
    config["rollout"] = {"prompts": 3, "group_size": 2, "driver": "lockstep", "concurrency": before}
    folder = tmp_path / "run"
    assert not run(config, folder, Stop(rollouts=before + 1))  # in the second wave
    assert run(config, folder, changes=[f"rollout.concurrency={after}"])
    (step,) = read_metrics(folder)
    assert (step["num_groups"], step["num_failed"]) == (3, 0)


def test_an_update_that_does_not_fit_names_its_remedies(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*arguments: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 20 GiB")

    monkeypatch.setattr(update, "accumulate", too_large)
    with pytest.raises(ConfigError, match=r"lower `update\.max_tokens`"):
        run(tiny_run(files, steps=1), tmp_path / "run")
    monkeypatch.undo()
    assert run(tiny_run(files, steps=1), tmp_path / "run")


def test_a_scratch_model_without_a_checkpoint_is_built_again(files: Path, tmp_path: Path) -> None:
    """A config that was corrected after a failure gets its own model."""
    folder = tmp_path / "run"
    config = tiny_run(files, steps=0, validation=None)
    del config["validation"]
    assert not run(config, folder, Stop("warm_start", 1))
    shutil.rmtree(folder / "checkpoints")
    (folder / MANIFEST).unlink()
    config["model"] = {"scratch": {**config["model"]["scratch"], "hidden_size": 48}}
    assert run(config, folder)
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert load(str(newest / "model")).model.config.hidden_size == 48


def test_only_training_runs_are_resumed(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {"kind": "ask"}):
        pass
    with pytest.raises(RunError, match="is not a training run"):
        run({}, tmp_path / "run")


MINE = r"""
from memagent.rl.types import Outcome


async def agent(task, client):
    messages = [{"role": "user", "content": task.question[:40]}]
    completion = await client.chat.completions.create(messages=messages, max_tokens=12)
    return Outcome(answer=completion.choices[0].message.content)


async def careless(task, client):
    return (await agent(task, client)).answer


def replies(task):
    return ["\\boxed{" + task.answers[0] + "}"]
"""


def own_agent(files: Path, tmp_path: Path, function: str) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(MINE)
    config = tiny_run(files, steps=1, tasks=[{"tasks": ["arithmetic"]}])
    config["agent"] = {**config["agent"], "name": f"{tmp_path}/mine.py:{function}"}
    del config["agent"]["settings"], config["validation"]
    own = {"replies": f"{tmp_path}/mine.py:replies", "optim": {"lr": 3e-3}}
    config["warm_start"] = {"steps": 4, "batch": 4, **own}
    return config


def test_an_agent_of_the_user_is_warmed_up_with_its_own_replies(
    files: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run(own_agent(files, tmp_path, "agent"), folder)
    first, *_, last, step = read_metrics(folder)
    assert (first["kind"], last["kind"], step["kind"]) == ("warm_start", "warm_start", "train")
    assert last["logprob"] > first["logprob"]
    assert step["num_failed"] == 0


def test_a_wrong_return_type_is_found_before_the_first_step(files: Path, tmp_path: Path) -> None:
    config = own_agent(files, tmp_path, "careless")
    with pytest.raises(ConfigError, match=r"the agent returned str; return Outcome"):
        run(config, tmp_path / "run")  # by its demonstrations
    with pytest.raises(ConfigError, match=r"the agent returned str; return Outcome.*tried on"):
        run({**config, "warm_start": None}, tmp_path / "run")
    assert not (tmp_path / "run" / MANIFEST).exists()


def test_the_paper_preset_trains(files: Path, tmp_path: Path) -> None:
    """With its sizes made small; texts of more than two sections lose their middle."""
    config = tiny_run(files, steps=1, preset="paper", objective={})
    config["tasks"] = [{"tasks": ["small/colours"], "settings": {"sentences": 6}}]
    config["agent"]["settings"] |= {"max_sections": 2, "window": 256}
    config["validation"] = {"num": 2, "tasks": config["validation"]["tasks"]}
    config["rollout"] = {"prompts": 2, "group_size": 2, "driver": "lockstep"}
    del config["warm_start"]
    assert run(config, tmp_path / "run")
    before, step, _ = read_metrics(tmp_path / "run")
    assert before["kind"] == "validation"
    assert (before["num_examples"], before["num_attempts"]) == (2, 8)
    assert {"pass_at_1", "pass_at_4"} <= before.keys()
    assert step["agent/cut_texts"] == 1.0
    assert step["agent/sections"] == 2
    assert step["num_failed"] == 0
    assert step["kl"] >= 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(trainer, "perf_counter", lambda: now[0])
    return now


def test_a_checkpoint_has_the_number_of_its_step() -> None:
    assert trainer.TrainProgress(warm_step=140).checkpoint == "warm-000140"
    assert trainer.TrainProgress(warm_step=140, step=7).checkpoint == "step-000007"


def test_the_time_left_follows_the_last_steps(clock: list[float]) -> None:
    pace = trainer.Pace()
    for seconds in (10.0, 20.0):
        clock[0] += seconds
        pace.step()
    assert pace.seconds_for(4) == 60.0
    for _ in range(trainer.PACE_STEPS):
        clock[0] += 2.0
        pace.step()
    assert pace.seconds_for(4) == 8.0


def test_no_more_time_is_left_than_the_limit_leaves(clock: list[float]) -> None:
    limit = TimeLimit(2.0)
    clock[0] += 90.0
    assert limit.limited(1000.0) == 30.0
    assert limit.limited(10.0) == 10.0
    clock[0] += 90.0
    assert limit.limited(1000.0) == 0.0
    assert TimeLimit(None).limited(1000.0) == 1000.0


@pytest.mark.parametrize("minutes", [float("nan"), float("inf"), -1.0])
def test_a_time_limit_is_a_sensible_number(minutes: float) -> None:
    with pytest.raises(ConfigError, match=r"`max_minutes=.*` must be a finite number"):
        TimeLimit(minutes)
