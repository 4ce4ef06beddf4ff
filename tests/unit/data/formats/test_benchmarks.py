"""Files of LongBench, HELMET and LOFT, in the shape of the published ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from memagent.cli.main import run as memagent
from memagent.data.example import Example
from memagent.data.formats.benchmarks import benchmark_of, read_dataset
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.formats.original import convert_dataset
from memagent.errors import DataError
from memagent.eval.items import plan_items
from memagent.eval.records import read_items
from memagent.eval.suites import Suite
from memagent.rewards.verifiers import grade

LONGBENCH = {
    "input": "Who wrote the ledger?",
    "context": "Passage 1:\nThe ledger was written by Anna.",
    "answers": ["Anna", "Anna Berg"],
    "length": 8,
    "dataset": "hotpotqa_e",
    "language": "en",
    "all_classes": None,
    "_id": "abc",
}
V2 = {
    "_id": "66f",
    "domain": "Single-Document QA",
    "sub_domain": "Academic",
    "difficulty": "hard",
    "length": "short",
    "question": "What was sold?",
    "choice_A": "salt",
    "choice_B": "maps",
    "choice_C": "chairs",
    "choice_D": "nothing",
    "answer": "B",
    "context": "In 1871 maps were sold.",
}
CORPUS = [
    {"pid": "doc1", "title_text": "Salt", "passage_text": "Salt was sold in 1871.", "metadata": {}},
    {"pid": "doc2", "title_text": "Maps", "passage_text": "Anna drew the maps.", "metadata": {}},
]


def written(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def only(path: Path) -> Example:
    [example] = read_dataset(path)
    return example


# --- LongBench ------------------------------------------------------------------------------------


def test_longbench_questions_keep_their_text_and_are_graded_by_f1(tmp_path: Path) -> None:
    example = only(written(tmp_path / "hotpotqa.jsonl", LONGBENCH))
    assert (example.id, example.task, example.grader) == ("abc", "longbench/hotpotqa", "f1")
    assert (example.question, example.answers) == ("Who wrote the ledger?", ("Anna", "Anna Berg"))
    assert example.text() == LONGBENCH["context"]
    assert example.metadata["longbench"]["length"] == 8


@pytest.mark.parametrize(
    ("dataset", "asked", "grader"),
    [
        ("gov_report", "Write a summary of the text.", "f1"),
        ("trec", "The classes are: number, place", "contains"),
        ("passage_retrieval_en", "Reply with its number", "recall"),
        ("passage_count", "How many different paragraphs", "lenient"),
        ("lcc", "Write the next line of code.", "f1"),
    ],
)
def test_longbench_tasks_without_a_question_get_one(
    tmp_path: Path, dataset: str, asked: str, grader: str
) -> None:
    classes = {"all_classes": ["number", "place"], "input": ""}
    example = only(written(tmp_path / "x.jsonl", {**LONGBENCH, "dataset": dataset, **classes}))
    assert asked in example.question
    assert (example.task, example.grader) == (f"longbench/{dataset}", grader)


def test_longbench_v2_asks_for_the_letter_and_takes_the_choice_too(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([V2, {**V2, "_id": "67f", "answer": "D"}]))
    first, second = read_dataset(path)
    assert first.task == "longbench-v2/single-document-qa"
    assert "\nB. maps\n" in first.question
    for reply in ("B", r"\boxed{B}", "maps", "The answer is B."):
        assert grade(first.grader, reply, first.answers).value == 1.0, reply
    assert grade(first.grader, "A", first.answers).value == 0.0
    assert second.answers[0] == "D"
    for answer in ("E", "AB", ""):
        wrong = written(tmp_path / "wrong.jsonl", {**V2, "answer": answer})
        with pytest.raises(DataError, match=rf"wrong\.jsonl, line 1: answer is '{answer}'"):
            only(wrong)


# --- HELMET ---------------------------------------------------------------------------------------


def test_helmet_documents_and_contexts_are_read(tmp_path: Path) -> None:
    ctxs = [{"id": "1", "title": "Salt", "text": "Salt was sold."}, {"text": "Maps."}]
    rag = {"question": "What was sold?", "answers": ["salt"], "ctxs": ctxs, "depth": 0.5}
    first, second = read_dataset(written(tmp_path / "kilt" / "nq_k2_dep1.jsonl", rag, rag))
    assert (first.task, first.grader) == ("helmet/nq_k2_dep1", "contains")
    assert first.text() == "Document 1:\nSalt\nSalt was sold.\n\nDocument 2:\nMaps."
    assert first.id != second.id, "HELMET repeats questions"
    needle = {
        "index": 0,
        "query": "fox",
        "context": "One of the special magic numbers for fox is 512.",
        "outputs": ["512", "64"],
        "type_needle_v": "numbers",
        "length": 9,
    }
    found = only(written(tmp_path / "ruler" / "niah_mv" / "validation_8192.jsonl", needle))
    assert found.question == "What are all the special magic numbers for fox mentioned in the text?"
    assert (found.answers, found.match, found.grader) == (("512", "64"), "all", "ruler_all")
    pair = {"context": '{"a": "b"}', "question": "a", "answer": "b", "num_kvs": 1, "demos": []}
    assert only(written(tmp_path / "json_kv.jsonl", pair)).question == (
        "What is the value of the key a in the JSON object?"
    )
    story = {"id": 3, "context": "Anna left.", "input": "Who left?", "answer": ["Anna"]}
    choice = {**story, "options": ["Bo", "Anna"]}
    asked = only(written(tmp_path / "choice.jsonl", choice))
    assert (asked.answers, asked.grader) == (("B", "Anna", "B. Anna"), "lenient")
    assert "\nA. Bo\nB. Anna\n" in asked.question
    open_one = only(written(tmp_path / "qa.jsonl", {**story, "options": []}))
    assert (open_one.question, open_one.grader) == ("Who left?", "f1")


# --- LOFT -----------------------------------------------------------------------------------------


def loft(folder: Path, **query: Any) -> Path:
    written(folder / "corpus.jsonl", *CORPUS)
    qrels = {"metadata": {"qrels": [["doc2", 1]]}}
    return written(
        folder / "dev_queries.jsonl", {"qid": "q1", "query_text": "who drew maps", **qrels, **query}
    )


def test_loft_queries_are_asked_over_the_whole_corpus_with_its_evidence(tmp_path: Path) -> None:
    example = only(loft(tmp_path / "rag" / "nq" / "128k", answers=["Anna", "Anna Berg"]))
    assert (example.id, example.task, example.match) == ("q1", "loft/rag-nq", "any")
    assert example.target_tokens == 128 * 1024
    assert example.text() == (
        "Document 1:\nSalt\nSalt was sold in 1871.\n\nDocument 2:\nMaps\nAnna drew the maps."
    )
    [evidence] = example.evidence
    assert (evidence.document, evidence.text) == (1, "Anna drew the maps.")
    several = only(loft(tmp_path / "rag" / "quest" / "32k", answers=["Anna", "Bo"]))
    assert (several.match, several.task) == ("all", "loft/rag-quest")
    assert grade(several.grader, "Anna", several.answers, several.match).value == 0.5


def test_loft_retrieval_asks_for_ids_that_stand_in_the_text(tmp_path: Path) -> None:
    folder = tmp_path / "retrieval" / "nq" / "32k"
    example = only(loft(folder, answers=[["doc2", 1]]))
    assert example.answers == ("doc2",)
    assert "ID doc2: Maps\nAnna drew the maps." in example.text()
    assert "Reply with their IDs." in example.question
    assert grade(example.grader, r"\boxed{doc2}", example.answers).value == 1.0
    assert grade(example.grader, r"\boxed{doc1}", example.answers).value == 0.0


# --- what cannot be read --------------------------------------------------------------------------


def test_what_cannot_be_graded_or_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    alone = written(
        tmp_path / "alone" / "dev_queries.jsonl",
        {"qid": "q", "query_text": "who", "answers": ["x"], "metadata": {}},
    )
    with pytest.raises(DataError, match=r"corpus\.jsonl does not exist; queries of LOFT need"):
        only(alone)
    with pytest.raises(DataError, match="several turns"):
        only(loft(tmp_path / "turns", query_text=["one", "two"], answers=["x"]))
    with pytest.raises(DataError, match="cannot be graded here"):
        only(loft(tmp_path / "sql", answers=[[], 3]))
    ranking = {"qid": "q", "query": "who", "ctxs": [{"id": "1", "text": "x", "label": 1}]}
    with pytest.raises(DataError, match="rankings of HELMET"):
        only(written(tmp_path / "msmarco.jsonl", ranking))
    with pytest.raises(DataError, match="none of the options"):
        only(
            written(
                tmp_path / "o.jsonl",
                {"context": "x", "input": "?", "answer": ["z"], "options": ["a", "b"]},
            )
        )
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2"):
        list(read_dataset(written(tmp_path / "bad.jsonl", LONGBENCH, {**LONGBENCH, "answers": 3})))
    torn = tmp_path / "torn.jsonl"
    torn.write_text("{")
    assert benchmark_of(torn) is None
    with pytest.raises(DataError):
        list(read_dataset(torn))


def test_our_own_files_are_read_as_before(tmp_path: Path) -> None:
    example = only(written(tmp_path / "hotpotqa.jsonl", LONGBENCH))
    write_examples(tmp_path / "ours.jsonl", [example])
    assert benchmark_of(tmp_path / "ours.jsonl") is None
    assert only(tmp_path / "ours.jsonl") == example
    converted = convert_dataset(tmp_path / "hotpotqa.jsonl", tmp_path / "again.jsonl", task="mine")
    assert converted.source_kind == "longbench"
    assert [one.task for one in read_examples(tmp_path / "again.jsonl")] == ["mine"]


# --- in an evaluation -----------------------------------------------------------------------------


def test_an_evaluation_reads_them_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = loft(tmp_path / "rag" / "nq" / "32k", answers=["Anna"])
    bench = written(tmp_path / "hotpotqa.jsonl", LONGBENCH, {**LONGBENCH, "_id": "abd"})
    files = ["--file", str(queries), "--file", str(bench)]
    run_dir = tmp_path / "run"
    command = ["eval", *files, "--engine", "scripted", "--run-dir", str(run_dir), "--quiet"]
    assert memagent(command) == 0, capsys.readouterr().err
    found = {(record.task, record.grader): record for record in read_items(run_dir)}
    assert set(found) == {("loft/rag-nq", "contains"), ("longbench/hotpotqa", "f1")}
    assert found["loft/rag-nq", "contains"].depth is not None
    suite = Suite.parse({"tasks": [{"files": [str(queries)]}]})
    before = plan_items(suite).files
    written(queries.parent / "corpus.jsonl", CORPUS[0])
    assert plan_items(suite).files != before, "another corpus is another dataset"
