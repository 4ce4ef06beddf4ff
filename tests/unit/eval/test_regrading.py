"""Grading again: other graders' scores beside a run's own, without a call."""

import json
from pathlib import Path

import pytest

from memagent.cli.main import run as memagent
from memagent.errors import ConfigError, RunError
from memagent.eval.records import ItemRecord, read_items, regrade
from memagent.eval.report.report import load_report
from memagent.eval.setup import evaluate
from memagent.eval.stats import mean_interval
from memagent.eval.suites import Suite
from memagent.run_files import sealed
from tests.support.eval_runs import failed, item, make_run

TASK = "codes"


def answered(index: int, answer: str, *golds: str, **values: object) -> ItemRecord:
    values = {"match": "any", "answer": answer, "answers": golds, **values}
    return item(TASK, "reader", 2048, index, **values)


def run_of(folder: Path) -> Path:
    """Right, half right, without an accepted answer, failed."""
    return make_run(
        folder,
        [
            answered(0, "Paris", "Paris"),
            answered(1, "Paris Texas", "Paris", score=0.0),
            answered(2, "It is not known.", grader="unanswerable"),
            failed(TASK, "reader", 2048, 3, match="any"),
        ],
    )


def test_answers_are_graded_again_and_the_run_itself_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    before = (run / "steps.jsonl").read_bytes(), (run / "run.json").read_bytes()
    records = regrade(run, ["f1", "recall"])
    assert [record.scores for record in records] == [
        {"f1": 1.0, "recall": 1.0},
        {"f1": pytest.approx(2 / 3), "recall": 1.0},
        {},
        {},
    ]
    assert [record.score for record in records] == [1.0, 0.0, 1.0, 0.0]
    assert ((run / "steps.jsonl").read_bytes(), (run / "run.json").read_bytes()) == before
    assert list(read_items(run, with_traces=False)) == records


def test_all_answers_are_required_where_the_example_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [answered(0, "6", "6", "11", match="all")])
    assert regrade(run, ["lenient"])[0].scores == {"lenient": 0.5}  # its own grader, again
    assert regrade(run, ["ruler_all", "ruler_part"])[0].scores == {
        "lenient": 0.5,
        "ruler_all": 0.5,
        "ruler_part": 1.0,
    }


def test_grading_again_covers_what_was_asked_since(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [answered(0, "Paris", "Paris")], num_planned=2)
    regrade(run, ["f1"])
    with (run / "steps.jsonl").open("ab") as journal:
        journal.write(sealed(answered(1, "Rome", "Paris", score=0.0).to_json()) + b"\n")
    with pytest.raises(RunError, match="answers that f1 has not graded"):
        load_report([str(run)], grader="f1")
    assert [record.scores for record in regrade(run, ["f1"])] == [{"f1": 1.0}, {"f1": 0.0}]
    assert load_report([str(run)], grader="f1").results[0].score.value == 0.5


def test_a_report_by_another_grader_counts_failed_items_and_keeps_unanswerable_ones(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run")
    regrade(run, ["f1"])
    [row] = load_report([str(run)], grader="f1").results
    assert row.score == mean_interval([1.0, 2 / 3, 1.0, 0.0])
    assert row.graders == ("f1", "unanswerable")
    [own] = load_report([str(run)]).results
    assert own.score.value == 0.5
    assert own.further == (("f1", row.score),)


async def test_several_graders_in_one_run_give_what_grading_again_gives(tmp_path: Path) -> None:
    suite = Suite.parse(
        {
            "tasks": [{"tasks": ["ruler/niah_multivalue"], "tokens": [2048]}],
            "num": 3,
            "length_tokenizer": "bytes",
            "grader": "ruler_all",
            "graders": ["f1", "contains"],
            "sources": {"essays": str(_essay(tmp_path))},
        }
    )
    records = await evaluate(suite, "scripted", run_dir=tmp_path / "run")
    assert {tuple(record.scores) for record in records} == {("f1", "contains")}
    again = regrade(tmp_path / "run", ["f1", "contains", "recall"])
    by_key = {record.key: record for record in again}
    for record in records:
        assert by_key[record.key].scores.items() > record.scores.items()
    with pytest.raises(RunError, match="graders was"):
        await evaluate(
            suite.model_copy(update={"graders": []}), "scripted", run_dir=tmp_path / "run"
        )


def _essay(folder: Path) -> Path:
    texts = folder / "essays"
    texts.mkdir()
    (texts / "one.txt").write_text("The harbour was quiet in winter. " * 400, encoding="utf-8")
    return texts


def test_what_cannot_be_graded_is_an_error_of_one_line(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", [item(TASK, "reader", 2048, 0)])
    with pytest.raises(RunError, match="earlier version"):
        regrade(old, ["f1"])
    with pytest.raises(ConfigError, match="there is no grader 'f2'; "):
        regrade(old, ["f2"])
    with pytest.raises(RunError, match="holds no finished items"):
        regrade(make_run(tmp_path / "empty", [], num_planned=1), ["f1"])
    run = run_of(tmp_path / "run")
    regrade(run, ["f1"])
    (run / "grades" / "f1.jsonl").write_text('{"item": 4}\n{"item": 5}\n', encoding="utf-8")
    with pytest.raises(RunError, match=r"f1.jsonl, line 1, is damaged; delete the file"):
        list(read_items(run))


def test_the_command_prints_a_column_for_each_grader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    assert memagent(["eval", "regrade", str(run), "--grader", "f1", "--grader", "exact"]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["exact", "f1"]
    assert row.split()[-2:] == ["50.0", "66.7"]
    assert memagent(["eval", "regrade", str(run), "--grader", "f1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["further"]["f1"]["score"] == pytest.approx((1 + 2 / 3 + 1) / 4)
    assert memagent(["report", str(run), "--grader", "strict"]) == 2
    assert "with --grader strict grades them without asking again" in capsys.readouterr().err


def test_samples_are_averaged_for_each_question_before_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    asked = ["--task", "beyond/two_hop", "--lengths", "2k", "--num", "2", "--samples", "3"]
    engine = ["--engine", "scripted", "--set", "length_tokenizer=bytes", "--set", "temperature=0"]
    assert memagent(["eval", *asked, *engine, "--run-dir", str(run)]) == 0
    shown = capsys.readouterr()
    head, row, *_ = shown.out.splitlines()
    assert head.split()[3:5] == ["items", "answers"]
    assert row.split()[3:5] == ["2", "6"]
    assert "do not differ at --set temperature=0" in shown.err
    [result] = load_report([str(run)]).results
    assert (result.score.num, result.num_samples) == (2, 6)
    assert load_report([str(run)]).runs[0].state == "finished"
    regraded = regrade(run, ["f1"])
    assert len({record.key for record in regraded}) == 6
    assert all("f1" in record.scores for record in regraded)
    assert memagent(["eval", "--resume", str(run), "--samples", "4"]) == 2
    assert "samples was 3, now 4" in capsys.readouterr().err


def test_eval_without_a_command_still_runs_a_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", "beyond/two_hop", "--lengths", "2k", "--num", "1"]
    engine = ["--engine", "scripted", "--set", "length_tokenizer=bytes", "--json", "--quiet"]
    graders = ["--grader", "lenient", "--grader", "f1"]
    run = tmp_path / "run"
    assert memagent(["eval", *arguments, *engine, *graders, "--run-dir", str(run)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["graders"], list(row["further"])) == (["lenient"], ["f1"])
    assert memagent(["eval", "run", "--resume", str(run), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [row]
