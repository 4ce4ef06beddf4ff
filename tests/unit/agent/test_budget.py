"""The budget: known before the first call, and explained when it cannot be met."""

import pytest

from memagent.agent.budget import JOINT_TOKENS, check_budget, measure_budget
from memagent.agent.prompts import PROMPT_SETS, PromptSet
from memagent.config import AgentConfig
from memagent.errors import BudgetError
from memagent.tokens.tokenizers import UNKNOWN_TEMPLATE_TOKENS, ByteTokenizer

TINY = PromptSet(name="tiny", read="{question}{section}{memory}ab", answer="{question}{memory}xyz")


def config(**values: int) -> AgentConfig:
    return AgentConfig(**{"window": 1000, "chunk_tokens": 400, "memory_tokens": 100, **values})


def test_the_parts_are_counted_by_hand() -> None:
    budget = measure_budget("why?", config(answer_tokens=50), TINY, ByteTokenizer())
    empty = len("(empty)")
    assert budget.question == 4
    assert budget.read_template == 2 + empty + UNKNOWN_TEMPLATE_TOKENS
    assert budget.answer_template == 3 + empty + UNKNOWN_TEMPLATE_TOKENS
    assert budget.read_total == 4 + budget.read_template + 400 + 100 + 100 + JOINT_TOKENS
    assert budget.answer_total == 4 + budget.answer_template + 100 + 50 + JOINT_TOKENS


def test_reasoning_is_added_to_both_replies() -> None:
    budget = measure_budget("?", config(reasoning_tokens=33), TINY, ByteTokenizer())
    assert (budget.read_reply, budget.answer_reply) == (133, 1000 // 8 + 33)


def test_the_defaults_leave_room_for_a_long_question() -> None:
    budget = measure_budget("q", AgentConfig(), PROMPT_SETS["default"], ByteTokenizer())
    assert budget.window - budget.section - budget.memory - budget.read_reply > 1000


def test_the_advice_of_the_error_works() -> None:
    with pytest.raises(BudgetError) as caught:
        check_budget("why?", config(chunk_tokens=800, answer_tokens=50), TINY, ByteTokenizer())
    advised = int(str(caught.value).split("lower `chunk_tokens` to ")[1].split(",")[0])
    check_budget("why?", config(chunk_tokens=advised, answer_tokens=50), TINY, ByteTokenizer())


def test_a_question_too_long_says_by_how_much() -> None:
    question = "w" * 700
    with pytest.raises(BudgetError, match="the question has 700 tokens") as caught:
        check_budget(question, config(answer_tokens=50), TINY, ByteTokenizer())
    excess = int(str(caught.value).split("shorten it by ")[1].split(",")[0])
    check_budget(question[excess:], config(answer_tokens=50), TINY, ByteTokenizer())


def test_an_answer_that_cannot_fit_names_the_answer() -> None:
    with pytest.raises(BudgetError, match="lower `memory_tokens` or `answer_tokens`"):
        check_budget("why?", config(answer_tokens=1024), TINY, ByteTokenizer())
