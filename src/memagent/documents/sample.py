"""A text to try things on: the archive of an invented town, with two facts hidden in it.

It has about 12,000 tokens. A seeded generator writes the entries, so the text is the same on every
machine. `memagent demo` reads it, or writes it to a file.
"""

from __future__ import annotations

import calendar
import random

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

PEOPLE = (
    "Anders Holm",
    "Brita Vinter",
    "Casper Dahl",
    "Dorthe Lund",
    "Edvard Strand",
    "Frida Moe",
    "Gustav Hagen",
    "Hedda Sunde",
    "Isak Bruun",
    "Johanne Eide",
    "Karl Rask",
    "Liv Tangen",
    "Magnus Foss",
    "Nanna Krog",
)
TRADES = (
    "cooper",
    "baker",
    "ferryman",
    "miller",
    "weaver",
    "tanner",
    "chandler",
    "mason",
    "cartwright",
    "apothecary",
)
PLACES = (
    "the lower bridge",
    "the fish market",
    "the north gate",
    "the tannery yard",
    "the chapel meadow",
    "the quay",
    "the mill race",
    "the almshouse",
    "the weighing house",
    "the road to Sandvik",
)
GOODS = (
    "salted herring",
    "rye flour",
    "lamp oil",
    "oak planks",
    "roofing slate",
    "raw wool",
    "barley",
    "hemp rope",
)
WEATHER = (
    "A hard frost held through the morning.",
    "Rain fell without a break from dawn until the evening service.",
    "The wind stood in the west and held the boats at their moorings.",
    "It was mild, and the river rose by the width of a hand.",
    "Fog lay over the harbour until noon.",
    "The day was bright and cold, and washing was hung out everywhere.",
)
EVENTS = (
    "{person}, {trade}, asked leave to set up a stall by {place} and was granted it for one season.",
    "A cart of {goods} overturned near {place}; {person} claimed {sum} crowns for the loss.",
    "The wardens inspected {place} and found {count} boards rotten and the railing loose.",
    "{person} was fined {sum} crowns for leaving {goods} unattended at {place} overnight.",
    "{count} barrels of {goods} were landed and entered in the book by {person}, {trade}.",
    "The widow of {person} sold her half of the warehouse at {place} to {other}.",
    "{person} and {other} quarrelled over a boundary near {place}; the matter was put off.",
    "A stray dog was taken up at {place}, and {person} was charged with feeding it.",
    "The price of {goods} rose again, and {person}, {trade}, complained to the council.",
    "{person} reported that the lamp at {place} had been broken by boys on their way home.",
    "The council let the repair of {place} to {person} for {sum} crowns, to be done before harvest.",
    "A traveller lodging with {person} left without settling for {count} nights.",
    "{other} stood surety for {person}, who owes {sum} crowns for {goods} delivered in spring.",
    "Two apprentices of {person}, {trade}, were found asleep at {place} and sent home.",
    "{person} gave {count} bundles of {goods} to the poor of the parish.",
)
REMARKS = (
    "Nothing was decided.",
    "The clerk was told to write to the county about it.",
    "It was read aloud and signed by all present.",
    "{person} spoke against it at some length.",
    "The matter is to be taken up again after {place} has been seen by a mason.",
    "{person} will keep the receipt.",
)


def town_archive(*, num_entries: int = 150, seed: int = 7) -> str:
    """The archive as one text, an entry per paragraph."""
    rng = random.Random(seed)
    hidden = {int(share * num_entries): sentence for share, sentence in HIDDEN_SENTENCES.items()}
    entries = [_entry(rng, number, hidden.get(number)) for number in range(num_entries)]
    return "\n\n".join(["ARCHIVE OF THE TOWN OF LINDHAVN", *entries]) + "\n"


def _entry(rng: random.Random, number: int, hidden: str | None) -> str:
    years, months = divmod(number, 12)
    date = f"{rng.randint(1, 28)} {calendar.month_name[months + 1]} {1850 + years}"
    sentences = [rng.choice(WEATHER), *(_filled(rng, text) for text in rng.sample(EVENTS, k=2))]
    if hidden:
        sentences.append(hidden)
    sentences.append(_filled(rng, rng.choice(REMARKS)))
    return f"{date}. {' '.join(sentences)}"


def _filled(rng: random.Random, sentence: str) -> str:
    person, other = rng.sample(PEOPLE, k=2)
    filled = sentence.format(
        person=person,
        other=other,
        trade=rng.choice(TRADES),
        place=rng.choice(PLACES),
        goods=rng.choice(GOODS),
        sum=rng.randint(2, 90),
        count=rng.randint(3, 40),
    )
    return filled[0].upper() + filled[1:]
