"""`memagent data inspect`: numbers, examples with marked evidence, JSON, and one line per mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memagent.cli.main import run
from memagent.data.example import Evidence, Example, Passage
from memagent.data.formats.files import write_examples
from memagent.data.inspection import Spread, depths, excerpts, spread, summarize
from memagent.data.tasks.registry import open_task

Capture = pytest.CaptureFixture[str]

FOX = Example(
    id="fox-0",
    task="toy/fox",
    question="Which number belongs to the fox?",
    answers=("512", "five hundred and twelve"),
    documents=(
        Passage(title="Farm", text="A hen."),
        Passage(title="Wood", text="An elm.\nThe fox is 512. An oak."),
    ),
    evidence=(Evidence(document=1, start=8, end=23, text="The fox is 512.", note="fox = 512"),),
    num_tokens=30,
)
HEN = replace(
    FOX, id="hen-0", task="toy/hen", question="Who lays?", answers=("512",), match="all",
    grader="ruler_all", evidence=(), num_tokens=41,
)  # fmt: skip


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "toy.jsonl"
    write_examples(path, [FOX, HEN, replace(FOX, documents=None)])
    return path


def test_a_summary_counts_what_is_there() -> None:
    summary = summarize([FOX, HEN, replace(FOX, documents=None, num_tokens=None)])
    assert summary.num_examples == 3
    assert summary.num_repeated_ids == 1
    assert summary.num_without_text == 1
    assert summary.tasks == {"toy/fox": 2, "toy/hen": 1}
    assert summary.graders == {"lenient": 2, "ruler_all": 1}
    assert summary.num_tokens == Spread(min=30, median=35.5, mean=35.5, max=41)
    assert summary.num_answers == Spread(min=1, median=2.0, mean=5 / 3, max=2)
    assert summary.num_evidence == Spread(min=0, median=1.0, mean=2 / 3, max=1)
    assert summary.num_without_evidence == 1
    assert summary.answers == {"512": 3, "five hundred and twelve": 2}
    assert summary.depths == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_depth_is_the_place_in_the_joined_text() -> None:
    (depth,) = depths(FOX)
    assert depth == 50 / 73
    assert (FOX.text().index("The fox"), len(FOX.text())) == (50, 73)
    assert spread([]) is None


def test_an_excerpt_stays_within_its_document() -> None:
    (wide,) = excerpts(FOX, around_chars=100)
    assert (wide.before, wide.text, wide.after) == ("An elm.\n", "The fox is 512.", " An oak.")
    (narrow,) = excerpts(FOX, around_chars=3)
    assert (narrow.before, narrow.after) == ("m.\n", " An")
    assert (narrow.document, narrow.title, narrow.note) == (1, "Wood", "fox = 512")


def test_inspect_prints_numbers_and_examples(dataset: Path, capsys: Capture) -> None:
    assert run(["data", "inspect", str(dataset), "--samples", "1"]) == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for expected in (
        f"{dataset}: 3 examples",
        "toy/fox 2",
        "toy/hen 1",
        "1 have the id of an earlier one",
        "tokens 30 30 33.7 41",
        "documents 2 2 2.0 2",
        "graded by lenient (2), ruler_all (1)",
        "most frequent answers: '512' (3), 'five hundred and twelve' (2)",
        "1 are stored without their text; --text rebuilds it",
        "evidence by depth (no significant unevenness; p = 0.44)",
        f"0.6-0.7 1 {'#' * 40}",
        "[0] fox-0",
        "question: Which number belongs to the fox?",
        "answers: '512' or 'five hundred and twelve'",
        "text: 2 documents, 30 tokens",
        "68.5% document 2 Wood: An elm. >>>The fox is 512.<<< An oak. (remember: fox = 512)",
    ):
        assert expected in lines, output
    assert "Who lays?" not in output


def test_index_picks_examples(dataset: Path, capsys: Capture) -> None:
    assert run(["data", "inspect", str(dataset), "--index", "2", "--index", "1"]) == 0
    output = capsys.readouterr().out
    assert "[0]" not in output
    assert output.index("[1] hen-0") < output.index("[2] fox-0")
    assert "answers:  '512'\n" in output
    assert "text:     not in the file; --text rebuilds it" in output


def test_json_has_the_same(dataset: Path, capsys: Capture) -> None:
    assert run(["data", "inspect", str(dataset), "--json", "--samples", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_examples"], report["tasks"]) == (3, {"toy/fox": 2, "toy/hen": 1})
    (entry,) = report["examples"]
    assert entry["answers"] == ["512", "five hundred and twelve"]
    assert entry["evidence"][0]["text"] == "The fox is 512."


def test_texts_are_rebuilt_on_request(tmp_path: Path, capsys: Capture) -> None:
    task = open_task("ruler/niah_single_1", {"tokens": 3000, "tokenizer": "bytes", "seed": 5})
    path = tmp_path / "needles.jsonl"
    made = [task.example(index) for index in range(2)]
    write_examples(path, [replace(example, documents=None) for example in made])
    assert run(["data", "inspect", str(path), "--text", "--index", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_without_text"] == 1, "only the text that is shown is made again"
    (entry,) = report["examples"]
    (evidence,) = entry["evidence"]
    assert made[1].answers[0] in evidence["text"]
    assert evidence["depth"] == depths(made[1])[0]
    assert run(["data", "inspect", str(path), "--text"]) == 0
    assert f">>>{evidence['text']}<<<" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy.jsonl", "--index", "3"], "toy.jsonl has no example 3: it has 3"),
        (["none.jsonl"], "none.jsonl does not exist"),
        (["empty.jsonl"], "empty.jsonl holds no examples"),
        (["toy.txt"], "toy.txt: a dataset ends in .jsonl, .jsonl.gz, .parquet"),
        (["bad.jsonl"], "bad.jsonl, line 1: question: field required"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(dataset.parent)
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text('{"id": "a", "task": "t", "answers": [], "documents": null}\n')
    assert run(["data", "inspect", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert message in errors
