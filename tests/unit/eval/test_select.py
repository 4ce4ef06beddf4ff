"""Closed-book filtering against a model whose knowledge is known."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example, Origin, Passage
from memagent.data.formats.files import read_examples, write_examples
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, DataError, EngineRefused, RunError
from memagent.eval.select import FilterReport, filter_dataset
from memagent.types import Completion, Message, Sampling, Usage


class Model(BaseEngine):
    """Answers the questions it knows, fails on some, and takes a time that depends on the question."""

    def __init__(
        self, known: dict[str, str], *, fails: Sequence[str] = (), knows_from_sample: int = 0
    ) -> None:
        self.model, self.tokenizer = "model", "bytes"
        self.known = known
        self.fails = fails
        self.asked: list[tuple[str, Sampling]] = []
        self.knows_from_sample = knows_from_sample

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        question = messages[-1]["content"].split("<question>\n")[1].split("\n</question>")[0]
        sample = sum(asked == question for asked, _ in self.asked)
        self.asked.append((question, sampling))
        await asyncio.sleep(0.001 * (len(self.asked) % 3))
        if question in self.fails:
            raise EngineRefused(f"refused {question}")
        answer = self.known.get(question) if sample >= self.knows_from_sample else None
        text = answer or r"I guess \boxed{nobody}"
        return Completion(text=text, usage=Usage(calls=1, prompt_tokens=10, completion_tokens=2))

    async def aclose(self) -> None:
        """Nothing to free."""


def examples(num: int, **more: Any) -> list[Example]:
    return [
        Example(
            id=f"e{number}",
            task="even" if number % 2 == 0 else "odd",
            question=f"question {number}",
            answers=(f"answer {number}",),
            documents=(Passage(title="Åse", text=f"text {number}\n"),),
            metadata={"b": 1, "a": [number]},
            **more,
        )
        for number in range(num)
    ]


def filtered(
    folder: Path, asked: Sequence[Example], model: Model, ending: str = ".jsonl", **options: Any
) -> tuple[str, FilterReport]:
    """The ids that are left, and the report."""
    file, out = folder / f"in{ending}", folder / f"out{ending}"
    write_examples(file, asked)
    report = asyncio.run(filter_dataset(file, out, model, force=True, **options))
    left = list(read_examples(out))
    by_id = {example.id: example for example in asked}
    assert left == [by_id[example.id] for example in left]
    return " ".join(example.id for example in left), report


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_what_is_kept_is_the_input_without_the_dropped(tmp_path: Path, ending: str) -> None:
    model = Model({"question 0": "answer 0", "question 3": r"\boxed{answer 3}"})
    left, report = filtered(tmp_path, examples(5), model, ending)
    assert left == "e1 e2 e4"
    assert report == FilterReport(
        model="model",
        num_questions=5,
        num_screened=5,
        num_kept=3,
        num_dropped=2,
        num_failed=0,
        by_grader={"contains": 1, "strict and contains": 1},
        by_task={
            "even": {"kept": 2, "dropped": 1, "failed": 0},
            "odd": {"kept": 1, "dropped": 1, "failed": 0},
        },
        usage=Usage(calls=10, prompt_tokens=100, completion_tokens=20),
    )


@pytest.mark.parametrize(
    ("reply", "graders", "is_kept"),
    [
        (r"\boxed{Answer 0}", ("strict",), False),
        ("It is answer 0.", ("strict",), True),
        ("It is answer 0.", ("strict", "contains"), False),
        (r"\boxed{answer 01}", ("strict", "contains"), True),
        (r"<think>\boxed{answer 0}</think> \boxed{answer 2}", ("strict", "contains"), True),
        ("It was not answer 0s", ("strict", "contains"), True),
        ("It was not answer 0s", ("original_reward", "original_contains"), False),
    ],
)
def test_a_question_is_dropped_if_one_of_the_graders_takes_a_reply_for_right(
    tmp_path: Path, reply: str, graders: tuple[str, ...], is_kept: bool
) -> None:
    left, _ = filtered(tmp_path, examples(1), Model({"question 0": reply}), graders=graders)
    assert left == ("e0" if is_kept else "")


def test_where_all_answers_are_asked_for_some_are_not_enough(tmp_path: Path) -> None:
    [example] = examples(1)
    both = Example(**{**_fields(example), "answers": ("red", "blue"), "match": "all"})
    assert filtered(tmp_path, [both], Model({"question 0": r"\boxed{red}"}))[0] == "e0"
    assert filtered(tmp_path, [both], Model({"question 0": r"\boxed{blue, red}"}))[0] == ""


def test_any_sample_that_is_right_is_enough_and_samples_have_seeds_of_their_own(
    tmp_path: Path,
) -> None:
    model = Model({"question 1": "answer 1"}, knows_from_sample=1)
    assert filtered(tmp_path, examples(3), model)[0] == "e0 e2"
    samplings = [sampling for _, sampling in model.asked]
    assert {(s.temperature, s.top_p, s.max_tokens) for s in samplings} == {(1.0, 0.7, 512)}
    assert len({sampling.seed for sampling in samplings}) == 6


def test_questions_that_no_reply_can_answer_are_kept_unasked(tmp_path: Path) -> None:
    asked = [*examples(1), *examples(1, grader="unanswerable")]
    asked[1] = Example(**{**_fields(asked[1]), "id": "e1", "question": "Who?"})
    model = Model({"question 0": "answer 0", "Who?": "answer 0"})
    assert filtered(tmp_path, asked, model)[0] == "e1"
    assert {question for question, _ in model.asked} == {"question 0"}


def test_texts_are_not_rebuilt(tmp_path: Path) -> None:
    origin = Origin(task="no such task", settings={}, index=0)
    bare = [Example(**{**_fields(one), "documents": None, "origin": origin}) for one in examples(2)]
    assert filtered(tmp_path, bare, Model({"question 0": "answer 0"}))[0] == "e1"


def test_a_failed_question_is_counted_and_not_kept_unless_another_reply_decides(
    tmp_path: Path,
) -> None:
    model = Model({"question 2": "answer 2"}, fails=["question 1"])
    left, report = filtered(tmp_path, examples(4), model)
    assert (left, report.num_failed, report.num_dropped) == ("e0 e3", 1, 1)
    assert "failed" in report.to_text()


def test_when_enough_are_kept_no_more_are_asked(tmp_path: Path) -> None:
    known = {f"question {number}": f"answer {number}" for number in (0, 2, 3, 5)}
    model = Model(known)
    run = tmp_path / "run"
    left, report = filtered(tmp_path, examples(200), model, num=4, run_dir=run)
    assert left == "e1 e4 e6 e7"
    assert (report.num_screened, report.num_kept, report.num_questions) == (8, 4, 200)
    assert len(model.asked) < 100
    again = Model(known)
    assert filtered(tmp_path, examples(200), again, num=5, run_dir=run)[0] == "e1 e4 e6 e7 e8"
    assert not {f"question {number}" for number in range(8)} & {one for one, _ in again.asked}


def test_a_filtering_is_resumed_without_asking_again_and_only_for_the_same_questions(
    tmp_path: Path,
) -> None:
    run, known = tmp_path / "run", {"question 1": "answer 1", "question 4": "answer 4"}
    first = filtered(tmp_path, examples(6), Model(known), run_dir=run)
    model = Model(known)
    assert filtered(tmp_path, examples(6), model, run_dir=run) == first
    assert model.asked == []
    with pytest.raises(RunError, match=r"cannot resume .*files"):
        filtered(tmp_path, examples(7), model, run_dir=run)
    with pytest.raises(RunError, match=r"cannot resume .*samples was 2, now 3"):
        filtered(tmp_path, examples(6), model, run_dir=run, samples=3)


def test_paths_are_checked_before_anything_is_asked(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_examples(file, examples(1))
    out.touch()
    for target, error, reason in (
        (out, DataError, "exists"),
        (file, ConfigError, "`out` is the file that is read"),
        (tmp_path / "out.txt", ConfigError, "a dataset ends in"),
    ):
        with pytest.raises(error, match=reason):
            asyncio.run(filter_dataset(file, target, Model({})))


def _fields(example: Example) -> dict[str, Any]:
    return {name: getattr(example, name) for name in example.__slots__}
