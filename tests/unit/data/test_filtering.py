"""Closed-book filtering against engines whose knowledge is known."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.prompts import closed_book_messages
from memagent.data.example import Example, Passage
from memagent.data.filtering.report import FilterReport, report_on
from memagent.data.filtering.run import check_same, filter_dataset, identity, write_kept
from memagent.data.filtering.screening import (
    STOP_AFTER,
    BareQuestion,
    FilterSettings,
    ReplyLog,
    Verdict,
    read_questions,
    rules_met,
    screen,
)
from memagent.data.formats.files import read_examples, write_examples
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, DataError, EngineError, EngineRefused, RunError
from memagent.runs import Run
from memagent.types import Completion, Message, Prices, Sampling, Usage

PROMPT = """\
Answer the question from what you know. No text is given, and nothing can be looked up; if you are not \
sure, give your best guess.

<question>
Who wrote {it}?
</question>

Think in a few words if it helps. End with the final answer, and nothing else, inside \\boxed{}.
"""


class Model(BaseEngine):
    """Answers the questions it knows, fails on some, and takes a random time for each call."""

    def __init__(
        self,
        known: dict[str, str],
        *,
        name: str = "model",
        fails: Sequence[str] = (),
        error: type[Exception] = EngineError,
        knows_from_sample: int = 0,
    ) -> None:
        self.model = name
        self.tokenizer = "bytes"
        self.known = known
        self.fails = fails
        self.error = error
        self.asked: list[tuple[str, Sampling]] = []
        self.num_under_way = self.most_under_way = 0
        self.knows_from_sample = knows_from_sample
        self._rng = random.Random(1)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        question = messages[-1]["content"].split("<question>\n")[1].split("\n</question>")[0]
        sample = sum(asked == question for asked, _ in self.asked)
        self.asked.append((question, sampling))
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        await asyncio.sleep(self._rng.uniform(0, 0.002))
        self.num_under_way -= 1
        if question in self.fails:
            raise self.error(f"{self.model} failed on {question}")
        answer = self.known.get(question) if sample >= self.knows_from_sample else None
        text = answer or r"I guess \boxed{nobody}"
        return Completion(text=text, usage=Usage(calls=1, prompt_tokens=10, completion_tokens=2))

    async def aclose(self) -> None:
        """Nothing to free."""


def questions(num: int) -> list[BareQuestion]:
    return [
        BareQuestion(
            number=number,
            id=f"q{number}",
            task="even" if number % 2 == 0 else "odd",
            question=f"question {number}",
            answers=(f"answer {number}",),
            match="any",
        )
        for number in range(num)
    ]


def screened(
    asked: Sequence[BareQuestion],
    *engines: BaseEngine,
    log: ReplyLog | None = None,
    concurrency: int = 4,
    num: int | None = None,
    **settings: Any,
) -> list[Verdict]:
    return asyncio.run(
        screen(
            asked,
            engines,
            FilterSettings.parse(settings),
            log or ReplyLog(),
            concurrency=concurrency,
            num=num,
        )
    )


def outcomes(verdicts: Sequence[Verdict]) -> str:
    return "".join(verdict.fate[0] for verdict in verdicts)


# --- what is asked and when a reply is right ------------------------------------------------------


def test_the_prompt_is_the_bare_question_and_asks_for_a_box() -> None:
    assert closed_book_messages("Who wrote {it}?") == [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("reply", "met"),
    [
        (r"\boxed{Answer 1}", ("boxed", "contains")),
        ("It is answer 1.", ("contains",)),
        (r"\boxed{the answer 1}", ("contains",)),
        (r"\boxed{answer 11}", ()),
        (r"not \boxed{answer 2}", ()),
        (r"<think>\boxed{answer 1}</think> \boxed{answer 2}", ()),
        ("", ()),
    ],
)
def test_a_reply_is_right_by_box_or_by_statement(reply: str, met: tuple[str, ...]) -> None:
    question = questions(2)[1]
    assert rules_met(question, reply, "either") == met
    assert rules_met(question, reply, "boxed") == tuple(set(met) & {"boxed"})
    assert rules_met(question, reply, "contains") == tuple(set(met) & {"contains"})


@pytest.mark.parametrize(
    ("reply", "met"),
    [
        ("\\boxed{jane  Austen}", ("boxed",)),
        ("It was not Jane Austen", ("contains",)),
        ("jane austens", ("contains",)),
        ("<think>Jane Austen?</think> \\boxed{Emily Bronte}", ("contains",)),
        ("\\boxed{Jane Austen}", ("boxed", "contains")),
        ("Emily Bronte", ()),
    ],
)
def test_by_the_original_rule_an_answer_anywhere_in_the_reply_is_right(
    reply: str, met: tuple[str, ...]
) -> None:
    question = BareQuestion(
        number=0,
        id="q",
        task="t",
        question="Who?",
        answers=("Jane Austen", "Austen J"),
        match="all",
    )
    assert rules_met(question, reply, "original") == met


def test_where_all_answers_are_asked_for_some_are_not_enough() -> None:
    question = BareQuestion(
        number=0, id="q", task="t", question="?", answers=("red", "blue"), match="all"
    )
    assert rules_met(question, r"\boxed{red}", "either") == ()
    assert rules_met(question, r"\boxed{blue, red}", "either") == ("boxed", "contains")


# --- screening ------------------------------------------------------------------------------------


def test_questions_that_any_sample_of_any_model_answers_are_dropped() -> None:
    one = Model({"question 1": r"\boxed{answer 1}"}, name="one")
    other = Model({"question 4": "answer 4"}, name="other", knows_from_sample=1)
    verdicts = screened(questions(6), one, other)
    assert outcomes(verdicts) == "kdkkdk"
    assert (verdicts[1].engine, verdicts[1].rules) == (0, ("boxed", "contains"))
    assert (verdicts[4].engine, verdicts[4].rules) == (1, ("contains",))


def test_nothing_more_is_asked_once_a_reply_is_right() -> None:
    one = Model({"question 0": r"\boxed{answer 0}"})
    other = Model({})
    screened(questions(2), one, other, samples=3)
    assert [asked for asked, _ in one.asked].count("question 0") == 1
    assert [asked for asked, _ in one.asked].count("question 1") == 3
    assert [asked for asked, _ in other.asked] == ["question 1"] * 3


def test_samples_have_settings_and_seeds_of_their_own_that_do_not_change() -> None:
    first, second = Model({}), Model({})
    screened(questions(3), first, temperature=0.4, max_tokens=9, concurrency=1)
    screened(questions(3), second, temperature=0.4, max_tokens=9, concurrency=3)
    assert sorted(first.asked, key=str) == sorted(second.asked, key=str)
    samplings = [sampling for _, sampling in first.asked]
    assert {(s.temperature, s.top_p, s.max_tokens) for s in samplings} == {(0.4, 0.7, 9)}
    assert len({sampling.seed for sampling in samplings}) == 6
    assert all(0 <= (sampling.seed or 0) < 2**31 for sampling in samplings)


def test_verdicts_do_not_depend_on_concurrency_and_it_is_bounded() -> None:
    known = {f"question {number}": f"answer {number}" for number in range(0, 40, 3)}
    alone, many = Model(known), Model(known)
    one_by_one = screened(questions(40), alone, concurrency=1)
    together = screened(questions(40), many, concurrency=7)
    assert one_by_one == together
    assert (alone.most_under_way, many.most_under_way) == (1, 7)


def test_a_question_without_answers_is_kept_unasked() -> None:
    nothing = BareQuestion(number=0, id="q", task="t", question="?", answers=(), match="any")
    model = Model({})
    assert outcomes(screened([nothing], model)) == "k"
    assert model.asked == []


def test_an_unanswerable_question_has_nothing_to_be_known(tmp_path: Path) -> None:
    example = Example(
        id="e",
        task="t",
        question="Who?",
        answers=("unknown",),
        grader="unanswerable",
        documents=(Passage(text="Nobody says."),),
    )
    write_examples(tmp_path / "in.jsonl", [example])
    model = Model({"Who?": r"\boxed{unknown}"})
    assert outcomes(screened(read_questions(tmp_path / "in.jsonl"), model)) == "k"
    assert model.asked == []


@pytest.mark.parametrize("concurrency", [1, 5])
def test_no_question_is_asked_in_vain_when_enough_are_kept(concurrency: int) -> None:
    known = {f"question {number}": f"answer {number}" for number in (0, 2, 3, 5)}
    model = Model(known)
    verdicts = screened(questions(30), model, num=4, concurrency=concurrency)
    assert [verdict.number for verdict in verdicts if verdict.fate == "kept"] == [1, 4, 6, 7]
    assert {asked for asked, _ in model.asked} == {f"question {number}" for number in range(8)}


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineError, EngineRefused])
def test_a_failed_question_is_reported_and_kept_or_dropped_as_set(error: type[Exception]) -> None:
    model = Model({"question 2": "answer 2"}, fails=["question 1"], error=error)
    verdicts = screened(questions(4), model, concurrency=1)
    assert outcomes(verdicts) == "kfdk"
    assert verdicts[1].failures == ("model failed on question 1",) * 2
    assert [verdict.is_kept("drop") for verdict in verdicts] == [True, False, False, True]
    assert [verdict.is_kept("keep") for verdict in verdicts] == [True, True, False, True]


def test_another_model_that_knows_the_answer_decides_in_spite_of_a_failure() -> None:
    broken = Model({}, fails=["question 0"])
    verdicts = screened(questions(2), broken, Model({"question 0": "answer 0"}))
    assert outcomes(verdicts) == "dk"


def test_failures_one_after_the_other_stop_the_run() -> None:
    asked = questions(50)
    model = Model({}, fails=[question.question for question in asked[10:]])
    with pytest.raises(EngineError, match="failed on question"):
        screened(asked, model, concurrency=1, samples=1)
    assert len(model.asked) == 10 + STOP_AFTER


def test_a_run_in_which_nothing_succeeds_is_an_error() -> None:
    asked = questions(2)
    model = Model({}, fails=[question.question for question in asked], error=EngineRefused)
    with pytest.raises(EngineRefused, match="model failed"):
        screened(asked, model, samples=1)


# --- the log of replies ---------------------------------------------------------------------------


def test_logged_replies_are_not_requested_again_and_decide_the_same(tmp_path: Path) -> None:
    asked = questions(12)
    known = {"question 3": r"\boxed{answer 3}", "question 8": "answer 8"}
    settings = FilterSettings()
    whole = screened(asked, Model(known))
    with Run.create(tmp_path / "run", identity(asked, ["model"], settings)) as run:
        screened(asked[:7], Model(known), log=ReplyLog(run))
    again = Model(known)
    with Run.open(tmp_path / "run") as run:
        resumed = screened(asked, again, log=ReplyLog(run))
    assert resumed == whole
    assert {question for question, _ in again.asked} == {f"question {n}" for n in range(7, 12)}


def test_the_rule_and_the_number_of_samples_may_change_on_resuming(tmp_path: Path) -> None:
    asked = questions(3)
    model = Model({"question 1": "It is answer 1."})
    with Run.create(tmp_path / "run", {}) as run:
        first = screened(asked, model, log=ReplyLog(run), rule="contains", samples=1)
    with Run.open(tmp_path / "run") as run:
        second = screened(asked, model, log=ReplyLog(run), rule="boxed", samples=1)
        num_asked = len(model.asked)
        screened(asked, model, log=ReplyLog(run), rule="boxed", samples=2)
    assert (outcomes(first), outcomes(second)) == ("kdk", "kkk")
    assert (num_asked, len(model.asked)) == (3, 6)


def test_a_damaged_log_is_refused(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        run.append(b'{"question": 0}')
    with (
        Run.open(tmp_path / "run") as run,
        pytest.raises(RunError, match="line 1 of its journal is damaged"),
    ):
        ReplyLog(run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num": 4}, r"the questions have changed since \(then 3, now 4\)"),
        ({"models": ["b"]}, "models were a, now b"),
        ({"temperature": 0.5}, "temperature was 1.0, now 0.5"),
        ({"seed": None}, "seed was 0, now None"),
    ],
)
def test_a_run_is_not_resumed_with_other_questions(change: dict[str, Any], reason: str) -> None:
    stored = json.loads(json.dumps(identity(questions(3), ["a"], FilterSettings())))
    settings = {name: change[name] for name in change.keys() & {"temperature", "seed"}}
    expected = identity(
        questions(change.get("num", 3)),
        change.get("models", ["a"]),
        FilterSettings.parse(settings),
    )
    with pytest.raises(RunError, match=reason):
        check_same(stored, expected, Path("run"))
    check_same(stored, identity(questions(3), ["a"], FilterSettings(samples=9)), Path("run"))


def test_invalid_settings_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="samples"):
        FilterSettings.parse({"samples": 0})
    with pytest.raises(ConfigError, match="rule"):
        FilterSettings.parse({"rule": "both"})


# --- files and the report -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
def test_what_is_kept_is_the_input_without_the_dropped(tmp_path: Path, ending: str) -> None:
    examples = [
        Example(
            id=f"e{number}",
            task="t",
            question=f"question {number}",
            answers=(f"answer {number}",),
            documents=(Passage(title="Åse", text=f"text {number}\n"),),
            metadata={"b": 1, "a": [number]},
        )
        for number in range(5)
    ]
    path, out = tmp_path / f"in{ending}", tmp_path / f"out{ending}"
    write_examples(path, examples)
    asked = read_questions(path)
    assert [question.number for question in asked] == list(range(5))
    verdicts = screened(asked, Model({"question 0": "answer 0", "question 3": "answer 3"}))
    kept = [verdict.number for verdict in verdicts if verdict.is_kept("drop")]
    assert write_kept(path, out, kept) == 3
    assert list(read_examples(out)) == [examples[1], examples[2], examples[4]]


def test_the_report_counts_by_rule_engine_and_task() -> None:
    asked = questions(6)
    one = Model({"question 0": r"\boxed{answer 0}", "question 1": "answer 1"}, name="one")
    other = Model({"question 2": "answer 2"}, name="other", fails=["question 5"])
    log, settings = ReplyLog(), FilterSettings(samples=1, on_failure="keep")
    verdicts = screened(asked, one, other, log=log, **settings.model_dump())
    report = report_on(
        asked,
        verdicts,
        ["one", "other"],
        settings,
        log,
        prices=Prices(prompt=1e6, completion=1e6),
    )
    assert isinstance(report, FilterReport)
    assert (report.num_questions, report.num_screened, report.num_kept) == (6, 6, 3)
    assert (report.num_dropped, report.num_failed) == (3, 1)
    assert report.by_rule == {"boxed and contains": 1, "contains": 2}
    assert [(e.model, e.num_dropped, e.usage.calls) for e in report.by_engine] == [
        *(("one", 2, 6), ("other", 1, 3))
    ]
    assert report.by_task == {
        "even": {"kept": 1, "dropped": 2, "failed": 0},
        "odd": {"kept": 1, "dropped": 1, "failed": 1},
    }
    assert report.failures == {"q5": "other failed on question 5"}
    assert report.usage == Usage(calls=9, prompt_tokens=90, completion_tokens=18)
    assert report.cost == 108.0
    assert json.loads(report.to_json())["by_engine"][1]["model"] == "other"


# --- from a file to a filtered file ---------------------------------------------------------------


def test_a_dataset_is_filtered_and_resumed_without_asking_again(tmp_path: Path) -> None:
    examples = [
        Example(
            id=f"e{number}",
            task="t",
            question=f"question {number}",
            answers=(f"answer {number}",),
            documents=(Passage(text=f"text {number}"),),
        )
        for number in range(6)
    ]
    file, out, run = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "run"
    write_examples(file, examples)
    known = {"question 1": "answer 1", "question 4": "answer 4"}
    reports = [
        asyncio.run(filter_dataset(file, out, [Model(known)], FilterSettings(), **where))
        for where in ({"run_dir": run}, {"resume": run})
    ]
    assert [example.id for example in read_examples(out)] == ["e0", "e2", "e3", "e5"]
    assert reports[0] == reports[1]
    assert (reports[0].num_kept, reports[0].num_dropped, reports[0].usage.calls) == (4, 2, 10)
    assert json.loads((tmp_path / "out.jsonl.filter.json").read_text()) == json.loads(
        reports[0].to_json()
    )
    with pytest.raises(DataError, match="exists"):
        asyncio.run(filter_dataset(file, out, [Model(known)]))
    with pytest.raises(ConfigError, match="`out` is the file that is read"):
        asyncio.run(filter_dataset(file, file, [Model(known)], force=True))
