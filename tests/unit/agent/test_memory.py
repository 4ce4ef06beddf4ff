"""Memory: reasoning stays out, the budget is kept, silence erases nothing."""

import pytest

from memagent.agent.memory import ReadingState, extend, rewrite, split_reasoning
from memagent.agent.prompts import MemoryChange
from memagent.agent.trace import Section, Step
from memagent.tokens.tokenizers import ByteTokenizer


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
    new = rewrite("old", 3, replaced("new facts"), ByteTokenizer(), memory_tokens=20)
    assert new == ("new facts", 9, False, False)


def test_a_reply_over_the_budget_is_cut_and_flagged() -> None:
    new = rewrite("old", 3, replaced("ääää"), ByteTokenizer(), memory_tokens=5)
    assert new == ("ää", 4, True, False)


def test_an_empty_reply_keeps_the_old_memory_and_is_flagged() -> None:
    new = rewrite("old", 3, replaced(""), ByteTokenizer(), memory_tokens=20)
    assert new == ("old", 3, False, True)


def replaced(text: str) -> MemoryChange:
    return MemoryChange("replace", text)


def added(old: str, text: str, *, memory_tokens: int = 20) -> tuple[str, int, bool, bool]:
    change = MemoryChange("add", text)
    return rewrite(old, len(old), change, ByteTokenizer(), memory_tokens=memory_tokens)


def test_lines_are_added_after_those_of_the_memory() -> None:
    assert added("one\ntwo", "three\n\nfour") == ("one\ntwo\nthree\nfour", 18, False, False)
    assert added("", "one") == ("one", 3, False, False)


def test_lines_the_memory_has_already_are_not_added_again() -> None:
    assert added("one\ntwo", "two\nthree") == ("one\ntwo\nthree", 13, False, False)
    assert added("one\ntwo", "two\none") == ("one\ntwo", 7, False, True)


def test_the_oldest_lines_make_room_and_that_is_flagged() -> None:
    assert added("one\ntwo", "three", memory_tokens=10) == ("two\nthree", 9, True, False)
    assert added("one\ntwo", "three", memory_tokens=5) == ("three", 5, True, False)
    assert added("one\ntwo", "abcdef", memory_tokens=4) == ("abcd", 4, True, False)


def test_what_the_model_was_least_certain_of_makes_room() -> None:
    def extended(certainty: dict[str, float], logprob: float) -> tuple[str, int, bool, bool]:
        return extend(
            "one\ntwo",
            7,
            "three",
            ByteTokenizer(),
            memory_tokens=10,
            certainty=certainty,
            logprob=logprob,
        )

    assert extended({"one": -0.1, "two": -3.0}, -0.5) == ("one\nthree", 9, True, False)
    assert extended({"one": -2.0, "two": -3.0}, -4.0) == ("one\ntwo", 7, True, True)
    assert extended({}, 0.0) == ("two\nthree", 9, True, False)


def read_step(index: int, memory: str, logprob: float | None) -> Step:
    section = Section(start=index, end=index + 1, num_tokens=1, places=())
    return Step(kind="read", index=index, reply="", memory=memory, section=section, logprob=logprob)


def test_lines_share_the_log_probability_of_the_reply_that_added_them() -> None:
    steps = [
        read_step(0, "one\ntwo", -1.0),
        read_step(1, "one\ntwo", -0.2),
        read_step(2, "two\nthree", -3.0),
    ]
    state = ReadingState()
    for step in steps:
        state = state.after_read(step, 9)
    assert state.certainty == {"two": -0.5, "three": -3.0}
    assert ReadingState().after_read(read_step(0, "one", None), 9).certainty == {}
