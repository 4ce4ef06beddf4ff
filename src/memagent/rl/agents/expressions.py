"""A calculator for models: numbers, + - * / and brackets. Exact, bounded, and runs no code.

    >>> calculate("(14 + 9) * 3")
    '69'
    >>> calculation_reply("1 / 0")
    'error: division by zero'

`ast` finds the structure of an expression; numbers reach it as positions in a list, so that they stay
exact fractions.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
"""Longer expressions are refused; this also bounds the size of numbers and the depth of brackets."""
NUM_DECIMALS = 6
ERROR = "error: "

_TOKEN = re.compile(r"\s*(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+|[-+*/()])")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"})
_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculationError(ValueError):
    """What is wrong with an expression, in a few words that the model reads."""


def calculate(expression: str) -> str:
    """The value of an expression, rounded to six decimals. Raises CalculationError."""
    if len(expression) > MAX_CHARS:
        raise CalculationError(f"longer than {MAX_CHARS} characters")
    tokens = _tokens(expression.translate(_SIGNS).strip())
    _check_order(tokens)
    numbers: list[Fraction] = []
    for position, token in enumerate(tokens):
        if _is_number(token):
            numbers.append(Fraction(token.replace(",", "")))
            tokens[position] = str(len(numbers) - 1)
    try:
        value = _value(ast.parse(" ".join(tokens), mode="eval").body, numbers)
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    return _written(value)


def calculation_reply(expression: str) -> str:
    """The reply to a model that asks for a calculation: the value, or what is wrong."""
    try:
        return calculate(expression)
    except CalculationError as error:
        return f"{ERROR}{error}"


def is_error(reply: str) -> bool:
    """Whether a reply reports an error."""
    return reply.startswith(ERROR)


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculationError(f"unexpected {text[position:].strip()[:1]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _is_number(token: str) -> bool:
    return token not in "+-*/()"


def _check_order(tokens: list[str]) -> None:
    """Raise CalculationError at the first misplaced token."""
    depth, is_number_due = 0, True
    for token in tokens:
        if is_number_due:
            if token in ")*/":
                raise CalculationError(f"unexpected {token!r}")
            depth += token == "("
            is_number_due = not _is_number(token)
        elif token == ")" and depth:
            depth -= 1
        elif _is_number(token) or token in "()":
            raise CalculationError("a bracket is not closed" if depth else f"unexpected {token!r}")
        else:
            is_number_due = True
    if is_number_due:
        raise CalculationError("a number is missing at the end")
    if depth:
        raise CalculationError("a bracket is not closed")


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int(position)):
            return numbers[position]
        case ast.UnaryOp(op=sign, operand=operand):
            value = _value(operand, numbers)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATORS[type(sign)](_value(left, numbers), _value(right, numbers))
    raise AssertionError(f"checked expressions have no {type(node).__name__}")


def _written(value: Fraction) -> str:
    """Whole numbers as such, others with a few decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    whole, part = divmod(round(abs(value) * 10**NUM_DECIMALS), 10**NUM_DECIMALS)
    decimals = f"{part:0{NUM_DECIMALS}}".rstrip("0")
    sign = "-" if value < 0 and (whole or part) else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"
