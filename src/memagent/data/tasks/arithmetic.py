"""Grade-school arithmetic: a calculator that runs no code, and word problems made by program.

    calculate("(14 + 9) * 3")                     "69"
    problem(0, seed=7, num_steps=3).question      "Mara has 14 marbles. She buys 3 bags of 9 ..."

A problem is an `Example` without a text. `metadata["expression"]` leads to its answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from memagent.data.example import Example
from memagent.data.tasks.registry import rng

TASK = "arithmetic"
MAX_CHARS = 200
"""Longer expressions are refused: a model that rambles must not hold up the others."""
NUM_DECIMALS = 6
ERROR = "error: "

_token = re.compile(r"\s*(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+|[-+*/()])")
_written = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})

NAMES = ("Mara", "Ole", "Ines", "Tarek", "Yuki", "Bram", "Noor", "Pavel", "Lena", "Kofi")
THINGS = ("marbles", "stamps", "pencils", "shells", "cards", "apples", "beads", "coins")
CONTAINERS = ("bags", "boxes", "packs", "jars")


class CalculationError(ValueError):
    """What is wrong with an expression, in a few words that the model reads."""


# --- the calculator ---------------------------------------------------------------------------------


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets. Raises CalculationError."""
    if len(expression) > MAX_CHARS:
        raise CalculationError(f"longer than {MAX_CHARS} characters")
    tokens = _tokens(expression.translate(_written))
    value, position = _sum(tokens, 0)
    if position < len(tokens):
        raise CalculationError(f"unexpected {tokens[position]!r}")
    return _number(value)


def calculation_reply(expression: str) -> str:
    """What a model is told when it asks for a calculation: the value, or what is wrong."""
    try:
        return calculate(expression)
    except CalculationError as error:
        return f"{ERROR}{error}"


def is_error(reply: str) -> bool:
    """Whether a reply tells of no value."""
    return reply.startswith(ERROR)


def _tokens(expression: str) -> list[str]:
    tokens, position, text = [], 0, expression.strip()
    while position < len(text):
        match = _token.match(text, position)
        if match is None:
            raise CalculationError(f"unexpected {text[position:].strip()[:1]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _sum(tokens: list[str], position: int) -> tuple[Fraction, int]:
    """A sum of products, and where it ends."""
    value, position = _product(tokens, position)
    while position < len(tokens) and tokens[position] in "+-":
        sign = 1 if tokens[position] == "+" else -1
        term, position = _product(tokens, position + 1)
        value += sign * term
    return value, position


def _product(tokens: list[str], position: int) -> tuple[Fraction, int]:
    value, position = _factor(tokens, position)
    while position < len(tokens) and tokens[position] in "*/":
        is_division = tokens[position] == "/"
        factor, position = _factor(tokens, position + 1)
        if is_division and factor == 0:
            raise CalculationError("division by zero")
        value = value / factor if is_division else value * factor
    return value, position


def _factor(tokens: list[str], position: int) -> tuple[Fraction, int]:
    if position == len(tokens):
        raise CalculationError("a number is missing at the end")
    token = tokens[position]
    if token in "+-":
        value, position = _factor(tokens, position + 1)
        return (value if token == "+" else -value), position
    if token == "(":
        value, position = _sum(tokens, position + 1)
        if position == len(tokens) or tokens[position] != ")":
            raise CalculationError("a bracket is not closed")
        return value, position + 1
    if token in ")*/":
        raise CalculationError(f"unexpected {token!r}")
    return Fraction(token.replace(",", "")), position + 1


def _number(value: Fraction) -> str:
    """Whole numbers as such, others with a few decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    whole, part = divmod(round(abs(value) * 10**NUM_DECIMALS), 10**NUM_DECIMALS)
    decimals = f"{part:0{NUM_DECIMALS}}".rstrip("0")
    sign = "-" if value < 0 and (whole or part) else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


# --- word problems ----------------------------------------------------------------------------------


def problem(index: int, *, seed: int, num_steps: int = 3, max_number: int = 20) -> Example:
    """The word problem of an index: the same for the same index and settings, wherever it is made.

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
