"""Reports: what runs show together, what does not compare, and what is written."""

import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from memagent.cli.report import command
from memagent.errors import ConfigError, MemagentError, RunError
from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.report import (
    load_report,
    notes,
    published_tables,
    report_plots,
    report_tables,
    write_report,
)
from memagent.eval.report.tables import csv_text, markdown
from memagent.eval.stats import wilson
from memagent.runs import Run
from tests.support.eval_runs import failed, item, lifelike, make_run

TASK = "hotpotqa"


def reader_run(folder: Path, *, num: int = 4, **manifest: object) -> Path:
    """One right item after the other, and one that failed."""
    items = [item(TASK, "reader", 7000, index) for index in range(num - 1)]
    return make_run(folder, [*items, failed(TASK, "reader", 7000, num - 1)], **manifest)


def direct_run(folder: Path) -> Path:
    items = [item(TASK, "direct", 7000, index, score=float(index == 0)) for index in range(4)]
    return make_run(folder, items)


# --- what is put together -------------------------------------------------------------------------


def test_a_run_is_summed_up_with_its_failures(tmp_path: Path) -> None:
    report = load_report([str(reader_run(tmp_path / "run"))])
    [row] = report.results
    assert (row.series, row.score, row.num_failed) == ("reader", wilson(3, 4), 1)
    assert report.runs[0].state == "finished"
    assert notes(report)[0] == (
        "4 answers, 1 of them failed (25.0 %). Failed items count as wrong: they score 0 and stay in n."
    )
    assert "seed 7" in notes(report)[1]


def test_records_in_any_order_give_the_same_report(tmp_path: Path) -> None:
    items = lifelike([TASK], num=8)
    one = make_run(tmp_path / "a" / "run", items)
    other = make_run(
        tmp_path / "b" / "run",
        items[::-1],
        methods=json.loads((one / "run.json").read_text())["methods"],
    )
    assert load_report([str(one)]) == load_report([str(other)])


def test_series_are_named_by_method_and_by_model_where_there_are_several(tmp_path: Path) -> None:
    one, other = reader_run(tmp_path / "a"), direct_run(tmp_path / "b")
    assert load_report([str(one), str(other)]).series == ("reader", "direct")
    large = reader_run(tmp_path / "c", model="lab/large-14B")
    assert load_report([str(one), str(large)]).series == ("tiny-7B, reader", "large-14B, reader")
    twin = reader_run(tmp_path / "d", model="other/tiny-7B")
    names = load_report([str(one), str(twin)]).series
    assert names == ("lab/tiny-7B, reader", "other/tiny-7B, reader")
    assert load_report([f"ours={one}", str(other)]).series == ("ours", "direct")


def test_runs_of_other_seeds_are_pooled(tmp_path: Path) -> None:
    one = reader_run(tmp_path / "a")
    items = [item(TASK, "reader", 7000, index, id=f"new{index}", seed=9) for index in range(4)]
    other = make_run(tmp_path / "b", items, seed=8)
    report = load_report([str(one), str(other)])
    assert report.results[0].score == wilson(7, 8)
    assert "seeds 7, 8" in notes(report)[1]


def test_methods_of_two_runs_are_compared_on_the_same_items(tmp_path: Path) -> None:
    names = [str(reader_run(tmp_path / "a")), str(direct_run(tmp_path / "b"))]
    [row] = load_report(names).comparisons
    assert (row.first, row.second, row.comparison.difference.value) == ("reader", "direct", 0.5)
    assert (row.comparison.num_better, row.comparison.num_equal) == (2, 2)


def test_an_unfinished_run_is_marked_everywhere(tmp_path: Path) -> None:
    whole = direct_run(tmp_path / "whole")
    part = reader_run(tmp_path / "part", num_planned=10)
    report = load_report([str(whole), str(part)])
    assert [run.state for run in report.runs] == ["finished", "UNFINISHED"]
    assert [row.series for row in report.unfinished] == ["reader"]
    assert (
        "UNFINISHED: part has 4 of 10 items; its rows are marked with * and may change."
        in notes(report)
    )
    [results] = [table for table in report_tables(report) if table.name == "results"]
    text = markdown(results)
    assert "| hotpotqa | 7k | reader | 4* | 75.0 [30.1, 95.4] | 25.0 % (1) |" in text
    assert "| hotpotqa | 7k | direct | 4 | 25.0 [4.6, 69.9] | 0 |" in text


def test_a_line_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    run = reader_run(tmp_path / "run", num_planned=5)
    with (run / "steps.jsonl").open("ab") as journal:
        journal.write(b'{"id": "torn')
    assert load_report([str(run)]).results[0].score == wilson(3, 4)


# --- what does not compare ------------------------------------------------------------------------


