"""What the viewer tells of readings, evaluations and training runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.evidence.quotes import Quote
from memagent.agent.prompts import open_prompts
from memagent.agent.trace import Section, Step, journal_line
from memagent.documents.document import Document, Place
from memagent.errors import RunError
from memagent.eval.records import regrade
from memagent.eval.report.report import load_report
from memagent.run_files import LineFile
from memagent.viewer.api import ViewerApi, json_text
from memagent.viewer.library import Library, Texts, open_library
from tests.support.eval_runs import item, make_run
from tests.support.timing import cpu_seconds
from tests.support.viewer_runs import (
    ANSWER,
    FACTS,
    QUESTION,
    make_evaluation,
    make_reading,
    make_training,
    memories,
    read_story,
    steps,
    story,
    trace_of,
    wondering_reply,
)


def api_of(*paths: Path, texts: tuple[Path, ...] = ()) -> ViewerApi:
    return ViewerApi(Library(paths), Texts(texts))


def append(run: Path, *lines: bytes) -> None:
    with LineFile(run / "steps.jsonl", sync=False, checksums=True) as journal:
        journal.append(*lines)


def only(api: ViewerApi) -> str:
    [run] = api.runs()["runs"]
    found: str = run["id"]
    return found


def test_a_run_that_took_the_place_of_another_is_shown(tmp_path: Path) -> None:
    path = make_reading(tmp_path / "reading", num_sections=3)
    api = api_of(path)
    api.run(only(api))
    shutil.rmtree(path)
    make_reading(path, questions=("Who built the mill?",), num_sections=5)
    [question] = api.run(only(api))["questions"]
    assert question["question"] == "Who built the mill?"
    assert question["totals"]["sections"] == 5


# --- the list -------------------------------------------------------------------------------------


def test_runs_of_folders_and_runs_by_themselves_are_listed_once(tmp_path: Path) -> None:
    reading = make_reading(tmp_path / "all" / "reading")
    make_training(tmp_path / "all" / "training", num_steps=5)
    api = api_of(tmp_path / "all", reading)
    listed = {run["name"]: (run["kind"], run["state"]) for run in api.runs()["runs"]}
    assert listed == {"reading": ("ask", "1 of 1 answered"), "training": ("train", "5 of 5 steps")}


def test_a_run_that_appears_later_is_found(tmp_path: Path) -> None:
    api = api_of(tmp_path)
    assert api.runs()["runs"] == []
    make_reading(tmp_path / "later", is_complete=False)
    assert api.run(only(api))["state"] == "0 of 1 answered"


def test_a_run_behind_a_link_is_not_shown(tmp_path: Path) -> None:
    make_reading(tmp_path / "elsewhere" / "secret")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    assert api_of(tmp_path / "given").runs()["runs"] == []


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nosuch"):
        open_library([str(tmp_path / "nosuch")])


def test_a_damaged_run_is_listed_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    api = api_of(tmp_path)
    assert [run["state"] for run in api.runs()["runs"]] == ["damaged"]
    assert api.run(only(api))["kind"] == ""


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    path = make_reading(tmp_path / "reading")
    (path / ".lock").unlink()
    api_of(tmp_path).runs()
    assert not (path / ".lock").exists()


# --- readings -------------------------------------------------------------------------------------


def test_a_step_has_its_memory_and_what_changed_in_it(tmp_path: Path) -> None:
    api = api_of(make_reading(tmp_path / "reading", num_sections=8))
    run = only(api)
    trace = api.trace(run, "q0")
    assert (trace["question"], trace["answer"]) == (QUESTION, ANSWER)
    assert [step["kind"] for step in trace["steps"]] == ["read"] * 8 + ["answer"]
    assert trace["totals"]["sections"] == 8
    step = api.step(run, "q0", 2)
    assert step["memory"] == memories(8)[2]
    assert [text for kind, text in step["diff"] if kind == "new"] == [f" {FACTS[2]}"]
    assert (step["added"], step["removed"]) == (len(FACTS[2].split()), 0)
    assert step["where"] == api.trace(run, "q0")["steps"][2]["where"]


def test_a_prompt_is_worded_as_it_was_sent(tmp_path: Path) -> None:
    text = tmp_path / "valley.txt"
    text.write_text(story(8))
    api = api_of(make_reading(tmp_path / "reading", num_sections=8), texts=(text,))
    run = only(api)
    read = steps(Document.from_text(story(8)), 8)[3]
    assert read.section is not None
    section = story(8)[read.section.start : read.section.end]
    expected = open_prompts("default").section_messages(
        question=QUESTION,
        section=section,
        memory=memories(8)[2],
        section_number=4,
        memory_tokens=1024,
    )
    assert api.prompt(run, "q0", 3) == {"messages": expected, "note": None}
    assert api.section(run, "q0", 3)["text"] == section
    assert "Answer the question from the memory" in str(api.prompt(run, "q0", 8))


def test_without_the_text_a_prompt_says_what_is_missing(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("another text")
    api = api_of(make_reading(tmp_path / "reading"), texts=(other,))
    prompt = api.prompt(only(api), "q0", 0)
    assert prompt["note"] == "the text of the section is not stored with the run"
    assert QUESTION in prompt["messages"][0]["content"]
    with pytest.raises(RunError, match="not known here"):
        api.section(only(api), "q0", 0)


def test_a_file_that_a_manifest_names_is_not_opened(tmp_path: Path) -> None:
    text = tmp_path / "valley.txt"
    text.write_text(story(4))
    path = make_reading(tmp_path / "reading", num_sections=4)
    manifest = json.loads((path / "run.json").read_text())
    manifest["command"] = {"paths": [str(text)], "folder": str(tmp_path), "encoding": None}
    manifest["command"] |= {"engine": "scripted", "engine_settings": {}, "limits": {}}
    (path / "run.json").write_text(json.dumps(manifest))
    api = api_of(path)
    assert api.step(only(api), "q0", 0)["has_text"] is False


def test_steps_appear_while_a_reading_goes_on(tmp_path: Path) -> None:
    path = make_reading(tmp_path / "reading", num_sections=4, is_complete=False)
    api = api_of(path)
    run = only(api)
    before = api.version(run)
    assert len(api.trace(run, "q0")["steps"]) == 4
    last = steps(Document.from_text(story(4)), 4)[-1]
    append(path, journal_line(0, last))
    assert api.version(run)["version"] != before["version"]
    assert api.trace(run, "q0")["answer"] == ANSWER
    assert api.version(run)["is_complete"] is True


def test_fields_of_quotes_and_rounds_are_shown_where_a_step_has_them(tmp_path: Path) -> None:
    path = make_reading(tmp_path / "reading", num_sections=2, is_complete=False)
    place = Place(source="valley.txt", start=3, end=9)
    quotes = (Quote(text="a quote", start=3, end=9, places=(place,)), Quote(text="made up"))
    section = Section(start=0, end=9, num_tokens=9, places=(place,))
    note = Step(kind="read", index=2, reply="", memory="a note", section=section, round=1)
    merge = Step(kind="merge", index=3, reply="", memory="merged", round=1, inputs=(0, 2))
    append(
        path,
        journal_line(0, replace(note, quotes=quotes)),
        journal_line(0, replace(merge, missing="who")),
    )
    api = api_of(path)
    run = only(api)
    first, second = api.step(run, "q0", 2), api.step(run, "q0", 3)
    assert [quote["start"] for quote in first["quotes"]] == [3, None]
    assert first["quotes"][0]["where"] == "valley.txt [3:9]"
    assert (first["diff"], first["num_quotes"]) == (None, 2)
    assert (second["inputs"], second["missing"], second["diff"]) == ([0, 2], "who", None)


@pytest.mark.parametrize("key", ["q9", "i0", "q", "x1", "s1", "q1.2", "../q0", "v1.1"])
def test_a_trace_that_is_not_there_is_an_error(tmp_path: Path, key: str) -> None:
    api = api_of(make_reading(tmp_path / "reading"))
    with pytest.raises(RunError):
        api.trace(only(api), key)


# --- evaluations ----------------------------------------------------------------------------------


def test_cells_are_those_of_the_report(tmp_path: Path) -> None:
    path = make_evaluation(tmp_path / "evaluation")
    api = api_of(path)
    cells = {(c["task"], c["method"], c["tokens"]): c for c in api.cells(only(api))["cells"]}
    rows = load_report([str(path)]).results
    assert len(rows) == len(cells) == 12
    for row in rows:
        cell = cells[row.task, row.series, row.length.tokens]
        assert (cell["score"]["value"], cell["score"]["low"]) == (row.score.value, row.score.low)
        assert (cell["num_items"], cell["num_failed"]) == (row.score.num, row.num_failed)


def test_items_of_a_cell_come_wrong_ones_first(tmp_path: Path) -> None:
    api = api_of(make_evaluation(tmp_path / "evaluation"))
    wanted = {"task": "hotpotqa", "method": "reader", "tokens": "8192"}
    found = api.items(only(api), **wanted)
    scores = [each["score"] for each in found["items"]]
    assert scores == sorted(scores)
    assert (found["num_items"], scores[0], scores[-1]) == (12, 0.0, 1.0)
    wrong = api.items(only(api), **wanted, status="wrong")["items"]
    assert {(each["score"], each["status"]) for each in wrong} == {(0.0, "ok")}
    assert api.items(only(api), text="no such text")["num_items"] == 0
    assert len(api.items(only(api), offset=140, limit=3)["items"]) == 3


def test_an_item_has_its_trace(tmp_path: Path) -> None:
    api = api_of(make_evaluation(tmp_path / "evaluation"))
    run = only(api)
    [item] = api.items(run, method="reader", status="right", limit=1)["items"]
    key = f"i{item['number']}"
    trace = api.trace(run, key)
    assert (trace["answer"], trace["item"]["score"]) == (ANSWER, 1.0)
    assert api.step(run, key, 1)["memory"] == memories(trace["totals"]["sections"])[1]
    assert QUESTION in str(api.prompt(run, key, 1))


def test_two_evaluations_are_compared_item_by_item(tmp_path: Path) -> None:
    def made(name: str, *scores: float) -> Path:
        items = [item("t", "reader", 8192, n, score=score) for n, score in enumerate(scores)]
        return make_run(tmp_path / name, items)

    made("first", 1, 1, 0, 1)
    made("second", 1, 0, 1, 0)
    api = api_of(tmp_path)
    ids = {run["name"]: run["id"] for run in api.runs()["runs"]}
    found = api.compare(ids["first"], ids["second"])
    [cell] = found["cells"]
    assert (cell["first"]["value"], cell["second"]["value"]) == (0.75, 0.5)
    assert (cell["num_better"], cell["num_worse"], found["num_shared"]) == (1, 2, 4)
    pairs = [(p["first"]["score"], p["second"]["score"]) for p in found["items"]]
    assert pairs == [(1, 0), (1, 0), (0, 1)]


def test_a_text_that_looks_like_a_trace_does_not_end_a_head(tmp_path: Path) -> None:
    answer = 'x","trace":{"steps":[]},"y":"'
    made = item("t", "reader", 8192, 0, answer=answer, trace=trace_of(2))
    api = api_of(make_run(tmp_path / "run", [made]))
    [shown] = api.items(only(api))["items"]
    assert shown["answer"] == answer


def test_a_run_of_ten_thousand_items_is_shown_in_the_time_of_parsing_its_file(
    tmp_path: Path,
) -> None:
    trace = trace_of(6)
    items = [
        item("hotpotqa", method, 8192, n, score=float(n % 3 > 0), trace=trace)
        for method in ("reader", "direct")
        for n in range(5000)
    ]
    path = make_run(tmp_path / "run", items[:1], num_planned=len(items))
    append(path, *(each.to_json() for each in items[1:]))

    def parse() -> None:
        for line in (path / "steps.jsonl").read_bytes().splitlines():
            json.loads(line)

    def first_view() -> None:
        api = api_of(path)
        run = only(api)
        api.run(run)
        api.cells(run)

    api = api_of(path)
    run = only(api)
    api.run(run)
    parsing = cpu_seconds(parse)
    assert cpu_seconds(first_view) < 2 * parsing  # `benchmarks.viewer` measures it in seconds
    assert cpu_seconds(lambda: api.items(run, offset=9000)) < parsing
    assert api.items(run, offset=9000)["num_items"] == 10_000


# --- training -------------------------------------------------------------------------------------


def test_metrics_come_from_a_line_on(tmp_path: Path) -> None:
    api = api_of(make_training(tmp_path / "training", num_steps=10))
    run = only(api)
    first = api.metrics(run)
    assert first["num_lines"] == 12
    assert api.metrics(run, after=11)["lines"] == first["lines"][11:]
    with (tmp_path / "training" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 11, "kind": "train", "kl": "NaN", "reward": 1}\n')
    [last] = api.metrics(run, after=12)["lines"]
    assert last == {"step": 11, "kind": "train", "kl": None, "reward": 1}


def test_rollouts_of_a_group_stand_together_with_their_advantages(tmp_path: Path) -> None:
    api = api_of(make_training(tmp_path / "training", num_steps=10))
    run = only(api)
    assert api.run(run)["samples"] == [5, 10]
    groups = api.rollouts(run, 5)["groups"]
    assert [len(group["rollouts"]) for group in groups] == [4, 4]
    first = groups[0]["rollouts"][0]
    mean = sum(groups[0]["group_rewards"]) / 4
    assert first["advantage"] == pytest.approx(first["reward"] - mean)
    trace = api.trace(run, f"s5.{first['number']}")
    assert trace["rollout"]["step"] == 5
    assert trace["totals"]["sections"] == 4


def test_a_validation_has_cells_and_items(tmp_path: Path) -> None:
    api = api_of(make_training(tmp_path / "training", num_steps=10))
    run = only(api)
    assert api.run(run)["validations"] == [0]
    assert {cell["method"] for cell in api.cells(run, step=0)["cells"]} == {"agent"}
    [first] = api.items(run, limit=1, step=0)["items"]
    assert api.trace(run, f"v0.{first['number']}")["item"]["number"] == first["number"]
    with pytest.raises(RunError, match="of step 3"):
        api.items(run, step=3)


# --- every way to read ----------------------------------------------------------------------------


GROUPED = {"mode": "parallel", "window": 3600, "script": wondering_reply}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evidence": True, "quote_tokens": 100, "ledger_tokens": 400},
        {"mode": "parallel"},
        {"mode": "parallel", "script": wondering_reply},
        GROUPED,
    ],
    ids=lambda settings: ",".join(map(str, settings)) or "in_order",
)
def test_prompts_are_those_that_were_sent(tmp_path: Path, settings: dict[str, Any]) -> None:
    read = read_story(tmp_path, **settings)
    api = api_of(read.run, texts=(read.text,))
    run = only(api)
    shown = api.trace(run, "q0")
    assert shown["answer"] == read.trace.answer
    assert [c["text"] for c in shown["citations"]] == [c.quote.text for c in read.trace.citations]
    prompts = [api.prompt(run, "q0", number) for number in range(len(shown["steps"]))]
    worded = [prompt["messages"][-1]["content"] for prompt in prompts if prompt["note"] is None]
    assert sorted(worded) == sorted(read.sent)
    if "evidence" in settings:
        assert (quotes := read.trace.steps[-1].shown)
        assert quotes in worded[-1]


def test_numbers_that_json_does_not_have_are_null() -> None:
    values = {"a": [1.5, float("inf")], "b": {"c": float("nan")}, "d": "é"}
    assert json_text(values) == '{"a":[1.5,null],"b":{"c":null},"d":"é"}'
    assert json_text({"d": "é"}, is_ascii=True) == '{"d":"\\u00e9"}'


def test_readings_of_several_rounds_have_merges_of_merges(tmp_path: Path) -> None:
    steps = read_story(tmp_path, **GROUPED).trace.steps
    assert {step.round for step in steps if step.kind == "merge"} >= {1, 2}
    assert any(steps[place].kind == "merge" for step in steps for place in step.inputs)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ((7, 7), "does not store what this step merged"),
        ((9,), "there is no step 1"),
        ((-1, 0), "there is no step 1"),
        ((10**6,), "there is no step 1"),
    ],
    ids=str,
)
def test_a_merge_of_what_is_not_there_is_reported(
    tmp_path: Path, inputs: tuple[int, ...], problem: str
) -> None:
    path = make_reading(tmp_path / "reading", num_sections=1, is_complete=False)
    merge = Step(kind="merge", index=8, reply="", memory="merged", round=1, inputs=inputs)
    append(path, journal_line(0, merge))
    api = api_of(path)
    with pytest.raises(RunError, match=problem):
        api.prompt(only(api), "q0", 1)


# --- later grades ---------------------------------------------------------------------------------


def test_scores_of_later_graders_are_shown(tmp_path: Path) -> None:
    answers = {"Anna": 1.0, "Anna Bergstrom": 1.0, "Bert": 0.0}
    graded: Any = {"answers": ("Anna",), "match": "any"}
    items = [
        item("hotpotqa", "reader", 8192, n, answer=answer, score=score, **graded)
        for n, (answer, score) in enumerate(answers.items())
    ]
    failed = item("hotpotqa", "reader", 8192, 3, status="failed", error="no reply", score=0.0)
    path = make_run(tmp_path / "run", [*items, failed])
    api = api_of(path)
    run = only(api)
    assert api.cells(run)["graders"] == []
    regrade(path, ["exact", "f1"])
    found = api.cells(run)
    assert found["graders"] == ["exact", "f1"]
    assert found["cells"][0]["score"]["value"] == 0.5
    [cell] = api.cells(run, grader="exact")["cells"]
    assert (cell["num_items"], cell["score"]["value"]) == (4, 0.25)
    rows = api.items(run, grader="exact")["items"]
    assert [(row["answer"], row["score"]) for row in rows[-1:]] == [("Anna", 1.0)]
    right = api.items(run, status="right", grader="exact")
    assert right["num_items"] == 1
    assert api.trace(run, "i1")["item"]["scores"]["f1"] == pytest.approx(2 / 3)
    (path / "grades" / "f1.jsonl").write_text("damaged\n")
    assert api.cells(run)["graders"] == ["exact"]
