"""The script that builds the reader's data: what its files contain, and what they must not."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from memagent.data.formats.files import read_examples
from memagent.rl.warmstart.conversations import read_conversations

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "configs" / "train" / "reader_1.5b" / "prepare.py"


def write(path: Path, records: Iterable[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def paragraph(number: int) -> dict[str, Any]:
    sentences = [f"Place {number} is a town.", f"It was built in {1000 + number}.", "It has walls."]
    return {"title": f"Place {number}", "sentences": sentences}


def hotpot(name: str, first: int) -> dict[str, Any]:
    some = [paragraph(first + number) for number in range(4)]
    return {
        "_id": name,
        "question": f"When was place {first} built, and is place {first + 1} a town?",
        "answer": str(1000 + first),
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[f"Place {first}", [1]], [f"Place {first + 1}", [0, 9]]],
        "context": [[one["title"], one["sentences"]] for one in some],
    }


def cut(name: str, *sentences: list[str], answer: str) -> dict[str, Any]:
    return {
        "id": name,
        "question": "Which town has walls?",
        "answers": [answer],
        "paragraphs": [{"title": "guessed", "sentences": some} for some in sentences],
        "supporting": [],
        "distractors": [3, 4, 5, 20],
    }


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    qa, official = folder / "qa", folder / "hotpotqa"
    write(qa / "paragraphs.jsonl.gz", [paragraph(number) for number in range(60)])
    known = [paragraph(30)["sentences"][:1], paragraph(31)["sentences"][1:2]]
    cuts = [
        cut("known", *known, answer="1031"),
        cut("short", ["Elsewhere Anna was born."], ["Anna has walls in Rome."], answer="Rome"),
        cut("absent", ["Nothing of it."], answer="Paris"),
    ]
    write(qa / "hotpotqa_train_halueval.jsonl.gz", cuts)
    for name in ("2wiki_train", "nq_open_gold", "iirc"):
        write(qa / f"{name}.jsonl.gz", [])
    write(official / "train.jsonl.gz", [hotpot("official", 10)])
    write(official / "dev.jsonl.gz", [hotpot("dev", 20)])
    arguments = [
        "--qa",
        qa,
        "--hotpotqa",
        official,
        "--tokenizer",
        "bytes",
        "--out",
        folder / "out",
    ]
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_paragraphs_of_development_questions_are_in_no_text(out: Path) -> None:
    for path in out.iterdir():
        assert "Place 20 " not in path.read_text()
        assert "Place 21 " not in path.read_text()


def test_whole_paragraphs_are_titled_and_cut_ones_are_not(out: Path) -> None:
    titled = {one.id.rpartition("/")[2]: one for one in read_examples(out / "train_titled.jsonl")}
    assert titled.keys() == {"official", "known"}
    assert all(passage.title for one in titled.values() for passage in one.passages)
    assert [one.text for one in titled["known"].evidence] in (
        ["Place 30 is a town.", "It was built in 1031."],
        ["It was built in 1031.", "Place 30 is a town."],
    )
    (plain,) = read_examples(out / "train_plain.jsonl")
    assert plain.id.endswith("/short"), "an answer that is not in the evidence is left out"
    assert not any(passage.title for passage in plain.passages)
    assert {one.text for one in plain.evidence} == {
        "Elsewhere Anna was born.",
        "Anna has walls in Rome.",
    }


def test_conversations_end_with_the_answer_and_hold_the_evidence(out: Path) -> None:
    examples = read_conversations(out / "lessons_long.jsonl")
    found = {one[0].id.rpartition("/")[2]: one for one in examples}
    assert found.keys() == {"official", "known", "short"}
    memory, answer = (one.messages[-1]["content"] for one in found["official"][-2:])
    assert answer == "\\boxed{1010}"
    assert sorted(memory.splitlines()) == [
        "Place 10: It was built in 1010.",
        "Place 11 is a town.",
    ]
