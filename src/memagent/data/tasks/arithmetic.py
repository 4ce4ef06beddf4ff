"""Grade-school word problems, generated from a seed.

    >>> problem(0, seed=7, num_steps=3).question
    'Pavel has 20 apples. Tarek then gives ...'

A problem is an `Example` without a text. `metadata["expression"]` leads to its answer. Not here: the
calculator that agents may use (`rl/agents/expressions.py`).
"""

from __future__ import annotations

from memagent.data.example import Example
from memagent.data.tasks.registry import rng

TASK = "arithmetic"

NAMES = ("Mara", "Ole", "Ines", "Tarek", "Yuki", "Bram", "Noor", "Pavel", "Lena", "Kofi")
THINGS = ("marbles", "stamps", "pencils", "shells", "cards", "apples", "beads", "coins")
CONTAINERS = ("bags", "boxes", "packs", "jars")


def problem(index: int, *, seed: int, num_steps: int = 3, max_number: int = 20) -> Example:
    """The word problem of an index: the same for the same index and settings.

    Every value on the way is a whole number, and none is negative.
    """
    draw = rng(seed, f"{TASK}/{num_steps}/{max_number}", index)
    name, friend = draw.sample(NAMES, 2)
    thing, container = draw.choice(THINGS), draw.choice(CONTAINERS)
    value = draw.randint(2, max_number)
    sentences, expression = [f"{name} has {value} {thing}."], str(value)
    for _ in range(num_steps):
        number, size = draw.randint(2, max_number), draw.randint(2, 9)
        kinds = ["buys", "finds", "doubles"]
        kinds += ["gives"] if value >= 2 else []
        kinds += ["shares"] if value >= 4 and _divisors(value) else []
        kind = draw.choice(kinds)
        if kind == "buys":
            sentences.append(f"{name} buys {size} {container} of {number} {thing} each.")
            expression, value = f"{expression} + {size} * {number}", value + size * number
        elif kind == "finds":
            sentences.append(f"{name} finds {number} more {thing}.")
            expression, value = f"{expression} + {number}", value + number
        elif kind == "doubles":
            sentences.append(f"{friend} then gives {name} as many {thing} as {name} has.")
            expression, value = f"({expression}) * 2", value * 2
        elif kind == "gives":
            number = draw.randint(1, min(value - 1, max_number))
            sentences.append(f"{name} gives {number} {thing} to {friend}.")
            expression, value = f"{expression} - {number}", value - number
        else:
            number = draw.choice(_divisors(value))
            sentences.append(
                f"{name} puts all of them into {number} equal piles and keeps only one of the piles."
            )
            expression, value = f"({expression}) / {number}", value // number
    sentences.append(f"How many {thing} does {name} have now?")
    return Example(
        id=f"{TASK}/{seed}/{num_steps}/{max_number}/{index}",
        task=TASK,
        question=" ".join(sentences),
        answers=(str(value),),
        documents=(),
        seed=seed,
        metadata={"expression": expression, "num_steps": num_steps},
    )


def _divisors(value: int) -> list[int]:
    return [number for number in range(2, 10) if value % number == 0 and value > number]
