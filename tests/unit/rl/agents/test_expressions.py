"""The calculator of agents."""

import random
from fractions import Fraction

import pytest

from memagent.rl.agents.expressions import CalculationError, calculate, calculation_reply


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("2 - 3 - 4", "-5"),
        ("12 / 4 / 3", "1"),
        ("-(2 - 5) * +4", "12"),
        ("1,250 * 2", "2500"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333"),
        ("2 / 3", "0.666667"),
        (" 3 \u00d7 4 \u2212 8 \u00f7 2 ", "8"),
        (".5 * 2", "1"),
        ("-1 / 4", "-0.25"),
        ("0 - 1 / 90000000", "0"),
    ],
)
def test_expressions_have_their_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / (2 - 2)", "division by zero"),
        ("", "a number is missing"),
        ("2 +", "a number is missing"),
        ("(1 + 2", "not closed"),
        ("1 2", "unexpected '2'"),
        ("2 ** 3", r"unexpected '\*'"),
        ("__import__('os')", "unexpected '_'"),
        ("9" * 201, "longer than 200"),
        (")", r"unexpected '\)'"),
    ],
)
def test_invalid_expressions_are_refused_with_a_message_for_the_model(
    expression: str, reason: str
) -> None:
    with pytest.raises(CalculationError, match=reason):
        calculate(expression)
    assert calculation_reply(expression).startswith("error: ")


def test_deep_brackets_are_within_the_recursion_limit() -> None:
    assert calculate("(" * 99 + "7" + ")" * 99) == "7"


def expression(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return str(draw.randint(0, 9999))
    if kind < 0.7:
        return f"{expression(draw, depth - 1)} {draw.choice('+-*/')} {expression(draw, depth - 1)}"
    if kind < 0.85:
        return f"({expression(draw, depth - 1)})"
    return f"{draw.choice('+-')}{expression(draw, depth - 1)}"


def test_random_expressions_have_the_values_of_python() -> None:
    draw = random.Random(1)
    num_divided_by_zero = 0
    for _ in range(20_000):
        text = expression(draw, 4)
        exact = "".join(f"F({part})" if part.isdigit() else part for part in _parts(text))
        try:
            value = eval(exact, {"F": Fraction})
        except ZeroDivisionError:
            num_divided_by_zero += 1
            assert calculation_reply(text) == "error: division by zero"
            continue
        assert abs(Fraction(calculate(text)) - value) <= Fraction(1, 2_000_000)
    assert num_divided_by_zero < 200


def test_random_characters_give_a_value_or_an_error_for_the_model() -> None:
    draw = random.Random(2)
    replies = [
        calculation_reply("".join(draw.choices("0123456789+-*/(). ,x_\n", k=draw.randint(0, 25))))
        for _ in range(20_000)
    ]
    num_errors = sum(reply.startswith("error: ") for reply in replies)
    assert 15_000 < num_errors < 20_000


def _parts(text: str) -> list[str]:
    for sign in "+-*/()":
        text = text.replace(sign, f" {sign} ")
    return text.split()
