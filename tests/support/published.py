"""Published datasets for tests: the real files if they are beside the checkout, else small stand-ins.

    published/hotpotqa/{train,dev,paragraphs}.jsonl.gz    published/squad/dev-v2.0.json.gz
    published/books/*.txt.gz

Stand-ins have the format, the names and the variety of the real files: yes-or-no questions, answers with
punctuation and accents, supporting facts that point nowhere, questions without an answer.
"""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import prose
from tests.support.hotpot import fillers, write_lines
from tests.support.ruler_sources import squad

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"

NAMES = (
    *("Anna Bergström", "José Ortega y Gasset", "O'Brien", "Jean-Luc Godard", "W. E. B. Du Bois"),
    *("Sir Arthur Conan Doyle", "Martin Luther King Jr.", "Björk", "Ngũgĩ wa Thiong'o", "50 Cent"),
    *("Elizabeth II", "Saint Petersburg", "Washington, D.C.", "São Paulo", "Château-Thierry"),
    *("Stratford-upon-Avon", "New York City", "St. Louis, Missouri", "Kraków", "the Isle of Man"),
    *("The Beatles", "AC/DC", "Guns N' Roses", "Simon & Garfunkel", "Earth, Wind & Fire"),
    *('"Heroes"', "Ocean's Eleven", "2001: A Space Odyssey", "Who's Afraid of Virginia Woolf?"),
    *("Romeo + Juliet", "(500) Days of Summer", "Mr. & Mrs. Smith", "Wall-E", "Se7en"),
    *("the Royal Air Force", "Procter & Gamble", "Yahoo!", "Toys 'R' Us", "Rolls-Royce plc"),
    *("University of California, Berkeley", "the Treaty of Versailles", "Hurricane Katrina"),
)
NUMBERS = (
    *("1,234", "3.5 million", "12 June 1984", "June 12, 1984", "1898", "the 1920s", "7 to 10"),
    *("US$1.3 billion", "42 km", "90%", "two", "fourteenth", "July 4", "9,984,670 square miles"),
    *("from 1945 to 1951", "19th century", "5 ft 11 in", "Boeing 747", "World War II", "F-16"),
)
KINDS = ("{}", "the brother of {}", "{} and his wife", "a novel about {}", "{}'s first album")
ANSWERS = (*(kind.format(name) for kind in KINDS for name in NAMES), *NUMBERS)


class Published(NamedTuple):
    """A folder of published data and what is in it."""

    folder: Path
    num_train: int
    num_dev: int
    num_paragraphs: int
    num_squad: int
    num_impossible: int
    book: str
    num_book_chars: int


def published_data(folder: Path) -> Published:
    """The real files, or stand-ins written to `folder`."""
    if REAL.is_dir():
        return Published(REAL, 981, 1491, 36_045, 6078, 3168, "moby-dick.txt.gz", 1_219_054)
    hotpotqa = folder / "hotpotqa"
    hotpotqa.mkdir(parents=True)
    write_lines(hotpotqa / "train.jsonl.gz", [question(f"t{n}", n) for n in range(320)])
    write_lines(hotpotqa / "dev.jsonl.gz", [question(f"d{n}", n) for n in range(520)])
    write_lines(hotpotqa / "paragraphs.jsonl.gz", fillers(3000, least=20, most=90))
    (folder / "squad").mkdir()
    _write(folder / "squad" / "dev-v2.0.json.gz", json.dumps(squad()))
    (folder / "books").mkdir()
    for number in range(3):
        text = prose(2500, seed=number)
        _write(folder / "books" / f"book-{number}.txt.gz", text)
    return Published(folder, 320, 520, 3000, 60, 30, "book-2.txt.gz", len(text))


def question(name: str, number: int) -> dict[str, Any]:
    """A question over two paragraphs: every tenth with yes or no, every twentieth with a lost fact."""
    is_yes_no = number % 10 == 7
    answer = ("yes", "no")[number % 2] if is_yes_no else ANSWERS[number % len(ANSWERS)]
    stated = "something else" if is_yes_no else answer
    lost = [[f"Person {name}", 99]] if name.startswith("d") and number % 20 == 3 else []
    return {
        "_id": f"id-{name}",
        "question": f"What does Object {name} have to do with its maker?",
        "answer": answer,
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[f"Object {name}", 1], [f"Person {name}", 0], *lost],
        "context": [
            [f"Near {name} a", [f"Nothing is known of {name}. " + prose(4, seed=number)]],
            [f"Object {name}", [f"Object {name} is old.", f" It was made by Person {name}."]],
            [f"Person {name}", [f"Person {name} is known for {stated}.", " Little else is known."]],
            [f"Near {name} b", [f"Some doubt that {name} existed.", " Others do not."]],
        ],
    }


def _write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))
