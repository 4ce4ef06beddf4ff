"""The part of a reply that a task with a limit grades."""

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent.data.tasks.registry import MAX_ANSWER_TOKENS, open_task
from memagent.rewards.text import without_reasoning
from memagent.rewards.verifiers import GRADERS, count_tokens, grade, limit_answer
from tests.support.timing import growth

LONG = "First I look at every part of the text and count what is in it. " * 20
pieces = st.sampled_from(
    ["Paris ", "\\boxed{", "}", "<think>", "</think>", "the answer is ", "a, b, ", "not ", "12 "]
)
replies = st.one_of(st.text(max_size=50), st.lists(pieces, max_size=12).map("".join))
VARIABLES = ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"]


def test_tokens_are_digits_signs_and_up_to_five_letters_each() -> None:
    assert count_tokens("") == 0
    assert count_tokens("red, green") == 3
    assert count_tokens("4021 harbours") == 4 + 2
    assert count_tokens("a_b\n\té") == 4


def test_a_reply_that_lists_every_coded_word_scores_by_its_first_or_last_ones_only() -> None:
    example = open_task("ruler/fwe", {"tokens": 32768, "tokenizer": "bytes"}).example(0)
    words = sorted(set(example.text().split()) - {"..."})
    assert grade("ruler_all", ", ".join(words), example.answers, "all").value == 1.0
    others = [word for word in words if word not in example.answers]
    assert len(others) >= 40
    middle = len(others) // 2
    listed = ", ".join([*others[:middle], *example.answers, *others[middle:]])
    limit = MAX_ANSWER_TOKENS["ruler/fwe"]
    for reply in (listed, f"\\boxed{{{listed}}}", f"{LONG} Therefore, the answer is {listed}."):
        assert grade("ruler_all", reply, example.answers, "all", max_tokens=limit).value == 0.0


@pytest.mark.parametrize(
    "reply",
    [
        "ABCDE, FGHIJ, KLMNO, PQRST, UVWXY",
        f"<think>{LONG}</think>ABCDE, FGHIJ, KLMNO, PQRST, UVWXY",
        f"{LONG}</think>ABCDE, FGHIJ, KLMNO, PQRST, UVWXY",
        f"{LONG}\n\\boxed{{ABCDE, FGHIJ, KLMNO, PQRST, UVWXY}}\n{LONG}",
        f"{LONG}\\boxed{{ABCDE}}, \\boxed{{FGHIJ}}, \\boxed{{KLMNO}}, \\boxed{{PQRST}} \\boxed{{UVWXY}}",
        f"{LONG}\nTherefore, the answer is VAR ABCDE, VAR FGHIJ, KLMNO, PQRST and UVWXY.",
        f"{LONG}\n**Final answer:** ABCDE, FGHIJ, KLMNO, PQRST, UVWXY. {LONG}",
        f"{LONG}\nSo these are they: ABCDE, FGHIJ, KLMNO, PQRST, UVWXY",
        f"They are ABCDE, FGHIJ, KLMNO, PQRST and UVWXY. {LONG}",
    ],
)
def test_a_model_that_reasons_at_length_keeps_its_whole_answer(reply: str) -> None:
    assert grade("ruler_all", reply, VARIABLES, "all", max_tokens=30).value == 1.0


def test_a_short_reply_is_graded_as_it_is() -> None:
    reply = "\\boxed{4021} and \\boxed{77}, so the answer is both"
    assert limit_answer(reply, 128).texts == (reply,)
    assert limit_answer(reply, 128) == ((reply,), count_tokens(reply), False)


def test_what_is_cut_keeps_the_marks_that_graders_look_for() -> None:
    boxed = limit_answer(f"{LONG}\\boxed{{\\text{{red}}, \\text{{green, blue}}}}", 8)
    assert boxed.texts == ("\\boxed{\\text{red}, \\text}",)
    assert boxed.was_cut
    assert boxed.num_tokens == 13
    sentence = limit_answer(f"{LONG}Therefore, the answer is Paris, {LONG}", 1)
    assert sentence.texts == ("the answer is Paris",)
    assert grade(
        "original_sub_em", f"{LONG} the answer is Paris, {LONG}", ["Paris"], max_tokens=2
    ).value


def test_a_box_that_is_not_closed_is_no_mark() -> None:
    reply = f"\\boxed{{Paris}} {LONG} \\boxed{{Rom"
    assert grade("strict", reply, ["Paris"], max_tokens=20).value == 0.0
    assert len(limit_answer(reply, 20).texts) == 2


@given(st.sampled_from(sorted(GRADERS)), replies, st.integers(1, 40))
def test_a_limited_text_has_no_more_tokens_and_scores_no_higher(
    name: str, reply: str, limit: int
) -> None:
    limited = limit_answer(reply, limit)
    answers = [
        re.sub(r"\\boxed|[{},]|the answer is", "", without_reasoning(text))
        for text in limited.texts
    ]
    assert all(count_tokens(answer) <= limit for answer in answers)
    whole = grade(name, reply, ["Paris"]).value
    assert 0.0 <= grade(name, reply, ["Paris"], max_tokens=limit).value <= whole


def grade_marks(mark: str, repeats: int) -> object:
    return grade("ruler_all", mark * repeats, ["b"], max_tokens=30)


def test_a_reply_of_many_marks_takes_time_of_its_length() -> None:
    for mark in ("\\boxed{", "\\boxed{a}", "the answer is "):
        assert growth(partial(grade_marks, mark), 10_000, 100_000) < 40
