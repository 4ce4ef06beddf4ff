"""Word problems."""

from fractions import Fraction

from memagent.data.tasks.arithmetic import problem


def exact_value(expression: str) -> Fraction:
    return Fraction(eval(expression)).limit_denominator(1)


def test_problems_are_solved_by_their_expression_and_differ() -> None:
    problems = [problem(index, seed=4, num_steps=1 + index % 5) for index in range(300)]
    for one in problems:
        assert str(exact_value(one.metadata["expression"])) == one.answers[0]
        assert int(one.answers[0]) >= 0
        assert one.question.count(".") == 1 + one.metadata["num_steps"]
    assert len({one.question for one in problems}) > 290
    assert problem(7, seed=4) == problem(7, seed=4)
    assert problem(7, seed=5) != problem(7, seed=4)
