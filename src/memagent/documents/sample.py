"""A text to try things on: the archive of an invented town, with two facts hidden in it.

It has about 12,000 tokens. A seeded generator writes the entries, so the text is the same on every
machine. `memagent demo` reads it, or writes it to a file.
"""

from __future__ import annotations

import calendar
import random
import tomllib
from pathlib import Path

HIDDEN_SENTENCES = {
    0.10: "The old key to the clock tower was thrown into the harbour by boys.",
    0.15: "The parents of Lindhavn asked for a school bell, and the council put it off.",
    0.45: "The spare key to the clock tower is kept behind the loose brick beside the bakery oven.",
    0.80: "The school bell was cast by Marta Lindqvist, and 340 crowns were paid for it in silver.",
}
"""Where in the text, as a share of its entries, a sentence stands: two hints, then two facts."""
QUESTIONS = (
    "Where is the spare key to the clock tower kept?",
    "Who cast the school bell, and how much was paid for it?",
)
"""One for each of the two facts."""
FACTS = (HIDDEN_SENTENCES[0.45], HIDDEN_SENTENCES[0.80])
"""The sentences that answer them."""

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def town_archive(*, num_entries: int = 150, seed: int = 7) -> str:
    """The archive as one text, an entry per paragraph."""
    rng = random.Random(seed)
    hidden = {int(share * num_entries): sentence for share, sentence in HIDDEN_SENTENCES.items()}
    entries = [_entry(rng, number, hidden.get(number)) for number in range(num_entries)]
    return "\n\n".join(["ARCHIVE OF THE TOWN OF LINDHAVN", *entries]) + "\n"


def _entry(rng: random.Random, number: int, hidden: str | None) -> str:
    years, months = divmod(number, 12)
    date = f"{rng.randint(1, 28)} {calendar.month_name[months + 1]} {1850 + years}"
    sentences = [
        rng.choice(WORDS["weather"]),
        *(_filled(rng, text) for text in rng.sample(WORDS["events"], k=2)),
    ]
    if hidden:
        sentences.append(hidden)
    sentences.append(_filled(rng, rng.choice(WORDS["remarks"])))
    return f"{date}. {' '.join(sentences)}"


def _filled(rng: random.Random, sentence: str) -> str:
    person, other = rng.sample(WORDS["people"], k=2)
    filled = sentence.format(
        person=person,
        other=other,
        trade=rng.choice(WORDS["trades"]),
        place=rng.choice(WORDS["places"]),
        goods=rng.choice(WORDS["goods"]),
        sum=rng.randint(2, 90),
        count=rng.randint(3, 40),
    )
    return filled[0].upper() + filled[1:]
