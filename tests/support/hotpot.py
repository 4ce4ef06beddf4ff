"""Small files in HotpotQA's own format, with questions whose answers can be checked by hand.

question i    "Where was the maker of Object i born?"
gold          "Object i": "... It was made by Person i."    "Person i": "... born in Town i."
distractors   "Near i a", "Near i b"
paragraphs    "Filler 0", "Filler 1", ...
"""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

WORDS = (
    *("amber", "river", "stone", "cloud", "winter", "garden"),
    *("silver", "lantern", "orchard", "bridge", "meadow", "harbour"),
)


class HotpotFiles(NamedTuple):
    """Paths of the files."""

    train: Path
    dev: Path
    paragraphs: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that name them."""
        return {name: str(path) for name, path in self._asdict().items()}


def item(name: str, *, answer: str | None = None, question: str | None = None) -> dict[str, Any]:
    """A question about Object `name`."""
    return {
        "_id": f"id-{name}",
        "question": question or f"Where was the maker of Object {name} born?",
        "answer": answer or f"Town {name}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[f"Object {name}", 1], [f"Person {name}", 0]],
        "context": [
            [f"Near {name} a", [f"Nothing is known of {name} here."]],
            [f"Object {name}", [f"Object {name} is old.", f" It was made by Person {name}."]],
            [
                f"Person {name}",
                [f"Person {name} was born in Town {name}.", " Little else is told."],
            ],
            [f"Near {name} b", [f"Some say {name} never was.", " Others do not."]],
        ],
    }


def fillers(number: int, *, seed: int = 0, least: int = 5, most: int = 60) -> list[dict[str, str]]:
    """Paragraphs of so many words about nothing."""
    generator = random.Random(seed)
    return [
        {
            "title": f"Filler {index}",
            "text": " ".join(generator.choices(WORDS, k=generator.randint(least, most)))
            + f" {index}.",
        }
        for index in range(number)
    ]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Records as JSONL, gzipped where the name says so."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_hotpot(
    folder: Path,
    *,
    train: Iterable[dict[str, Any]] | None = None,
    dev: Iterable[dict[str, Any]] | None = None,
    paragraphs: Iterable[dict[str, str]] | None = None,
) -> HotpotFiles:
    """The three files, with a dozen questions and 300 fillers where nothing else is given."""
    folder.mkdir(parents=True, exist_ok=True)
    return HotpotFiles(
        write_lines(folder / "train.jsonl", train or [item(f"t{n}") for n in range(12)]),
        write_lines(folder / "dev.jsonl", dev or [item(f"d{n}") for n in range(12)]),
        write_lines(folder / "paragraphs.jsonl.gz", paragraphs or fillers(300)),
    )
