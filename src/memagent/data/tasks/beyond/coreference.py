"""The i-th of several similar items, word for word, out of a long log of things that were written.

    User: Please write a poem about the harbour.
    Writer: All night the harbour listens to the rain,      <- the first poem about the harbour
    ...
    User: Please write a riddle about the harbour.
    ...
    User: Please write a poem about the harbour.
    Writer: ...                                             <- the second

    asked: Give the second poem about the harbour, word for word.

The evidence is the item that is asked for. The positions of the others of the same kind and topic are in
metadata: `spans["similar"]`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from pydantic import Field

from memagent.data.tasks.beyond.filler import ORDINALS
from memagent.data.tasks.beyond.weave import BeyondSettings, Fact, TextPlan, in_order

_TOPICS = """
    harbour orchard lighthouse clockmaker winter owl ferry market fountain lantern railway glacier
    violin bakery desert compass tower carousel library meadow thunderstorm cellar mountain scarecrow
    moon umbrella circus windmill canal kite forest telescope bridge garden lake chimney sparrow island
"""
TOPICS = tuple(f"the {word}" for word in _TOPICS.split())
_FEELINGS = ("longing", "patience", "sorrow", "courage", "laughter", "silence", "hope", "doubt")
_SOUNDS = ("bells", "footsteps", "rain", "old songs", "geese", "a distant drum", "wind", "thunder")
_COLOURS = ("silver", "amber", "crimson", "pale green", "ash-grey", "golden", "violet", "copper")
_HOURS = ("at noon", "at midnight", "before dawn", "in the evening", "on Sundays", "in early May")
_GUESTS = ("a child", "a sailor", "two sisters", "a fiddler", "a fox", "the postman", "a widow")
_GIFTS = ("a key", "a feather", "three coins", "a torn map", "a ribbon", "an apple", "a glass bead")
_DOES = ("waits", "hums", "sleeps", "burns", "trembles", "glows", "listens", "hides", "dreams")
_ENDS = ("and no one knows why", "for a little while", "as it always did", "until the year is old",
         "and then it is gone", "beyond the last house", "under a borrowed name")  # fmt: skip

Slots = tuple[tuple[str, ...], ...]
_POEM: tuple[tuple[str, Slots], ...] = (
    ("{topic} {0} {1},", (_DOES, _HOURS)),
    ("its {0} light is full of {1};", (_COLOURS, _SOUNDS)),
    ("{0} came by and left {1},", (_GUESTS, _GIFTS)),
    ("{0} stayed behind {1}.", (_FEELINGS, _ENDS)),
)
_NOTE: tuple[tuple[str, Slots], ...] = (
    ("{topic} is best seen {0}, when it {1}.", (_HOURS, _DOES)),
    ("{0} once lost {1} there.", (_GUESTS, _GIFTS)),
    ("Some hear {0} in it, others only {1}.", (_SOUNDS, _FEELINGS)),
)
_RIDDLE: tuple[tuple[str, Slots], ...] = (
    ("I wear {0} {1}, and {2} is my food.", (_COLOURS, _HOURS, _FEELINGS)),
    ("{0} brought me {1} and asked for {2}.", (_GUESTS, _GIFTS, _SOUNDS)),
    ("I am {topic}, {0}.", (_ENDS,)),
)
_TALE: tuple[tuple[str, Slots], ...] = (
    ("{0} walked to {topic} {1} with {2}.", (_GUESTS, _HOURS, _GIFTS)),
    ("There was nothing but {0} and {1} {2}.", (_SOUNDS, _COLOURS, ("dust", "mist", "light", "snow"))),
    ("It taught them {0}, {1}.", (_FEELINGS, _ENDS)),
)  # fmt: skip
_TOAST: tuple[tuple[str, Slots], ...] = (
    ("Raise your glass to {topic}, which {0} {1}!", (_DOES, _HOURS)),
    ("May {0} bring it {1},", (_GUESTS, _GIFTS)),
    ("and may {0} never drown out {1}.", (_SOUNDS, _FEELINGS)),
)
KINDS: dict[str, tuple[tuple[tuple[str, Slots], ...], str]] = {
    "poem": (_POEM, "\n"),
    "note": (_NOTE, " "),
    "riddle": (_RIDDLE, " "),
    "tale": (_TALE, " "),
    "toast": (_TOAST, " "),
}
"""Kind of item: its lines, and what separates them."""
REMARKS = ("Thanks.\n\n", "Go on.\n\n", "Very nice.\n\n", "A pause.\n\n", "Next.\n\n")


class CoreferenceSettings(BeyondSettings):
    """How many items answer the same request."""

    max_similar: int = Field(default=6, ge=2, le=len(ORDINALS))
    """Items of the asked kind and topic, at most; at least two are there."""
    num_near_misses: int = Field(default=4, ge=0, le=40)
    """Items of the same kind on another topic, or on the same topic of another kind."""


def plan(rng: random.Random, settings: CoreferenceSettings) -> TextPlan:
    """Several items that answer the same request; one of them is asked for."""
    kind, *other_kinds = rng.sample(list(KINDS), len(KINDS))
    topic, *other_topics = rng.sample(TOPICS, len(TOPICS))
    num_similar = rng.randint(2, settings.max_similar)
    number = rng.randrange(num_similar)
    items = _different(lambda: item(rng, kind, topic), num_similar)
    facts = []
    for place, (position, text) in zip(
        sorted(rng.random() for _ in items), enumerate(items), strict=True
    ):
        facts.append(
            Fact(
                text=text,
                place=place,
                lead=request(kind, topic),
                role="evidence" if position == number else "similar",
            )
        )
    for turn in range(settings.num_near_misses):
        pair = (kind, rng.choice(other_topics)) if turn % 2 else (rng.choice(other_kinds), topic)
        text = item(rng, *pair)
        facts.append(Fact(text=text, place=rng.random(), lead=request(*pair), role="near_miss"))
    which = f"{ORDINALS[number]} {kind} about {topic}"
    return TextPlan(
        question=f"The text is a log of things that were written on request. Give the {which}, "
        "counted from the start of the log, word for word.",
        answers=(items[number],),
        grader="exact",
        facts=in_order(facts),
        units=_log(kind, topic),
        fact_end="\n\n",
        short_units=REMARKS,
        metadata={"kind": kind, "topic": topic, "number": number + 1, "num_similar": num_similar},
    )


def request(kind: str, topic: str) -> str:
    """The request before an item."""
    return f"User: Please write a {kind} about {topic}.\nWriter: "


def item(rng: random.Random, kind: str, topic: str) -> str:
    """Something written about a topic, without blank lines."""
    lines, joint = KINDS[kind]
    said = []
    for line, slots in lines:
        words = line.format(*(rng.choice(slot) for slot in slots), topic=topic)
        said.append(words[0].upper() + words[1:])
    return joint.join(said)


def _log(kind: str, topic: str) -> Callable[[random.Random], Iterator[str]]:
    """Requests and items without limit, none of them of this kind and topic."""

    def units(rng: random.Random) -> Iterator[str]:
        pairs = [(one, about) for one in KINDS for about in TOPICS if (one, about) != (kind, topic)]
        while True:
            pair = rng.choice(pairs)
            yield f"{request(*pair)}{item(rng, *pair)}\n\n"

    return units


def _different(draw: Callable[[], str], num: int) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < num:
        if (one := draw()) not in drawn:
            drawn.append(one)
    return drawn
