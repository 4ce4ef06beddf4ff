"""`memagent data convert`: between our formats, and to and from those of the original project."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from memagent.cli.main import run
from memagent.data.example import Example, Passage
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.formats.original import kind_of

Capture = pytest.CaptureFixture[str]

OURS = [
    Example(
        id=f"x-{index}",
        task="hotpotqa",
        question=f"Question {index}?",
        answers=("Aare",),
        documents=(Passage(title="A", text="B"), Passage(title="C", text="D")),
    )
    for index in range(3)
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_examples("ours.jsonl", OURS)


def test_lines_become_parquet_and_lines_again(capsys: Capture) -> None:
    assert run(["data", "convert", "ours.jsonl", "ours.parquet"]) == 0
    assert capsys.readouterr() == ("", "ours.parquet: 3 examples (memagent to memagent)\n")
    assert run(["data", "convert", "ours.parquet", "again.jsonl"]) == 0
    assert Path("again.jsonl").read_bytes() == Path("ours.jsonl").read_bytes()


def test_a_json_file_is_an_evaluation_file_of_the_original_project() -> None:
    assert run(["data", "convert", "ours.jsonl", "eval.json"]) == 0
    assert [one["input"] for one in json.loads(Path("eval.json").read_text())] == [
        "Question 0?",
        "Question 1?",
        "Question 2?",
    ]
    assert run(["data", "convert", "eval.json", "back.jsonl", "--task", "mine"]) == 0
    assert [(one.id, one.task, one.text()) for one in read_examples("back.jsonl")] == [
        (f"eval/{index}", "mine", OURS[index].text()) for index in range(3)
    ]


def test_training_files_are_written_on_request(capsys: Capture) -> None:
    assert run(["data", "convert", "ours.jsonl", "train.parquet", "--to", "original-train"]) == 0
    assert kind_of("train.parquet") == "original-train"
    assert (
        pq.read_table("train.parquet").column("context").to_pylist()
        == ["Document 1:\nA\nB\n\nDocument 2:\nC\nD"] * 3
    )
    assert run(["data", "convert", "train.parquet", "back.jsonl"]) == 0
    assert "3 examples (original-train to memagent)" in capsys.readouterr().err


def test_numbers_of_documents_need_a_pool(capsys: Capture) -> None:
    record = {"context": [1, 0], "input": "Q?", "answers": ["a"], "num_docs": 2, "index": 0}
    Path("eval.json").write_text(json.dumps([record]))
    Path("pool.json").write_text(json.dumps(["A\nB", "C\nD"]))
    assert run(["data", "convert", "eval.json", "out.jsonl"]) == 2
    assert "--pool" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    assert run(["data", "convert", "eval.json", "out.jsonl", "--pool", "pool.json"]) == 0
    (example,) = read_examples("out.jsonl")
    assert example.documents == (Passage(title="C", text="D"), Passage(title="A", text="B"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours.jsonl", "ours.jsonl"], "would be converted to itself"),
        (["ours.jsonl", "out.csv"], "out.csv: a dataset ends in"),
        (["none.jsonl", "out.jsonl"], "none.jsonl does not exist"),
        (
            ["ours.jsonl", "out.jsonl", "--task", "x"],
            "--pool and --task are for files of the original",
        ),
        (["ours.jsonl", "out.json", "--to", "original-train"], "ends in .parquet; name it so"),
        (["ours.jsonl", "out.jsonl", "--from", "original-eval"], "line 1: input: field required"),
        (["ours.jsonl", "out.jsonl", "--from", "csv"], "Invalid value for '--from'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert run(["data", "convert", *arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["ours.jsonl"]
