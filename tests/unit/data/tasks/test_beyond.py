"""Tasks beyond RULER: lengths, places, answers; solvers that read only text and question agree."""

import itertools
import random

import pytest

from memagent.data.example import Example
from memagent.data.tasks.beyond import KINDS
from memagent.data.tasks.beyond.filler import sentences
from memagent.data.tasks.lengths import bucket_counts, uniformity_p
from memagent.data.tasks.registry import open_task
from memagent.rewards.verifiers import grade
from tests.support.beyond_solvers import solve

TASKS = list(KINDS)
EVIDENT = [name for name in TASKS if name != "beyond/unanswerable"]


def examples(name: str, num: int, **settings: object) -> list[Example]:
    task = open_task(name, {"tokens": 9000, "tokenizer": "bytes", "seed": 5, **settings})
    return [task.example(index) for index in range(num)]


def test_a_solver_finds_the_answers_that_are_there() -> None:
    for example in examples("beyond/unanswerable", 100, answerable_share=1.0):
        assert solve(example.task, example.text(), example.question) == example.answers[0]
        assert [item.text for item in example.evidence] != []


@pytest.mark.parametrize("name", TASKS)
def test_a_solver_finds_the_answer_in_a_long_text_full_of_distractors(name: str) -> None:
    (example,) = examples(name, 1, tokens=400_000, distractor_share=0.5)
    assert solve(name, example.text(), example.question) == example.answers[0]


@pytest.mark.parametrize("name", TASKS)
def test_named_spans_are_whole_sentences(name: str) -> None:
    for example in examples(name, 50):
        text = example.text()
        for item, (start, end) in zip(example.evidence, example.evidence_offsets(), strict=True):
            assert text[start:end] == item.text
            assert text[:start] == "" or text[start - 1].isspace()
        for spans in example.metadata["spans"].values():
            for start, end, _ in spans:
                said = text[start:end]
                assert said == said.strip()
                assert said[-1] in ".!>"


@pytest.mark.parametrize("name", EVIDENT)
def test_evidence_is_equally_likely_at_any_depth(name: str) -> None:
    depths = []
    for example in examples(name, 500, tokens=16_384):
        last = len(example.text())
        depths += [item.start / (last - len(item.text)) for item in example.evidence]
    assert uniformity_p(bucket_counts(depths, num_buckets=10)) > 0.01


def test_near_misses_are_equally_likely_at_any_depth() -> None:
    depths = []
    for example in examples("beyond/unanswerable", 500, tokens=16_384):
        last = len(example.text())
        for start, end, _ in example.metadata["spans"]["near_miss"]:
            depths.append(start / (last - (end - start)))
    assert uniformity_p(bucket_counts(depths, num_buckets=10)) > 0.01


@pytest.mark.parametrize("name", TASKS)
def test_the_grader_takes_the_answer_and_no_other(name: str) -> None:
    made = examples(name, 12)
    for example in made:
        for answer in example.answers:
            assert grade(example.grader, answer, example.answers, example.match).value == 1.0
        assert grade(example.grader, "Paris", example.answers, example.match).value == 0.0


# --- what each task promises ----------------------------------------------------------------------


def test_the_filler_is_varied() -> None:
    made = list(itertools.islice(sentences(random.Random(0)), 5000))
    assert len(set(made)) > 4900
    assert all(sentence[0] == '"' or sentence[0].isupper() for sentence in made)
    assert not any(character.isdigit() for sentence in made for character in sentence)


def test_the_second_hop_stands_before_the_first() -> None:
    for example in examples("beyond/two_hop", 100):
        second, first = example.evidence
        assert example.answers[0] in second.text
        assert example.metadata["bridge"] in second.text
        assert example.metadata["bridge"] in first.text
        assert second.end < first.start
        assert len(example.metadata["spans"]["candidate"]) == 5


def test_the_number_of_corrections_differs() -> None:
    made = examples("beyond/corrections", 100)
    assert {example.metadata["num_corrections"] for example in made} == {0, 1, 2, 3, 4}
    for example in made:
        assert len(example.evidence) == example.metadata["num_corrections"] + 1
        assert example.answers[0] in example.evidence[-1].text
        assert example.answers[0] not in example.metadata["outdated"]


def test_the_days_of_several_events_are_asked_for_at_once() -> None:
    for example in examples("beyond/corrections", 5, num_things=24, max_corrections=3):
        assert (example.match, len(set(example.answers))) == ("all", 24)
        assert len(example.evidence) == example.metadata["num_corrections"] + 24
        assert solve(example.task, example.text(), example.question) == ", ".join(example.answers)


def test_late_items_are_asked_for_too() -> None:
    made = examples("beyond/coreference", 30, max_similar=40, tokens=20_000)
    assert max(example.metadata["number"] for example in made) > 30
    for example in made:
        assert solve(example.task, example.text(), example.question) == example.answers[0]


def test_every_number_of_events_is_asked_for() -> None:
    made = examples("beyond/counting", 200)
    assert {int(example.answers[0]) for example in made} == set(range(1, 13))
    assert all(len(example.evidence) == int(example.answers[0]) for example in made)


def test_the_measure_can_be_chosen() -> None:
    assert {example.metadata["measure"] for example in examples("beyond/aggregation", 50)} == {
        "sum",
        "largest",
        "leader",
    }
    for measure in ("sum", "largest", "leader"):
        made = examples("beyond/aggregation", 10, measure=measure)
        assert {example.metadata["measure"] for example in made} == {measure}


def test_the_item_asked_for_is_any_of_the_similar_ones() -> None:
    made = examples("beyond/coreference", 200)
    assert {example.metadata["number"] for example in made} == {1, 2, 3, 4, 5, 6}
    for example in made:
        similar = example.metadata["spans"]["similar"]
        assert len(similar) + 1 == example.metadata["num_similar"]
        before = [span for span in similar if span[1] <= example.evidence[0].start]
        assert len(before) + 1 == example.metadata["number"]


def test_orders_name_a_wrong_answer() -> None:
    seen = set()
    for example in examples("beyond/injection", 200):
        orders = example.metadata["spans"]["injection"]
        assert 1 <= len(orders) <= 3
        for start, end, _ in orders:
            order = example.text()[start:end]
            assert example.metadata["wrong_answer"] in order
            seen.add(order.replace(example.metadata["wrong_answer"], "..."))
        wrong = example.metadata["wrong_answer"]
        assert grade(example.grader, wrong, example.answers).value == 0.0
    assert len(seen) == 10


def test_unanswerable_questions_have_no_evidence_but_near_misses() -> None:
    for example in examples("beyond/unanswerable", 50):
        assert example.evidence == ()
        assert len(example.metadata["spans"]["near_miss"]) == 4
    made = examples("beyond/unanswerable", 100, answerable_share=0.5)
    num = sum(example.metadata["is_answerable"] for example in made)
    assert 35 <= num <= 65