def message_of(names: list[str]) -> str:
    with pytest.raises(MemagentError) as caught:
        load_report(names)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_same_items_twice_are_refused(tmp_path: Path) -> None:
    one, other = reader_run(tmp_path / "a"), reader_run(tmp_path / "b")
    message = message_of([str(one), str(other)])
    assert f"{one} and {other} hold the same items of reader on hotpotqa" in message
    assert f"LABEL={other}" in message
    assert load_report([f"first={one}", f"second={other}"]).series == ("first", "second")
    assert "is given twice" in message_of([str(one), str(one)])


def test_one_method_with_other_settings_is_refused_unless_it_has_another_name(
    tmp_path: Path,
) -> None:
    one = reader_run(tmp_path / "a")
    items = [item(TASK, "reader", 14000, 0)]
    methods = {"reader": {"name": "reader", "settings": {"window": 4096}}}
    other = make_run(tmp_path / "b", items, methods=methods)
    assert "both hold reader, but with different settings" in message_of([str(one), str(other)])
    assert load_report([str(one), f"short={other}"]).series == ("reader", "short")


def test_an_adapter_makes_another_series(tmp_path: Path) -> None:
    one = reader_run(tmp_path / "a")
    engine = {"spec": "local:tiny", "settings": {"adapter": "lora", "device": "cpu"}}
    other = make_run(tmp_path / "b", [item(TASK, "reader", 14000, 0)], engine=engine)
    assert "different settings" in message_of([str(one), str(other)])


def test_lengths_by_other_tokenizers_are_refused(tmp_path: Path) -> None:
    one = reader_run(tmp_path / "a")
    other = make_run(tmp_path / "b", [item(TASK, "bm25", 7000, 0)], length_tokenizer="gpt2")
    message = message_of([str(one), str(other)])
    assert "with the tokenizer smollm2-135m" in message
    assert "with gpt2, so their lengths are not comparable; report them separately" in message


def test_other_graders_and_other_sources_are_refused(tmp_path: Path) -> None:
    one = reader_run(tmp_path / "a", sources={"hotpotqa": "11"})
    strict = make_run(tmp_path / "b", [item(TASK, "bm25", 7000, 0, grader="strict")])
    assert (
        f"hotpotqa is graded by lenient in {one}, by strict in {strict}; report them separately"
        == message_of([str(one), str(strict)])
    )
    moved = make_run(tmp_path / "c", [item(TASK, "bm25", 7000, 0)], sources={"hotpotqa": "22"})
    assert "different files of the source hotpotqa" in message_of([str(one), str(moved)])


def test_answers_of_other_limits_are_refused_and_long_ones_counted(tmp_path: Path) -> None:
    limited = [
        item("ruler/fwe", "reader", 8192, n, graded_tokens=50, answer_tokens=n * 30)
        for n in range(4)
    ]
    one = make_run(tmp_path / "a", limited)
    assert "2 answers are longer than their task allows; a part of each is graded." in notes(
        load_report([str(one)])
    )
    free = make_run(tmp_path / "b", [item("ruler/fwe", "bm25", 8192, 0)])
    assert message_of([str(one), str(free)]) == (
        f"ruler/fwe is graded by lenient up to 50 tokens in {one}, by lenient in {free}; report them separately"
    )


def test_items_of_a_task_may_have_graders_of_their_own(tmp_path: Path) -> None:
    task = "beyond/unanswerable"
    items = [
        item(task, "reader", 8192, n, grader=("lenient", "unanswerable")[n % 2]) for n in range(4)
    ]
    whole = make_run(tmp_path / "whole", items)
    part = make_run(tmp_path / "part", [item(task, "direct", 8192, 0)], num_planned=4)
    report = load_report([str(whole), str(part)])
    assert "Graded by lenient and unanswerable: beyond/unanswerable." in notes(report)
    other = make_run(tmp_path / "other", [item(task, "bm25", 8192, 1)])
    assert "is graded by unanswerable in" in message_of([str(whole), str(other)])


