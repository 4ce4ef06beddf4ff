"""Records of items: the same after a trip through the journal, and strict about what they hold."""

import json
from pathlib import Path

import pytest

from memagent.errors import RunError
from memagent.eval.records import KIND, ItemKey, ItemRecord, parse_item, read_items
from memagent.runs import Run

RECORD = ItemRecord(
    id="niah/8192/7/3",
    task="ruler/niah_single_1",
    method="reader:paper",
    target_tokens=8192,
    num_tokens=8101,
    index=3,
    seed=99,
    depth=0.25,
    status="ok",
    answer="“4711” \\boxed{4711}",
    answers=("4711",),
    grader="ruler_all",
    score=1.0,
    extracted="4711",
    num_calls=3,
    prompt_tokens=9000,
    completion_tokens=40,
    seconds=1.5,
    cost=0.01,
    num_sections=2,
    trace={"steps": [{"kind": "answer"}]},
    metadata={"needles": 1},
)


def run_with(folder: Path, lines: bytes, *, kind: str = KIND) -> Path:
    Run.create(folder, {"kind": kind}).close()
    (folder / "steps.jsonl").write_bytes(lines)
    return folder


def test_a_record_is_the_same_after_a_trip_through_json() -> None:
    line = RECORD.to_json()
    assert b"\n" not in line
    assert ItemRecord.from_dict(json.loads(line)) == RECORD
    assert RECORD.key == ItemKey("ruler/niah_single_1", "reader:paper", 8192, 3)


def test_half_a_character_in_an_answer_does_not_lose_the_record() -> None:
    broken = ItemRecord.from_dict({**RECORD.to_dict(), "answer": "x\ud800"})
    assert ItemRecord.from_dict(json.loads(broken.to_json())) == broken


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    line = RECORD.to_json() + b"\n"
    run = run_with(tmp_path / "run", line + line[:50])
    assert list(read_items(run)) == [RECORD]


def test_traces_can_be_left_out(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", RECORD.to_json() + b"\n")
    (found,) = read_items(run, with_traces=False)
    assert found.trace == {}
    assert found.score == 1.0


@pytest.mark.parametrize(
    "change", [{"score": "high"}, {"extra": 1}, {"status": "lost"}, {"answers": None}]
)
def test_a_record_that_is_not_one_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(RunError, match="line 4 is damaged"):
        parse_item({**RECORD.to_dict(), **change}, "line 4")


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", b"", kind="ask")
    with pytest.raises(RunError, match="not an evaluation"):
        list(read_items(run))
