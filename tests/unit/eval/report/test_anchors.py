"""Published figures: as published, and a user's own."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from memagent.errors import ConfigError
from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.rows import RULER_TEN

OWN: dict[str, Any] = {
    "citation": "our lab, 2026",
    "unit": "share",
    "num": 50,
    "lines": [
        {"task": "hotpotqa", "label": "ours", "lengths": [8192, 4096], "values": [0.5, 0.75]}
    ],
}


def own_file(folder: Path, **changes: Any) -> str:
    path = folder / "own.json"
    path.write_text(json.dumps({**OWN, **changes}))
    return str(path)


def test_the_papers_lines_are_all_there() -> None:
    lines = read_anchors("paper")
    assert len([line for line in lines if line.task == "hotpotqa"]) == 16
    assert len([line for line in lines if line.task.startswith("ruler/")]) == 12 * 14
    assert {line.citation for line in lines} == {"arXiv 2507.02259"}
    assert {line.num for line in lines} == {128}


def test_a_known_cell_of_the_papers_main_table_is_right() -> None:
    lines = [line for line in read_anchors("paper") if line.task == "hotpotqa"]
    [line] = [line for line in lines if line.label == "RL-MemAgent-14B (v1)"]
    assert dict(line.points)[3_670_016] == pytest.approx(0.7812)
    assert line.at(3_584_000) == pytest.approx(0.7812)  # 25,600 documents
    assert line.at(5000) is None


def test_a_model_has_one_name_in_both_files() -> None:
    lines = read_anchors("paper")
    questions = {line.label for line in lines if line.task == "hotpotqa"}
    ruler = {line.label for line in lines if line.task.startswith("ruler/")}
    assert ruler < questions
    assert questions - ruler == {"RL-MemAgent-14B (v2)", "RL-MemAgent-7B (v2)"}
    assert all("Instruct" in label for label in questions if label.startswith("Qwen2.5-"))


def test_scores_over_128_questions_are_counts_of_them() -> None:
    for line in read_anchors("paper"):
        if line.task == "hotpotqa":
            for _, score in line.points:
                assert abs(score * 128 - round(score * 128)) < 0.01, line


def test_the_published_averages_of_ruler_are_the_means_of_the_ten_tasks() -> None:
    lines = [line for line in read_anchors("paper") if line.task.startswith("ruler/")]
    averages = [line for line in lines if line.task == "ruler/average"]
    assert len(averages) == 14
    for average in averages:
        own = [line for line in lines if line.label == average.label and line.task in RULER_TEN]
        assert len(own) == 10
        for length, score in average.points:
            assert fmean(dict(line.points)[length] for line in own) == pytest.approx(
                score, abs=0.00011
            )


def test_only_what_was_published_as_a_drawing_is_marked_so() -> None:
    marked = {line.label for line in read_anchors("paper") if line.is_read_off_a_plot}
    assert marked == {f"MemAgent-{size} without RL" for size in ("7B", "14B", "32B")}


def test_a_file_of_the_user_is_read_in_its_own_unit(tmp_path: Path) -> None:
    [line] = read_anchors(own_file(tmp_path))
    assert line.points == ((4096, 0.75), (8192, 0.5))
    assert (line.num, line.where, line.is_read_off_a_plot) == (50, "", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "percent", "citation": ""}, "citation: string should have at least 1 character"),
        ({"lines": [{**OWN["lines"][0], "values": [0.5]}]}, "has 2 lengths and 1 values"),
        ({"lines": [{**OWN["lines"][0], "values": [50, 75]}]}, "in share it lies between 0 and 1"),
        ({"citations": "x"}, "unknown setting citations; did you mean citation?"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_anchors(own_file(tmp_path, **changes))
    assert "own.json: " in str(caught.value)
    assert message in str(caught.value)


def test_a_name_that_is_no_file_and_not_shipped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file of anchors nosuch; shipped: paper"):
        read_anchors("nosuch")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        read_anchors(str(tmp_path / "list.json"))
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_anchors(str(tmp_path / "text.json"))
