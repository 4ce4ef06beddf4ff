"""Small sources for RULER's tasks, written on the spot: essays, SQuAD, HotpotQA.

settings = ruler_settings(folder, "ruler/qa_1", tokens=2048, tokenizer="bytes")
"""

import json
from pathlib import Path
from typing import Any

from tests.conftest import prose

MADE_UP = tuple(
    f"ruler/{name}"
    for name in [
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
    ]
)
"""The tasks whose answers can be derived from text and question alone."""
ASKED = ("ruler/qa_1", "ruler/qa_2")
ALL = MADE_UP + ASKED

NUM_PARAGRAPHS = 5
TOWNS = ("Arlen", "Bergby", "Corvo", "Dunmore", "Elster", "Fjord")


def ruler_settings(folder: Path, task: str, **settings: Any) -> dict[str, Any]:
    """Settings of a task with the sources it needs, written to `folder` if they are not there."""
    sources = {
        "ruler/qa_1": {"questions": folder / "squad.json"},
        "ruler/qa_2": {
            "questions": folder / "hotpot.jsonl",
            "paragraphs": folder / "paragraphs.jsonl",
        },
    }.get(task, {"essays": folder / "essays"} if task.startswith("ruler/niah") else {})
    if not folder.exists():
        write_sources(folder)
    return {**{name: str(path) for name, path in sources.items()}, **settings}


def write_sources(folder: Path) -> None:
    (folder / "essays").mkdir(parents=True)
    for number in range(3):
        (folder / "essays" / f"{number}.txt").write_text(prose(150, seed=number))
    (folder / "squad.json").write_text(json.dumps(squad()))
    (folder / "hotpot.jsonl").write_text("".join(json.dumps(item) + "\n" for item in hotpot()))
    lines = ({"title": f"Page {n}", "text": prose(4, seed=100 + n)} for n in range(60))
    (folder / "paragraphs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def squad() -> dict[str, Any]:
    """Six articles of five paragraphs; each paragraph has one question, and one without an answer."""
    articles = []
    for town_number, town in enumerate(TOWNS):
        paragraphs = []
        for number in range(NUM_PARAGRAPHS):
            year = str(1500 + 10 * town_number + number)
            opening = f"{town} is a town by the sea. The mill no. {number} was built in "
            context = f"{opening}{year} by the river. {prose(2, seed=town_number * 10 + number)}"
            paragraphs.append(
                {
                    "context": context,
                    "qas": [
                        {
                            "id": f"{town}-{number}",
                            "question": f"When was mill {number} of {town} built?",
                            "answers": [
                                {"text": f"in {year}", "answer_start": len(opening) - 3},
                                {"text": year, "answer_start": len(opening)},
                            ],
                        },
                        {
                            "id": f"{town}-{number}-none",
                            "question": f"Who burnt mill {number} of {town}?",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                }
            )
        articles.append({"title": town, "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def hotpot() -> list[dict[str, Any]]:
    """One question a town: who built the bridge of the place where the mayor was born."""
    items = []
    for number, town in enumerate(TOWNS):
        builder = f"Engineer {chr(65 + number)}"
        gold = [
            [f"Mayor {number}", ["A mayor.", f" Mayor {number} was born in {town}.", " He sang."]],
            [f"Bridge of {town}", [f"The bridge of {town} was built by {builder}.", " It stands."]],
        ]
        others = [[f"Other {number}.{n}", [prose(2, seed=n + 50 * number)]] for n in range(4)]
        items.append(
            {
                "_id": f"h{number}",
                "question": f"Who built the bridge in the birthplace of Mayor {number}?",
                "answer": builder,
                "type": "bridge",
                "level": "hard",
                "context": [others[0], gold[0], *others[1:], gold[1]],
                "supporting_facts": [[f"Mayor {number}", 1], [f"Bridge of {town}", 0]],
            }
        )
    return items
