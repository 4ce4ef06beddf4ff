"""HotpotQA-long: lengths, places, what may fill a text, and that train and dev never mix."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.formats.files import write_examples
from memagent.data.formats.original import DatasetKind, write_original
from memagent.data.inspection import evidence_depths
from memagent.data.tasks.hotpotqa import HotpotTask, open_hotpotqa
from memagent.data.tasks.lengths import bucket_counts, uniformity_p
from memagent.data.tasks.registry import LEFT_OUT, open_task, rebuild
from memagent.errors import ConfigError, DataError
from memagent.tokens.tokenizers import open_tokenizer
from tests.support.hotpot import HotpotFiles, fillers, item, write_hotpot
from tests.support.published import Published


def opened(files: HotpotFiles, **settings: Any) -> HotpotTask:
    return open_hotpotqa("hotpotqa", {"tokenizer": "bytes", **files.settings, **settings})


def titles(example: Example) -> list[str]:
    return [passage.title for passage in example.passages]


@pytest.fixture
def files(tmp_path: Path) -> HotpotFiles:
    return write_hotpot(tmp_path)


# --- the text -------------------------------------------------------------------------------------


def test_a_text_has_the_documents_asked_for_and_each_once(files: HotpotFiles) -> None:
    example = opened(files, docs=50).example(0)
    name = example.metadata["hotpotqa_id"].removeprefix("id-")
    assert len(set(titles(example))) == 50
    own = {f"Object {name}", f"Person {name}", f"Near {name} a", f"Near {name} b"}
    assert own <= set(titles(example))
    assert sum(title.startswith("Filler") for title in titles(example)) == 46
    assert example.num_tokens == len(example.text().encode())


def test_evidence_is_the_marked_sentences(files: HotpotFiles) -> None:
    task = opened(files, docs=20)
    for index in range(12):
        example = task.example(index)
        name = example.metadata["hotpotqa_id"].removeprefix("id-")
        assert {one.text for one in example.evidence} == {
            f"It was made by Person {name}.",
            f"Person {name} was born in Town {name}.",
        }
        text = example.text()
        for one, (start, end) in zip(example.evidence, example.evidence_offsets(), strict=True):
            assert text[start:end] == one.text
            assert example.passages[one.document].text[one.start : one.end] == one.text


def test_where_sentences_are_not_split_the_paragraph_is_the_evidence(tmp_path: Path) -> None:
    unsplit = item("x")
    unsplit["context"][1][1] = [" Object x is old. It was made by Person x. "]
    files = write_hotpot(tmp_path, dev=[unsplit])
    evidence = {one.text for one in opened(files, docs=5).example(0).evidence}
    assert evidence == {"Object x is old. It was made by Person x.", "Person x was born in Town x."}


@pytest.mark.parametrize("tokens", [700, 1500, 4000, 12000])
def test_a_length_in_bytes_is_met_within_two_percent(files: HotpotFiles, tokens: int) -> None:
    task = opened(files, tokens=tokens)
    for index in range(12):
        example = task.example(index)
        assert example.num_tokens == len(example.text().encode())
        assert 0.98 * tokens <= example.num_tokens <= tokens
        assert len(set(titles(example))) == len(example.passages)


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "estimate"])
def test_a_length_is_met_by_any_tokenizer(
    files: HotpotFiles, kind: str, tokenizer_folder: Path, qwen_like_folder: Path
) -> None:
    name = {"gpt2": str(tokenizer_folder), "qwen": str(qwen_like_folder)}.get(kind, kind)
    tokenizer = open_tokenizer(name)
    for tokens in (900, 3000):
        example = opened(files, tokens=tokens, tokenizer=name).example(1)
        assert example.num_tokens == tokenizer.count(example.text())
        assert 0.98 * tokens <= example.num_tokens <= tokens


def test_paragraphs_are_counted_once_and_kept(tmp_path: Path) -> None:
    files = write_hotpot(tmp_path, paragraphs=fillers(300, seed=1))
    task = opened(files, tokens=2000)
    task.example(0)
    (kept,) = task.store.folder.glob("counts-*.bin")
    costs = [
        len(f"{p.title}\n{p.text}\n\n".encode())
        for p in map(task.store.passage, range(task.store.num_paragraphs))
    ]
    assert list(task._costs) == costs
    before = kept.stat()
    opened(files, tokens=3000).example(0)
    assert kept.stat().st_mtime_ns == before.st_mtime_ns
    assert list(task.store.folder.glob("counts-*.bin")) == [kept]
    opened(files, tokens=1000, tokenizer="estimate").example(0)
    assert len(list(task.store.folder.glob("counts-*.bin"))) == 2, "another tokenizer's"


# --- questions and places -------------------------------------------------------------------------


def test_every_length_asks_the_same_questions(files: HotpotFiles) -> None:
    lengths: list[dict[str, int]] = [{"docs": 5}, {"docs": 100}, {"tokens": 900}, {"tokens": 9000}]
    asked = [[opened(files, **one).example(n).question for n in range(12)] for one in lengths]
    assert asked[0] == asked[1] == asked[2] == asked[3]
    assert len(set(asked[0])) == 12
    assert [opened(files, docs=5, seed=1).example(n).question for n in range(12)] != asked[0]


def test_questions_can_be_used_in_the_order_of_their_file(files: HotpotFiles) -> None:
    task = opened(files, docs=5, order="file")
    ids = [json.loads(line)["_id"] for line in files.dev.read_text().splitlines()]
    assert [task.example(n).metadata["hotpotqa_id"] for n in range(12)] == ids
    assert task.example(3).origin.settings["order"] == "file"
    assert "order" not in opened(files, docs=5).example(3).origin.settings


@pytest.mark.parametrize("kind", ["ours", "original-eval", "original-train"])
def test_a_selection_names_the_questions_of_every_length(
    files: HotpotFiles, tmp_path: Path, kind: DatasetKind
) -> None:
    chosen = [opened(files, docs=5).example(n) for n in (7, 2, 9)]
    ending = {"ours": "jsonl", "original-eval": "json", "original-train": "parquet"}[kind]
    file = tmp_path / f"chosen.{ending}"
    if kind == "ours":
        write_examples(file, chosen)
    else:
        write_original(file, kind, chosen)
    for docs in (5, 60):
        task = opened(files, docs=docs, selection=str(file), seed=3)
        assert task.num_available == 3
        assert [task.example(n).question for n in range(3)] == [one.question for one in chosen]
    origin = task.example(0).origin
    assert origin.sources["selection"] == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=rf"no question 3: {file} has 3; lower `num`"):
        task.example(3)
    assert rebuild(replace(task.example(1), documents=None)) == task.example(1)


def test_questions_of_a_selection_that_are_not_in_the_split_are_counted(tmp_path: Path) -> None:
    both = write_hotpot(tmp_path / "one", dev=[item("a"), item("b"), item("c")])
    file = tmp_path / "chosen.jsonl"
    write_examples(file, [opened(both, docs=5).example(n) for n in range(3)])
    less = write_hotpot(tmp_path / "two", dev=[item("b")])
    task = opened(less, docs=5, selection=str(file))
    assert task.num_available == 1
    assert task.about["left_out"]["questions of the selection that are not in the split"] == 2
    none = write_hotpot(tmp_path / "three", dev=[item("d")])
    with pytest.raises(DataError, match=r"no question of .*chosen.jsonl is among the 1 of this"):
        opened(none, docs=5, selection=str(file))
    with pytest.raises(DataError, match=r"missing.jsonl"):
        opened(none, docs=5, selection=str(tmp_path / "missing.jsonl"))


def test_an_example_does_not_depend_on_earlier_ones(files: HotpotFiles) -> None:
    forwards, backwards = opened(files, tokens=1500), opened(files, tokens=1500)
    made = [forwards.example(index) for index in range(12)]
    assert [backwards.example(index) for index in reversed(range(12))] == made[::-1]


@pytest.mark.parametrize("length", [{"docs": 40}, {"tokens": 8000}], ids=str)
def test_evidence_is_spread_evenly_over_depth(tmp_path: Path, length: dict[str, int]) -> None:
    files = write_hotpot(tmp_path, dev=[item(f"d{n}") for n in range(500)])
    task = opened(files, **length)
    depths = [depth for n in range(500) for depth in evidence_depths(task.example(n))]
    assert len(depths) == 1000
    assert uniformity_p(bucket_counts(depths, num_buckets=10)) > 0.01


def test_yes_and_no_are_kept_and_marked(tmp_path: Path) -> None:
    files = write_hotpot(tmp_path, dev=[item("a", answer="yes"), item("b")])
    made = [opened(files, docs=5).example(n) for n in range(2)]
    flags = {example.answers: example.metadata["is_yes_no"] for example in made}
    assert flags == {("yes",): True, ("Town b",): False}


def test_a_text_is_rebuilt_from_its_origin(files: HotpotFiles) -> None:
    example = opened(files, tokens=3000).example(3)
    bare = replace(example, documents=None)
    assert rebuild(bare).text() == example.text()
    moved = files.dev.rename(files.dev.with_name("moved.jsonl"))
    lost = replace(bare, origin=replace(bare.origin, settings={**bare.origin.settings, "seed": 5}))
    with pytest.raises(DataError, match=r"dev.jsonl does not exist"):
        rebuild(lost)
    assert rebuild(bare, settings={"dev": str(moved)}).text() == example.text()


def test_a_text_that_is_rebuilt_differently_is_refused(files: HotpotFiles) -> None:
    bare = replace(opened(files, tokens=3000).example(3), documents=None, text_sha256="0" * 64)
    with pytest.raises(DataError, match="is not what it was when it was built"):
        rebuild(bare)


# --- what may fill a text -------------------------------------------------------------------------


def test_own_paragraphs_never_come_again_as_filler(tmp_path: Path) -> None:
    same_title = {"title": "object  X", "text": "Another account of it."}
    same_text = {"title": "Elsewhere", "text": "person x was born in Town x. Little  else is told."}
    files = write_hotpot(tmp_path, dev=[item("x")], paragraphs=[same_title, same_text, *fillers(9)])
    task = opened(files, docs=13)
    example = task.example(0)
    assert len(example.passages) == 13
    assert not {"object X", "Elsewhere"} & set(titles(example))
    assert {task.store.passage(number).title for number in task.store.item(0).taken} == {
        "object X",
        "Elsewhere",
    }


def test_doubles_are_left_out_of_the_pool(tmp_path: Path) -> None:
    first, second = fillers(2)
    again = {"title": "A new name", "text": first["text"].upper()}
    files = write_hotpot(tmp_path, paragraphs=[first, second, again])
    task = opened(files, docs=5)
    assert task.store.num_pool == 2
    assert task.about["left_out"] == {"paragraphs that are there twice": 1}


def test_without_a_file_of_paragraphs_the_questions_own_are_the_pool(files: HotpotFiles) -> None:
    task = opened(files, paragraphs=None, docs=30)
    assert task.store.num_pool == 12 * 4
    assert set(task.store.fingerprints) == {"hotpotqa-dev"}
    assert all(" d" in title for title in titles(task.example(0)))


# --- train and dev --------------------------------------------------------------------------------


def test_a_pool_for_training_has_no_gold_of_development_questions(tmp_path: Path) -> None:
    by_title = {"title": "Object d0 ", "text": "Told in other words."}
    by_text = {"title": "Someone", "text": "Person d1 was born in Town d1. Little else is told."}
    near = {"title": "Near d1 a", "text": "Nothing is known of d1 here."}
    pool = [by_title, by_text, near, *fillers(6)]
    files = write_hotpot(tmp_path, paragraphs=pool)
    train, dev = (opened(files, split=split, docs=8) for split in ("train", "dev"))
    names = [train.store.passage(number).title for number in range(train.store.num_pool)]
    assert names == ["Near d1 a", *(f"Filler {n}" for n in range(6))]
    assert train.about["left_out"] == {"paragraphs that development questions rest on": 2}
    assert dev.store.num_pool == 9


def test_distractors_for_training_are_no_gold_of_development_questions(tmp_path: Path) -> None:
    mixed = item("t0")
    mixed["context"].append(["Object d0", ["Object d0 is old.", " It was made by Person d0."]])
    files = write_hotpot(tmp_path, train=[mixed])
    task = opened(files, split="train", docs=30)
    assert "Object d0" not in titles(task.example(0))
    assert task.example(0).metadata["is_gold_in_dev"] is False


def test_gold_of_both_splits_is_marked(tmp_path: Path) -> None:
    shared = item("d0", question="Who made Object d0?", answer="Person d0")
    files = write_hotpot(tmp_path, train=[{**shared, "_id": "another"}, item("t1")])
    task = opened(files, split="train", docs=10)
    marked = {
        e.metadata["hotpotqa_id"]: e.metadata["is_gold_in_dev"] for e in map(task.example, (0, 1))
    }
    assert marked == {"another": True, "id-t1": False}


@pytest.mark.parametrize(
    "double",
    [
        {**item("t5"), "_id": "id-d3"},
        item("t5", question="  where was the Maker of object d3 born? "),
    ],
    ids=["id", "question"],
)
def test_a_question_of_both_splits_is_refused(tmp_path: Path, double: dict[str, Any]) -> None:
    files = write_hotpot(tmp_path, train=[item("t0"), double])
    with pytest.raises(DataError, match=r"is a development question too .*overlap=drop"):
        opened(files, split="train", docs=10)
    task = opened(files, split="train", docs=10, overlap="drop")
    assert task.num_available == 1
    assert task.about["left_out"] == {"questions that are development questions too": 1}


def test_questions_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    no_gold = item("a")
    no_gold["supporting_facts"] = [["Gone", 0], ["Person a", 0]]
    wrong = item("b", answer="Nowhere at all")
    files = write_hotpot(tmp_path, dev=[no_gold, wrong, item("c"), {**item("c"), "_id": "again"}])
    task = opened(files, docs=10)
    assert task.num_available == 1
    assert task.about["left_out"] == {
        "questions that are asked twice": 1,
        "questions whose answer is not in their gold paragraphs": 1,
        "questions without two gold paragraphs": 1,
    }


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"docs": 305}, r"docs=305 needs 301 paragraphs .* the pool has 300; lower `docs`"),
        (
            {"tokens": 80},
            r"tokens=80 is below the \d+ tokens of question id-.*gold paragraphs; raise `tokens`",
        ),
        ({"tokens": 500_000}, r"too few paragraphs for tokens=500000: all 300 leave \d+ tokens"),
        ({}, r"give the length of the text as docs=200 or as tokens=28000"),
        ({"docs": 9, "tokens": 900}, r"one of them"),
        ({"docs": 9, "dcos": 3}, r"unknown setting dcos; did you mean docs\?"),
        ({"docs": 9, "dev": "nowhere.json"}, r"nowhere.json does not exist"),
    ],
)
def test_a_text_that_cannot_be_built_is_refused(
    files: HotpotFiles, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        opened(files, **settings).example(0)


def test_a_question_longer_than_the_text_takes_fewer_of_its_own_distractors(tmp_path: Path) -> None:
    long = item("long")
    gold = {title for title, _ in long["supporting_facts"]}
    for title, sentences in long["context"]:
        if title not in gold:
            sentences[:] = ["word " * 400]
    files = write_hotpot(tmp_path, dev=[long, *(item(f"q{number}") for number in range(60))])
    task = opened(files, tokens=1500, tokenizer="bytes")
    found = {one.metadata["hotpotqa_id"]: one for one in map(task.example, range(61))}
    example = found["id-long"]
    assert gold <= set(titles(example))
    assert 1470 <= example.num_tokens <= 1500
    assert example.metadata["num_distractors_left_out"] >= 1
    assert len(example.evidence) == len(long["supporting_facts"])
    assert all(LEFT_OUT not in one.metadata for name, one in found.items() if name != "id-long")


def test_fewer_documents_than_paragraphs_leave_distractors_out(files: HotpotFiles) -> None:
    example = opened(files, docs=3).example(0)
    assert len(example.passages) == 3
    assert example.metadata[LEFT_OUT] == 1


def test_the_smallest_text_holds_the_gold_paragraphs_alone(files: HotpotFiles) -> None:
    example = opened(files, docs=2, distractors=0).example(0)
    assert sorted(title.split()[0] for title in titles(example)) == ["Object", "Person"]


def test_an_index_beyond_the_questions_is_refused(files: HotpotFiles) -> None:
    with pytest.raises(DataError, match="there is no question 12: dev has 12"):
        opened(files, docs=10).example(12)


# --- published files ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "dev"])
def test_published_answers_are_in_the_evidence_paragraphs(split: str, published: Published) -> None:
    folder = str(published.folder / "hotpotqa")
    sources = dict.fromkeys(("train", "dev", "paragraphs"), folder)
    settings = {"split": split, "docs": 20, "tokenizer": "bytes", "seed": 3, **sources}
    task = open_task("hotpotqa", settings)
    num_yes_no = 0
    for index in range(300):
        example = task.example(index)
        (answer,) = example.answers
        documents = {one.document for one in example.evidence}
        assert len(documents) == 2
        held = [example.passages[n] for n in documents]
        if example.metadata["is_yes_no"]:
            num_yes_no += 1
        else:
            assert any(answer in p.text or answer in p.title for p in held), example.id
        for one in example.evidence:
            assert example.passages[one.document].text[one.start : one.end] == one.text
    assert 5 < num_yes_no < 60
