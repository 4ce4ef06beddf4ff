"""Suites: what their files mean, which items they have, and that all shipped ones load."""

import asyncio
import json
from pathlib import Path

import pytest

from memagent.data.example import Example, Origin, Passage
from memagent.data.formats.files import write_examples
from memagent.data.tasks.lengths import parse_length
from memagent.errors import ConfigError, DataError
from memagent.eval.items import ExamplePool, Item, ItemSource, item_seed, open_example, plan_items
from memagent.eval.suites import Suite, read_suite

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "eval").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_suite_is_read_and_planned(path: Path) -> None:
    suite = read_suite(path)
    plan = plan_items(suite, length_tokenizer="bytes" if suite.length_tokenizer is None else None)
    num_lengths = sum(len(task.tasks) * len(task.tokens or task.docs or []) for task in suite.tasks)
    assert len(plan.items) == num_lengths * suite.num


def test_lengths_are_read_as_people_write_them() -> None:
    assert [parse_length(text) for text in ("8k", "3.5M", "7000", 64, " 16K ")] == [
        *(8192, 3670016, 7000, 64, 16384)
    ]
    with pytest.raises(ValueError, match="is not a length"):
        parse_length("8kb")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tasks": [{"tasks": ["ruler/vtt"]}]}, "did you mean ruler/vt?"),
        ({"tasks": [{}]}, "give either tasks or files"),
        ({"tasks": [{"tasks": ["ruler/vt"], "tokens": [99], "docs": [5]}]}, "not both"),
        ({"tasks": [{"tasks": ["ruler/vt"]}], "grader": "strickt"}, "did you mean strict?"),
        ({"tasks": [{"files": ["f"], "tokens": ["8k"]}]}, "leave out tokens"),
        (
            {"tasks": [{"tasks": ["ruler/vt"]}], "methods": [{"name": "direct"}] * 2},
            "two methods are called direct",
        ),
    ],
)
def test_a_suite_that_cannot_be_asked_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        Suite.parse(values)


# --- items ----------------------------------------------------------------------------------------


def two_lengths(num: int = 3) -> dict[str, object]:
    tasks = {"tasks": ["beyond/two_hop"], "tokens": [1000, 2000], "num": num}
    return {"tasks": [tasks], "length_tokenizer": "bytes", "seed": 4}


def test_long_items_come_first_and_each_is_the_example_of_its_task() -> None:
    plan = plan_items(Suite.parse(two_lengths()), length_tokenizer="bytes")
    assert [(item.target_tokens, item.index) for item in plan.items] == [
        *((2000, 0), (2000, 1), (2000, 2), (1000, 0), (1000, 1), (1000, 2))
    ]
    example = open_example(plan.items[1])
    assert example.origin is not None
    assert (example.origin.index, example.seed, example.target_tokens) == (1, 4, 2000)
    assert 1960 <= (example.num_tokens or 0) <= 2000
    assert open_example(plan.items[1]) == example


def test_seeds_differ_between_items_and_are_the_same_in_every_run() -> None:
    plan = plan_items(Suite.parse(two_lengths()), length_tokenizer="bytes")
    seeds = [item_seed(4, item) for item in plan.items]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert item_seed(4, plan.items[0]) == 533580071
    assert item_seed(5, plan.items[0]) != seeds[0]


def written(path: Path, num: int, *, docs: int | None = None) -> Path:
    settings = {} if docs is None else {"docs": docs}
    origin = Origin(task="t", settings=settings, index=0)
    write_examples(
        path,
        [
            Example(
                id=f"{path.stem}-{number}",
                task="t",
                question="q?",
                answers=("a",),
                documents=(Passage(text=f"text {number} of {path.stem}"),),
                num_tokens=100 - number,
                origin=origin,
            )
            for number in range(num)
        ],
    )
    return path


def test_files_of_one_task_are_numbered_through_and_read_in_their_order(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", 3), written(tmp_path / "b.jsonl", 2, docs=50)
    third = written(tmp_path / "c.parquet", 2)
    suite = Suite.parse({"tasks": [{"files": [str(first), str(second), str(third)], "num": 2}]})
    plan = plan_items(suite)
    named = [(open_example(item).id, item.target_tokens, item.index) for item in plan.items]
    assert named == [
        *(("a-0", None, 0), ("a-1", None, 1), ("b-0", 7168, 0), ("b-1", 7168, 1)),
        *(("c-0", None, 2), ("c-1", None, 3)),
    ]
    assert open_example(plan.items[0]).text() == "text 0 of a"  # going back in a file works
    assert len(plan.files) == 3


def test_a_file_without_examples_and_one_that_is_broken_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"id": 3}\n')
    for name, said in (("empty", "holds no examples"), ("broken", "line 1")):
        with pytest.raises(DataError, match=said):
            plan_items(Suite.parse({"tasks": [{"files": [str(tmp_path / f"{name}.jsonl")]}]}))


def test_worker_processes_generate_the_same_examples() -> None:
    plan = plan_items(Suite.parse(two_lengths()), length_tokenizer="bytes")

    async def made() -> list[Example]:
        with ExamplePool(plan, processes=1) as pool:
            assert await pool.check(plan) == {}
            return [await pool.example(item) for item in plan.items[:2]]

    assert asyncio.run(made()) == [open_example(item) for item in plan.items[:2]]


def test_more_examples_than_a_task_has_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "dev.json"
    answers = [{"text": "old", "answer_start": 11}]
    articles = [
        {"title": f"t{n}", "paragraphs": [{"context": f"City {n} is old. " * 5, "qas": [asked]}]}
        for n in range(10, 50)
        for asked in [{"id": str(n), "question": f"How is {n}?", "answers": answers}]
    ]
    source.write_text(json.dumps({"version": "v2.0", "data": articles}))
    tasks = {"tasks": ["ruler/qa_1"], "tokens": [1000], "num": 99}
    suite = Suite.parse({"tasks": [tasks], "sources": {"squad-dev": str(source)}})
    plan = plan_items(suite, length_tokenizer="bytes")

    async def check() -> None:
        with ExamplePool(plan, processes=0) as pool:
            await pool.check(plan)

    with pytest.raises(ConfigError, match="40 examples, fewer than `num=99`"):
        asyncio.run(check())


def test_an_item_of_a_file_that_has_shrunk_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", 1)
    item = Item(
        source=ItemSource(file=str(path)),
        position=5,
        task="t",
        target_tokens=None,
        index=5,
        num_tokens=0,
    )
    with pytest.raises(DataError, match="has changed"):
        open_example(item)
