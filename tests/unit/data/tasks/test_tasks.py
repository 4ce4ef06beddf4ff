"""What holds for every task of a length: determinism, evidence, answers that can be derived, errors.

That texts are the same in other processes, tests/reference/test_datasets.py says.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.beyond import KINDS
from memagent.data.tasks.registry import open_task, rebuild
from memagent.errors import ConfigError, DataError
from memagent.tokens.tokenizers import open_tokenizer
from tests.support import beyond_solvers, ruler_solvers
from tests.support.ruler_sources import ALL, ASKED, MADE_UP, ruler_settings

BEYOND = tuple(KINDS)
EVERY = (*ALL, *BEYOND)
WITHOUT_EVIDENCE = ("ruler/cwe", "ruler/fwe", "beyond/unanswerable")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ruler") / "sources"


def make(folder: Path, task: str, index: int, **settings: Any) -> Example:
    given = {"tokens": 6000, "tokenizer": "bytes", **settings}
    return open_task(task, ruler_settings(folder, task, **given)).example(index)


@pytest.mark.parametrize("task", MADE_UP)
def test_a_solver_finds_the_answers_in_the_text(task: str, folder: Path) -> None:
    given = ruler_settings(folder, task, tokens=5000, tokenizer="bytes", seed=3)
    opened = open_task(task, given)
    for index in range(200):
        example = opened.example(index)
        found = ruler_solvers.solve(task, example.text(), example.question)
        assert found == set(example.answers)
        assert len(found) == len(example.answers)


@pytest.mark.parametrize("task", BEYOND)
def test_a_solver_finds_the_answer_beyond_ruler(task: str, folder: Path) -> None:
    for index in range(200):
        example = make(folder, task, index, seed=5)
        found = beyond_solvers.solve(task, example.text(), example.question)
        assert found == example.answers[0], example.id


@pytest.mark.parametrize("task", EVERY)
@pytest.mark.parametrize("tokens", [5000, 40_000])
def test_lengths_are_met_from_below_with_two_tokenizers(
    task: str, tokens: int, folder: Path, tokenizer_folder: Path
) -> None:
    for name in ("bytes", str(tokenizer_folder)):
        count = open_tokenizer(name).count
        for index in range(3):
            example = make(folder, task, index, tokens=tokens, tokenizer=name)
            assert example.target_tokens == tokens
            assert example.num_tokens == count(example.text())
            assert 0.98 * tokens <= example.num_tokens <= tokens


@pytest.mark.parametrize("task", EVERY)
def test_evidence_stands_where_it_says(task: str, folder: Path) -> None:
    for index in range(6):
        example = make(folder, task, index)
        text = example.text()
        places = example.evidence_offsets()
        for (start, end), item in zip(places, example.evidence, strict=True):
            assert text[start:end] == item.text != ""
            assert example.passages[item.document].text[item.start : item.end] == item.text
        assert places == sorted(places)
        assert bool(places) == (task not in WITHOUT_EVIDENCE)


@pytest.mark.parametrize("task", ALL)
def test_graders_and_matching_are_rulers(task: str, folder: Path) -> None:
    example = make(folder, task, 0)
    expected = ("any", "ruler_part") if task in ASKED else ("all", "ruler_all")
    assert (example.match, example.grader) == expected


@pytest.mark.parametrize("task", EVERY)
def test_any_order_gives_the_same_examples(task: str, folder: Path) -> None:
    given = ruler_settings(folder, task, tokens=5000, tokenizer="bytes")
    forwards, backwards = open_task(task, given), open_task(task, given)
    there = [forwards.example(index) for index in range(5)]
    back = [backwards.example(index) for index in reversed(range(5))]
    assert there == back[::-1]
    assert len({example.text_sha256 for example in there}) == 5
    assert len({example.id for example in there}) == 5


@pytest.mark.parametrize("task", EVERY)
def test_an_example_is_rebuilt_from_its_origin(task: str, folder: Path) -> None:
    example = make(folder, task, 1)
    assert example.origin is not None
    kept = json.loads(json.dumps(example.origin.settings))
    bare = replace(example, documents=None, origin=replace(example.origin, settings=kept))
    assert rebuild(bare).documents == example.documents


@pytest.mark.parametrize("task", EVERY)
def test_a_series_of_lengths_keeps_questions_and_answers(task: str, folder: Path) -> None:
    short, long = (make(folder, task, 4, tokens=tokens) for tokens in (5000, 20_000))
    assert (short.question, short.answers) == (long.question, long.answers)
    assert sorted(item.text for item in short.evidence) == sorted(i.text for i in long.evidence)


@pytest.mark.parametrize("task", EVERY)
def test_another_seed_gives_another_text(task: str, folder: Path) -> None:
    assert make(folder, task, 0).text() != make(folder, task, 0, seed=1).text()


@pytest.mark.parametrize("task", [task for task in EVERY if task != "ruler/niah_single_2"])
def test_too_short_a_length_is_refused(task: str, folder: Path) -> None:
    # a single needle is 50 bytes long, and an essay can be cut anywhere: that one fits
    with pytest.raises(ConfigError, match=r"^tokens=64 is too short.*; raise `tokens`$"):
        make(folder, task, 0, tokens=64)


@pytest.mark.parametrize("task", EVERY)
def test_a_length_has_to_be_given(task: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{task} needs a length; give `tokens`"):
        make(folder, task, 0, tokens=None)


@pytest.mark.parametrize("task", EVERY)
def test_an_unknown_setting_is_named(task: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting tokenz; did you mean token"):
        make(folder, task, 0, tokenz=64)


def test_essays_have_to_be_given_and_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs essays; name a folder of texts: `sources\.essays=PATH`"
    ):
        open_task("ruler/niah_single_2", {"tokens": 4096, "tokenizer": "bytes"})
    given = {"tokens": 4096, "tokenizer": "bytes", "essays": str(tmp_path / "none")}
    with pytest.raises(DataError, match="none does not exist"):
        open_task("ruler/niah_single_2", given)


def test_sources_are_fingerprinted(folder: Path) -> None:
    origins = {task: make(folder, task, 0).origin for task in ALL}
    names = {task: sorted(origin.sources) for task, origin in origins.items() if origin}
    assert names["ruler/niah_multivalue"] == ["essays"]
    assert names["ruler/niah_single_1"] == []
    assert names["ruler/qa_1"] == ["squad-dev"]
    assert names["ruler/qa_2"] == ["hotpotqa-dev", "hotpotqa-paragraphs"]
    assert all(
        len(sha) == 64 for origin in origins.values() if origin for sha in origin.sources.values()
    )


def test_without_wonderwords_the_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['wonderwords'] = None\n"  # what Python does for a library that is not there
        "from memagent.data.tasks.registry import open_task\n"
        "from memagent.errors import ConfigError\n"
        "try:\n"
        "    open_task('ruler/cwe', {'tokens': 4096, 'tokenizer': 'bytes'}).example(0)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "memagent[data]"' in said.stdout