def test_what_is_no_evaluation_is_refused(tmp_path: Path) -> None:
    with Run.create(tmp_path / "ask", {"kind": "ask"}):
        pass
    assert "is a run of kind 'ask'" in message_of([str(tmp_path / "ask")])
    assert "holds no run" in message_of([str(tmp_path / "nothing")])
    empty = make_run(tmp_path / "empty", [], num_planned=4)
    assert "no finished items yet" in message_of([str(empty)])
    assert "is neither a folder nor LABEL=FOLDER" in message_of(["label="])
    damaged = reader_run(tmp_path / "damaged")
    (damaged / "steps.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(RunError, match="line 1, is damaged"):
        load_report([str(damaged)])


# --- what is written ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three methods over three lengths, with the paper's lines."""
    folder = tmp_path_factory.mktemp("reports")
    run = make_run(folder / "run", lifelike([TASK], methods=("reader", "direct", "bm25"), num=20))
    report = load_report([str(run)], anchors=read_anchors("paper"))
    write_report(report, folder / "out")
    return folder / "out"


def test_everything_is_there(written: Path) -> None:
    assert sorted(str(path.relative_to(written)) for path in written.rglob("*.*")) == [
        "comparisons.csv",
        "depth.csv",
        "plots/accuracy-hotpotqa.png",
        "plots/accuracy-hotpotqa.svg",
        "plots/cost-hotpotqa.png",
        "plots/cost-hotpotqa.svg",
        "published.csv",
        "report.html",
        "report.md",
        "results.csv",
        "runs.csv",
    ]


def test_the_same_runs_give_the_same_bytes(written: Path) -> None:
    report = load_report([str(written.parent / "run")], anchors=read_anchors("paper"))
    again = write_report(report, written.parent / "again")
    for path in again:
        before = written / path.relative_to(written.parent / "again")
        assert path.read_bytes() == before.read_bytes(), path.name


def test_csv_has_numbers_in_full(written: Path) -> None:
    report = load_report([str(written.parent / "run")])
    with (written / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["series"], int(row["tokens"])) for row in rows[:3]] == [
        ("reader", 8192),
        ("direct", 8192),
        ("bm25", 8192),
    ]
    for row, result in zip(rows, report.results, strict=True):
        assert float(row["score"]) == result.score.value
        assert float(row["low"]) == result.score.low
        assert int(row["num_failed"]) == result.num_failed
        assert row["cost"] == ""


def test_markdown_says_how_failures_count_and_marks_what_is_published(written: Path) -> None:
    text = (written / "report.md").read_text()
    assert "Failed items count as wrong: they score 0 and stay in n." in text
    assert "| published | RL-MemAgent-14B (v1) | v1, Table 2 | 83.6 |" in text
    assert "| published | MemAgent-14B without RL | v1, Figure 5, read off a plot | ≈64.1 |" in text
    assert "arXiv 2507.02259" in text
    assert "![hotpotqa: score by length](plots/accuracy-hotpotqa.png)" in text


def test_a_bar_in_a_name_does_not_break_the_markdown_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [item("a|b", "reader", 7000, 0)])
    [results] = [t for t in report_tables(load_report([str(run)])) if t.name == "results"]
    assert "| a\\|b | 7k | reader |" in markdown(results)
    assert csv_text(results).splitlines()[1].startswith("a|b,7000,reader,1,")


def test_published_lengths_near_ours_share_a_column(tmp_path: Path) -> None:
    report = load_report([str(reader_run(tmp_path / "run"))], anchors=read_anchors("paper"))
    [table] = published_tables(report)
    assert table.heads[3:] == [
        *("7k", "14K", "28K", "56K", "112K", "224K", "448K", "896K", "1.75M", "3.5M")
    ]
    lines = table.lines()
    assert lines[0][:5] == ["here", "reader", "", "75.0 [30.1, 95.4]", "–"]  # noqa: RUF001
    assert lines[1][:5] == ["published", "QwenLong-L1-32B", "v1, Table 2", "72.7", "75.0"]


def test_lengths_in_bytes_stand_beside_no_published_lengths_in_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lifelike(["hotpotqa"]), length_tokenizer="bytes")
    report = load_report([str(run)], anchors=read_anchors("paper"))
    assert (report.unit, report.anchors, published_tables(report)) == ("bytes", (), [])
    assert "Lengths are in bytes; published lines, in tokens, are left out." in notes(report)
    plots = {plot.name: plot.svg.decode() for plot in report_plots(report)}
    assert "length of the text in bytes" in plots["accuracy-hotpotqa"]


def test_notes_say_what_failed_and_empty_answers_used(tmp_path: Path) -> None:
    items = [item(TASK, "reader", 8192, 0), item(TASK, "reader", 8192, 1, answer="", score=0.0)]
    report = load_report([str(make_run(tmp_path / "run", items))])
    assert any("0 failed and 1 empty answers used 1,050 tokens" in note for note in notes(report))


def test_console_and_json_show_published_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lifelike(["hotpotqa"], num=4))
    printed = CliRunner().invoke(command, [str(run)])
    assert "RL-MemAgent-14B (v1)" in printed.output
    assert "arXiv 2507.02259" in printed.output
    values = json.loads(CliRunner().invoke(command, [str(run), "--json"]).output)
    lines = [row for row in values["published"] if row["label"] == "RL-MemAgent-14B (v1)"]
    assert {row["tokens"]: row["score"] for row in lines}[7168] == pytest.approx(0.8359)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = load_report([str(reader_run(tmp_path / "run"))])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "memagent\[eval\]"'):
        write_report(report, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    report = load_report([str(reader_run(tmp_path / "run"))])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the report to"):
        write_report(report, tmp_path / "file")
