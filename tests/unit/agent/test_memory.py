"""Memory: reasoning stays out, the budget is kept, silence erases nothing."""

import pytest

from memagent.agent.memory import rewrite, split_reasoning
from memagent.documents.tokenizers import ByteTokenizer


@pytest.mark.parametrize(
    ("text", "said", "has_reasoning"),
    [
        ("plain", "plain", False),
        ("<think>hm</think>\nfact", "fact", True),
        ("<Think>a\nb</Think> fact <think>more</think>", "fact", True),
        ("thought without a start</think>fact", "fact", True),
        ("<think>never ends", "", True),
        ("<reasoning>r</reasoning>fact", "fact", True),
        ("a <b> c", "a <b> c", False),
    ],
)
def test_reasoning_is_separated_from_the_reply(text: str, said: str, has_reasoning: bool) -> None:
    reply = split_reasoning(text)
    assert reply.text == said
    assert (reply.reasoning is not None) == has_reasoning


def test_a_reply_within_the_budget_is_the_new_memory() -> None:
    new = rewrite("old", 3, "new facts", ByteTokenizer(), memory_tokens=20)
    assert new == ("new facts", 9, False, False)


def test_a_reply_over_the_budget_is_cut_and_flagged() -> None:
    new = rewrite("old", 3, "ääää", ByteTokenizer(), memory_tokens=5)
    assert new == ("ää", 4, True, False)


def test_an_empty_reply_keeps_the_old_memory_and_is_flagged() -> None:
    assert rewrite("old", 3, "", ByteTokenizer(), memory_tokens=20) == ("old", 3, False, True)
