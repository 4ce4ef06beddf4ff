"""Finished rollouts on disk: each alone, or in waves; a torn line or wave is discarded."""

import json
import re
from pathlib import Path

import pytest

from memagent.agent.trace import Step, Trace
from memagent.data.example import Example
from memagent.errors import RunError
from memagent.rl.rollouts.rollout_log import RolloutLog, forget_rollouts, readable_group
from memagent.rl.types import Group, Rollout, Sample


def rollout(task: str, index: int) -> Rollout:
    sample = Sample(
        ids=(1, 2, 3),
        is_sampled=(False, True, True),
        logprobs=(0.0, -0.1, -1 / 3),
        policy_version=2,
    )
    return Rollout(
        task_id=task,
        index=index,
        samples=(sample,),
        reward=0.5,
        trace=trace(),
        metrics={"calls": 1.0},
    )


def path_of(run: Path) -> Path:
    return next((run / "rollouts").iterdir())


def trace() -> Trace:
    step = Step(kind="answer", index=0, reply="Paris", memory="", seconds=0.25)
    return Trace(
        question="Where?", steps=(step,), model="m", prompts="agent", source="a", document_sha256=""
    )


def test_rollouts_are_restored_with_their_traces(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 7)
    assert log.finished == []
    for index in range(3):
        log.add(rollout("a", index))
    assert RolloutLog(tmp_path, 7).finished == [rollout("a", index) for index in range(3)]
    assert RolloutLog(tmp_path, 8).finished == []


def test_a_torn_line_is_discarded(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 7)
    log.add(rollout("a", 0))
    log.add(rollout("a", 1))
    path = path_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    again = RolloutLog(tmp_path, 7)
    assert again.finished == [rollout("a", 0)]
    again.add(rollout("a", 1))
    assert len(RolloutLog(tmp_path, 7).finished) == 2


def test_a_damaged_line_is_a_one_line_error(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 7)
    for index in range(3):
        log.add(rollout("a", index))
    path = path_of(tmp_path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(RunError, match=r"step-000007\.jsonl, line 2, is damaged") as caught:
        RolloutLog(tmp_path, 7)
    assert "\n" not in str(caught.value)
    changed = whole.replace(b'"runs": [[1, 3]]', b'"runs": [[1, 9]]', 1)
    path.write_bytes(changed)
    with pytest.raises(RunError, match=r"step-000007\.jsonl, line 1, is damaged"):
        RolloutLog(tmp_path, 7)
    path.write_bytes(re.sub(rb',"crc":"[0-9a-f]{8}"\}\n', b"}\n", changed))  # as before checksums
    with pytest.raises(
        RunError, match=r"line 1: a saved rollout is damaged .*ValueError"
    ) as caught:
        RolloutLog(tmp_path, 7)
    assert "\n" not in str(caught.value)


def test_a_torn_wave_is_discarded_and_replaced(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 1)
    log.add_wave([rollout("a", 0), rollout("a", 1)])
    log.add_wave([rollout("b", 0), rollout("b", 1)])
    path = path_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))  # the second wave lacks a rollout and its end
    again = RolloutLog(tmp_path, 1)
    assert again.waves == [[rollout("a", 0), rollout("a", 1)]]
    again.add_wave([rollout("b", 0), rollout("b", 1)])
    assert path.read_bytes() == b"".join(lines)
    assert again.waves[0] == [rollout("a", 0), rollout("a", 1)]


def test_rollouts_that_a_checkpoint_covers_are_removed(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        RolloutLog(tmp_path, step).add(rollout("a", 0))
    forget_rollouts(tmp_path, until=4)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000005.jsonl"]


def test_a_record_for_people_holds_the_trace_as_everywhere_and_no_tokens() -> None:
    task = Example(id="a", task="t", question="Where?", answers=("Paris",), documents=())
    group = Group(task_id="a", rollouts=(rollout("a", 1),))
    (found,) = readable_group(group, task, [0.25])
    record = json.loads(json.dumps(found))
    assert Trace.from_dict(record.pop("trace")) == trace()
    assert record == {
        "task_id": "a",
        "question": "Where?",
        "answers": ["Paris"],
        "index": 1,
        "reward": 0.5,
        "status": "ok",
        "error": None,
        "metrics": {"calls": 1.0},
        "record": {},
        "advantage": 0.25,
        "group_rewards": [0.5],
    }
