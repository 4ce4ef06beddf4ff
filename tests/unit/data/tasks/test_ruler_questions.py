"""Questions among paragraphs: gold once, neighbours first, evidence in the gold paragraphs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.lengths import bucket_counts, uniformity_p
from memagent.data.tasks.registry import Task, open_task
from memagent.data.tasks.ruler.questions import sentence_around
from memagent.errors import DataError
from tests.support.published import Published
from tests.support.ruler_sources import TOWNS, ruler_settings, squad


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ruler") / "sources"


def opened(folder: Path, task: str, **settings: Any) -> Task:
    given = {"tokens": 6000, "tokenizer": "bytes", **settings}
    return open_task(f"ruler/{task}", ruler_settings(folder, f"ruler/{task}", **given))


def gold_of(example: Example) -> list[str]:
    return [example.passages[number].text for number in example.metadata["gold_documents"]]


# --- SQuAD ----------------------------------------------------------------------------------------


def test_every_answerable_question_of_squad_is_there_once(folder: Path) -> None:
    task = opened(folder, "qa_1")
    assert task.num_available == 30
    made = [task.example(index) for index in range(30)]
    assert len({example.question for example in made}) == 30
    assert not any("burnt" in example.question for example in made)
    with pytest.raises(DataError, match="ruler/qa_1 has 30 questions; there is none of index 30"):
        task.example(30)


def test_the_sentence_with_the_answer_is_the_evidence(folder: Path) -> None:
    for index in range(10):
        example = opened(folder, "qa_1").example(index)
        (item,) = example.evidence
        assert example.answers[0] == f"in {example.answers[1]}"
        assert all(answer in item.text for answer in example.answers)
        assert item.text.startswith("The mill no.")
        assert item.text.endswith("by the river.")
        assert gold_of(example) == [example.passages[item.document].text]


def test_paragraphs_of_the_same_article_come_first(folder: Path) -> None:
    example = opened(folder, "qa_1", tokens=1500).example(0)
    town = next(town for town in TOWNS if town in example.question)
    from_town = [passage for passage in example.passages if passage.text.startswith(town)]
    assert len(example.passages) > 3
    assert len(from_town) == min(5, len(example.passages))  # the gold one and its four neighbours


def test_a_paragraph_is_headed_by_its_number_alone(folder: Path) -> None:
    example = opened(folder, "qa_1").example(0)
    assert example.text().startswith(f"Document 1:\n{example.passages[0].text}\n\nDocument 2:\n")


def test_a_small_pool_goes_round_without_the_gold(folder: Path) -> None:
    example = opened(folder, "qa_1", tokens=30_000).example(0)
    counts = Counter(passage.text for passage in example.passages)
    rounds = example.metadata["pool_rounds"]
    assert rounds == max(counts.values()) > 1
    assert counts[gold_of(example)[0]] == 1


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    file = squad()
    for article in file["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][1:]
    (tmp_path / "squad.json").write_text(json.dumps(file))
    with pytest.raises(DataError, match="holds no question that has an answer"):
        open_task("ruler/qa_1", {"tokens": 4096, "questions": str(tmp_path / "squad.json")})


def test_a_single_paragraph_has_nothing_around_it(tmp_path: Path) -> None:
    file = squad()
    file["data"] = file["data"][:1]
    file["data"][0]["paragraphs"] = file["data"][0]["paragraphs"][:1]
    (tmp_path / "squad.json").write_text(json.dumps(file))
    given = {"tokens": 4096, "tokenizer": "bytes", "questions": str(tmp_path / "squad.json")}
    with pytest.raises(DataError, match="no paragraph to put around question Arlen-0"):
        open_task("ruler/qa_1", given).example(0)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("rains", "It rains."),
        ("J. Low", "Then J. Low came (late.)"),
        ("late.) He", "Then J. Low came (late.) He sat"),
        ("sat", "He sat"),
    ],
)
def test_the_sentence_around_a_span_is_found(answer: str, sentence: str) -> None:
    text = "It rains. Then J. Low came (late.) He sat"
    start, end = sentence_around(text, text.index(answer), text.index(answer) + len(answer))
    assert text[start:end] == sentence


# --- HotpotQA -------------------------------------------------------------------------------------


def test_the_marked_sentences_are_the_evidence(folder: Path) -> None:
    task = opened(folder, "qa_2")
    for index in range(6):
        example = task.example(index)
        number = example.metadata["source_id"].removeprefix("h")
        texts = {item.text for item in example.evidence}
        town = TOWNS[int(number)]
        assert texts == {
            f"Mayor {number} was born in {town}.",
            f"The bridge of {town} was built by {example.answers[0]}.",
        }
        titles = {example.passages[item.document].title for item in example.evidence}
        assert titles == {f"Mayor {number}", f"Bridge of {town}"}


def test_the_questions_own_paragraphs_come_first(folder: Path) -> None:
    example = opened(folder, "qa_2", tokens=900).example(0)
    number = example.metadata["source_id"].removeprefix("h")
    own = [passage for passage in example.passages if f"Other {number}." in passage.title]
    assert len(own) == 4
    assert len(example.passages) < 12


def test_without_a_pool_the_paragraphs_of_all_questions_are_used(folder: Path) -> None:
    given = ruler_settings(folder, "ruler/qa_2", tokens=3000, tokenizer="bytes")
    del given["paragraphs"]
    example = open_task("ruler/qa_2", given).example(0)
    titles = {passage.title.split()[0] for passage in example.passages}
    assert titles <= {"Mayor", "Bridge", "Other"}
    assert example.origin is not None
    assert sorted(example.origin.sources) == ["hotpotqa-dev"]


def test_gold_paragraphs_stand_anywhere(folder: Path) -> None:
    depths = []
    for seed in range(100):
        task = opened(folder, "qa_2", seed=seed)
        for index in range(5):
            example = task.example(index)
            place = next(e.document for e in example.evidence if e.text.startswith("Mayor"))
            depths.append((place + 0.5) / len(example.passages))
    assert uniformity_p(bucket_counts(depths, num_buckets=5)) > 0.001


def test_one_paragraph_is_shortened_to_meet_the_length(folder: Path) -> None:
    whole = {
        paragraph["context"] for article in squad()["data"] for paragraph in article["paragraphs"]
    }
    num_shortened = 0
    for index in range(10):
        example = opened(folder, "qa_1", tokens=5000).example(index)
        cut = [passage.text for passage in example.passages if passage.text not in whole]
        assert len(cut) == int(example.metadata["is_one_shortened"])
        assert all(any(text.startswith(piece) for text in whole) for piece in cut)
        num_shortened += len(cut)
    assert num_shortened > 0


# --- the published files --------------------------------------------------------------------------


def test_books_are_essays(tokenizer_folder: Path, published: Published) -> None:
    books = str(published.folder / "books")
    given = {"tokens": 100_000, "tokenizer": str(tokenizer_folder), "essays": books}
    example = open_task("ruler/niah_multivalue", given).example(0)
    assert 98_000 <= (example.num_tokens or 0) <= 100_000
    assert len(example.evidence) == 4
