"""Files of the original project: imported, exported, and the same afterwards."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.data.example import Example, Passage, join
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.formats.original import (
    kind_of,
    read_original,
    split_documents,
    write_original,
)
from memagent.errors import DataError

CONTEXT = "Document 1:\nOslo\nOslo is in Norway.\n\nDocument 2:\nBern\nBern lies on the Aare. Yes."
OSLO = Passage(title="Oslo", text="Oslo is in Norway.")
BERN = Passage(title="Bern", text="Bern lies on the Aare. Yes.")

TRAIN: dict[str, Any] = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "On what does Bern lie?"}],
    "context": CONTEXT,
    "ability": "memory",
    "reward_model": {"style": "rule", "ground_truth": ["Aare", "the Aare"]},
    "extra_info": {"index": 41, "question": "On what does Bern lie?", "num_docs": 2},
}
FILTERED: dict[str, Any] = {
    **TRAIN,
    "responses_pretrain": ["Rhine", "Rhone"],
    "score_boxed_pretrain": [0.0, 1.0],
}
HOTPOT: dict[str, Any] = {
    "context": CONTEXT,
    "input": "On what does Bern lie?",
    "answers": ["Aare"],
    "num_docs": 2,
    "index": 7,
}
RULER: dict[str, Any] = {
    "index": 3,
    "input": "What are all the magic numbers for fox?",
    "context": "The grass is green. A magic number for fox is: 512. A magic number for fox is: 77.",
    "outputs": ["512", "77"],
    "answer_prefix": " The numbers are",
    "length": 8100,
}
POOL = ["Aarau\nA town.", "Bern\nBern lies on the Aare. Yes.", "Oslo\nOslo is in Norway."]
NUMBERED: dict[str, Any] = {**HOTPOT, "context": [2, 1], "num_docs": 12800}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_array(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(records))
    return path


# --- training files -------------------------------------------------------------------------------


def test_a_training_row_becomes_an_example(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "hotpotqa_train.parquet", [TRAIN])
    (example,) = read_original(path, "original-train")
    assert example == Example(
        id="hotpotqa_train/0",
        task="hotpotqa",
        question="On what does Bern lie?",
        answers=("Aare", "the Aare"),
        documents=(OSLO, BERN),
        metadata={
            "original-train": {
                "data_source": "hotpotqa",
                "ability": "memory",
                "reward_model": {"style": "rule"},
                "extra_info": {"index": 41, "question": "On what does Bern lie?", "num_docs": 2},
            }
        },
    )
    assert example.text() == CONTEXT


@pytest.mark.parametrize("rows", [[TRAIN, TRAIN], [FILTERED] * 3])
def test_training_rows_are_the_same_after_import_and_export(
    rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "in.parquet", rows)
    examples = list(read_original(path, "original-train"))
    assert write_original(tmp_path / "out.parquet", "original-train", examples) == len(rows)
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
    write_examples(tmp_path / "between.jsonl", examples)  # also by way of a file of ours
    write_original(
        tmp_path / "out2.parquet", "original-train", read_examples(tmp_path / "between.jsonl")
    )
    assert pq.read_table(tmp_path / "out2.parquet").to_pylist() == rows


def test_several_messages_and_a_single_answer_survive(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, *TRAIN["prompt"]]
    row = {**TRAIN, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "Aare"}}
    path = write_rows(tmp_path / "in.parquet", [row])
    (example,) = read_original(path, "original-train")
    assert (example.question, example.answers) == ("On what does Bern lie?", ("Aare",))
    write_original(tmp_path / "out.parquet", "original-train", [example])
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [row]


def test_rows_that_differ_in_type_are_one_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.parquet", [FILTERED])
    (example,) = read_original(path, "original-train")
    kept = {**example.metadata["original-train"], "score_boxed_pretrain": "none"}
    other = replace(example, metadata={"original-train": kept})
    with pytest.raises(DataError, match="score_boxed_pretrain differs in type from row to row"):
        write_original(tmp_path / "out.parquet", "original-train", [example, other])
    with pytest.raises(DataError, match="a row does not fit"):
        write_original(tmp_path / "out.parquet", "original-train", [*[example] * 64, other])
    assert not (tmp_path / "out.parquet").exists()


def test_examples_of_ours_become_training_rows_of_the_published_schema(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.parquet", [TRAIN])
    (example,) = read_original(path, "original-train")
    write_original(tmp_path / "out.parquet", "original-train", [replace(example, metadata={})] * 2)
    table = pq.read_table(tmp_path / "out.parquet")
    info = {"question": "On what does Bern lie?", "num_docs": 2}
    assert table.to_pylist() == [
        {**TRAIN, "extra_info": {"index": index, **info}} for index in range(2)
    ]
    assert table.schema.field("prompt").type == pa.list_(
        pa.struct({"role": pa.string(), "content": pa.string()})
    )


def test_no_examples_still_have_the_published_columns(tmp_path: Path) -> None:
    write_original(tmp_path / "out.parquet", "original-train", [])
    assert set(pq.read_table(tmp_path / "out.parquet").column_names) == set(TRAIN)
    write_original(tmp_path / "out.json", "original-eval", [])
    assert json.loads((tmp_path / "out.json").read_text()) == []


# --- evaluation files -----------------------------------------------------------------------------


def test_a_hotpotqa_record_becomes_an_example(tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval_2.json", [HOTPOT])
    (example,) = read_original(path, "original-eval")
    assert example == Example(
        id="eval_2/0",
        task="hotpotqa",
        question="On what does Bern lie?",
        answers=("Aare",),
        documents=(OSLO, BERN),
        target_tokens=287,
        metadata={"original-eval": {"num_docs": 2, "index": 7}},
    )


def test_a_ruler_record_asks_for_all_its_outputs(tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval_niah_multivalue_8192.json", [RULER])
    (example,) = read_original(path, "original-eval")
    assert (example.task, example.match, example.grader) == (
        "ruler/niah_multivalue",
        "all",
        "ruler_all",
    )
    assert example.answers == ("512", "77")
    assert example.text() == RULER["context"]


def test_a_ruler_question_of_squad_asks_for_one_of_its_outputs(tmp_path: Path) -> None:
    (tmp_path / "qa_1").mkdir()
    record = {**RULER, "context": CONTEXT}
    path = write_array(tmp_path / "qa_1" / "validation.json", [record])
    (example,) = read_original(path, "original-eval")
    assert (example.task, example.match, example.grader) == ("ruler/qa_1", "any", "ruler_part")
    assert example.passages[0] == Passage(text="Oslo\nOslo is in Norway.")
    (renamed,) = read_original(path, "original-eval", task="mine")
    assert renamed.task == "mine"


@pytest.mark.parametrize("record", [HOTPOT, RULER, NUMBERED])
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_records_are_the_same_after_import_and_export(
    record: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    path = write_array(tmp_path / "in.json", [record, {**record, "index": 0, "input": "Ä?"}])
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps(POOL))
    examples = list(read_original(path, "original-eval", pool=pool))
    target = tmp_path / f"out.{ending}"
    assert write_original(target, "original-eval", examples) == 2
    data = target.read_bytes()
    text = gzip.decompress(data) if ending == "json.gz" else data
    assert json.loads(text) == json.loads(path.read_text())


def test_numbers_of_documents_are_looked_up_in_a_pool(tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval_12800.json", [NUMBERED])
    pool = tmp_path / "pool.jsonl"
    pool.write_text(
        "\n".join(
            json.dumps(dict(zip(("title", "text"), one.split("\n"), strict=True))) for one in POOL
        )
    )
    (example,) = read_original(path, "original-eval", pool=pool)
    assert example.documents == (OSLO, BERN)
    assert example.text() == CONTEXT


def test_the_pool_of_a_hotpotqa_file_is_its_paragraphs_sorted(tmp_path: Path) -> None:
    item = {
        "_id": "q",
        "question": "?",
        "answer": "a",
        "supporting_facts": [],
        "context": [["Oslo", ["Oslo is", " in Norway."]], ["Bern", [BERN.text]], ["Aarau", ["A"]]],
    }
    pool = tmp_path / "hotpotqa_dev.json"
    pool.write_text(json.dumps([item, {**item, "_id": "r"}]))
    path = write_array(tmp_path / "eval_12800.json", [NUMBERED])
    (example,) = read_original(path, "original-eval", pool=pool)
    assert example.documents == (OSLO, BERN)


def test_numbers_without_a_pool_or_outside_of_it_are_named(tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval.json", [HOTPOT, {**NUMBERED, "context": [0, 3]}])
    found = read_original(path, "original-eval")
    next(found)
    with pytest.raises(
        DataError, match=r"record 2: context holds numbers of documents; give .*`pool`"
    ):
        next(found)
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps(POOL))
    with pytest.raises(DataError, match=r"record 2: there is no document 3 in .* which has 3;"):
        list(read_original(path, "original-eval", pool=pool))


def test_numbered_documents_do_not_reach_training_files_as_numbers(tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval.json", [NUMBERED])
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps(POOL))
    write_original(
        tmp_path / "out.parquet", "original-train", read_original(path, "original-eval", pool=pool)
    )
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["context"] == CONTEXT
    assert set(row) == set(TRAIN)


def test_examples_of_ours_become_evaluation_records(tmp_path: Path) -> None:
    ours = Example(
        id="x", task="hotpotqa", question="Q?", answers=("Aare",), documents=(OSLO, BERN)
    )
    fox = replace(
        ours, task="ruler/vt", grader="ruler_all", documents=(Passage(text="X"),), num_tokens=900
    )
    write_original(tmp_path / "out.json", "original-eval", [ours, fox])
    assert json.loads((tmp_path / "out.json").read_text()) == [
        {"context": CONTEXT, "input": "Q?", "answers": ["Aare"], "index": 0, "num_docs": 2},
        {
            "index": 1,
            "input": "Q?",
            "context": "X",
            "outputs": ["Aare"],
            "answer_prefix": "",
            "length": 900,
        },
    ]


# --- texts and kinds ------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["Document 1:\n", "Document 2:\n", "\n\n", "\n", "a", "Document "]))
)
def test_documents_join_to_the_text_they_were_split_from(pieces: list[str]) -> None:
    context = "".join(pieces)
    for have_titles in (True, False):
        assert join(split_documents(context, have_titles=have_titles)) == context


@pytest.mark.parametrize(
    ("context", "num_documents"),
    [
        (CONTEXT, 2),
        ("no documents here", 1),
        ("Document 2:\nOslo\nOslo is in Norway.", 1),
        ("Document 1:\nA\nB\n\nDocument 1:\nA\nB", 1),
        ("before\n\nDocument 1:\nA\nB", 1),
    ],
)
def test_only_documents_numbered_in_order_are_split(context: str, num_documents: int) -> None:
    assert len(split_documents(context)) == num_documents


def test_formats_are_detected_from_the_contents(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.parquet", [TRAIN])
    hotpot = write_array(tmp_path / "eval.json", [HOTPOT])
    ours = list(read_original(hotpot, "original-eval"))
    write_examples(tmp_path / "ours.parquet", ours)
    write_examples(tmp_path / "ours.jsonl.gz", ours)
    names = (train, hotpot, tmp_path / "ours.parquet", tmp_path / "ours.jsonl.gz")
    assert [kind_of(name) for name in names] == [
        "original-train",
        "original-eval",
        "memagent",
        "memagent",
    ]
    with pytest.raises(DataError, match="neither a dataset of memagent nor"):
        kind_of(write_array(tmp_path / "other.json", [{"a": 1}]))
    with pytest.raises(DataError, match="neither a dataset of memagent nor"):
        kind_of(write_rows(tmp_path / "other.parquet", [{"a": 1}]))
    with pytest.raises(DataError, match=r"a dataset ends in \.jsonl, \.parquet or \.json"):
        kind_of(tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": None}, "record 1: input: input should be a valid string"),
        ({"answers": "Aare"}, "record 1: answers: input should be a valid list"),
        ({"answers": None}, "record 1: it needs answers (HotpotQA) or outputs (RULER)"),
        ({"outputs": ["x"]}, "record 1: it needs answers (HotpotQA) or outputs (RULER)"),
    ],
)
def test_a_wrong_record_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_array(tmp_path / "eval.json", [{**HOTPOT, **change}])
    with pytest.raises(DataError) as caught:
        list(read_original(path, "original-eval"))
    assert message in str(caught.value)


def test_a_wrong_ending_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a file of original-train ends in \.parquet; name it so"):
        write_original(tmp_path / "out.json", "original-train", [])


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_docs", "tokens"), [(50, 7168), (100, 14336), (25_600, 3_670_016)])
def test_a_number_of_documents_is_the_length_it_is_published_as(
    tmp_path: Path, num_docs: int, tokens: int
) -> None:
    path = tmp_path / "eval.json"
    path.write_text(json.dumps([{**HOTPOT, "num_docs": num_docs}]))
    [example] = read_original(path, "original-eval")
    assert (example.target_tokens, example.num_tokens) == (tokens, None)


@pytest.mark.parametrize(
    ("name", "length", "target"),
    [
        ("vt.json", 8100, 8192),
        ("vt.json", 8192, 8192),
        ("vt_10000.json", 9400, 10_000),
        ("vt.json", 5000, None),
    ],
)
def test_the_tokens_of_a_text_are_rounded_up_to_what_was_requested(
    tmp_path: Path, name: str, length: int, target: int | None
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps([{**RULER, "length": length}]))
    [example] = read_original(path, "original-eval")
    assert (example.target_tokens, example.num_tokens) == (target, length)


def test_a_length_that_is_no_number_is_no_length(tmp_path: Path) -> None:
    path = tmp_path / "vt.json"
    path.write_text(json.dumps([{**RULER, "length": "8k"}, {**RULER, "length": -1}]))
    found = [(one.target_tokens, one.num_tokens) for one in read_original(path, "original-eval")]
    assert found == [(None, None)] * 2
