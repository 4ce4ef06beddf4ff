"""Extraction of answers, and the three ways to write one down for comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent.agent.memory import split_reasoning
from memagent.rewards.text import (
    answer_candidates,
    answer_key,
    last_boxed,
    squad_key,
    strict_key,
    unboxed,
    without_reasoning,
    words_of,
)
from tests.support.timing import growth

any_text = st.text(max_size=60)
ascii_text = st.text(st.characters(codec="ascii"), max_size=60)
latex = st.lists(
    st.sampled_from(
        [*"\\!,;:{} $%^°ab1.", r"\left", r"\right", r"\tfrac", r"\text{", r"\circ", "\\l", "eft"]
    ),
    max_size=14,
).map("".join)
numbers = st.lists(st.sampled_from([*"0123456789,.- +#a'\u202f\u2212"]), max_size=12).map("".join)


# --- laws -----------------------------------------------------------------------------------------


@given(st.one_of(any_text, ascii_text, latex, numbers))
def test_keys_of_keys_are_the_same_keys(text: str) -> None:
    assert strict_key(strict_key(text)) == strict_key(text)
    assert squad_key(squad_key(text)) == squad_key(text)
    assert answer_key(answer_key(text)) == answer_key(text)


@given(st.one_of(any_text, numbers))
def test_an_answer_that_says_something_has_a_key(text: str) -> None:
    assert answer_key(text) or not any(map(str.isalnum, text))
    assert answer_key(" \n") == ""


@given(ascii_text)
def test_case_and_outer_space_never_count(text: str) -> None:
    for key in (strict_key, squad_key, answer_key):
        assert key(text) == key(text.upper()) == key(f"  {text}\n")


@given(st.integers(min_value=0, max_value=10**12))
def test_thousands_separators_never_count(number: int) -> None:
    assert answer_key(f"{number:,}") == answer_key(str(number)) == str(number)
    assert answer_key(f"{number:,}".replace(",", "\u202f")) == str(number)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<b>", "x "]), max_size=8))
def test_reasoning_is_cut_as_the_reader_cuts_it(parts: list[str]) -> None:
    text = "".join(parts)
    assert without_reasoning(text) == split_reasoning(text).text


@given(st.text(st.characters(exclude_characters="{}\\", codec="utf-8"), max_size=40))
def test_what_is_boxed_comes_out_again(content: str) -> None:
    assert last_boxed(f"so \\boxed{{{content}}} it is") == content
    assert last_boxed(f"\\boxed{{other}} \\boxed{{f{{{content}}}}}") == f"f{{{content}}}"


@given(st.one_of(any_text, latex))
def test_a_candidate_is_part_of_the_reply_and_never_blank(reply: str) -> None:
    for candidate in answer_candidates(reply):
        assert candidate.strip()
        assert candidate in reply


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{{a}{b}}", "{a}{b}"),
        (r"\fbox{a}", "a"),
        (r"\boxed 42 $ and more", "42"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        (r"\boxedness{a}", None),
        (r"\boxed{a}\boxed{b", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_found(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("the **Café** — Paris (1,200.0)", "cafe paris 1200"),
        ("1,2000", "1 2000"),
        ("1,200,3000", "1 200 3000"),
        ("12,345, 6", "12345 6"),
        ("The", "the"),
        ("!", "!"),
        ("U.S.A.", "usa"),
        ("C#", "c#"),
        ("1.2.3", "1.2.3"),
        ("2019-2020", "2019 2020"),
        ("\u22125", "-5"),
        ("50 %", "50 percent"),
        ("\uff15,\uff10\uff10\uff10", "5000"),
        ("ﬁne", "fine"),
        ("हिन्दी", "हिन्दी"),
        ("東京。", "東京"),
        ("한국어!", "한국어"),
        (r"\textbf{New York}", "new york"),
        (r"\frac{1}{2}", "1 2"),
        ("twelve", "12"),
        ("one of them", "one of them"),
    ],
)
def test_answer_keys(text: str, key: str) -> None:
    assert answer_key(text) == key


def test_words_keep_articles_and_numbers_whole() -> None:
    assert words_of("The cost: $3.50, or -1.0 (a loss)") == [
        *("the", "cost", "3.5", "or", "-1", "a", "loss")
    ]


@pytest.mark.parametrize(
    ("reply", "candidates"),
    [
        ("The answer is St. Louis. So it is.", ("St. Louis. So it is.", "St")),
        ("**Answer:** Paris", ("Paris",)),
        ("The answer isn't here", ("The answer isn't here",)),
        ("Answer:\nParis\nRome", ("Paris",)),
        ("The answer is", ("The answer is",)),
        ("a\nb", ("a\nb", "b")),
        ("<think>hm</think>", ()),
        (r"\boxed{ }", ()),
        ("", ()),
    ],
)
def test_candidates(reply: str, candidates: tuple[str, ...]) -> None:
    assert answer_candidates(reply) == candidates


def test_the_cost_of_unclosed_tags_grows_with_their_number_and_no_faster() -> None:
    assert without_reasoning("a" + "<think>" * 50_000) == "a"
    assert last_boxed(r"\boxed{" * 50_000) is None
    assert growth(lambda num: without_reasoning("a" + "<think>" * num), 40_000, 320_000) < 32
    assert growth(lambda num: last_boxed(r"\boxed{" * num), 40_000, 320_000) < 32


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\boxed{Ada Holm}", "Ada Holm"),
        (" \\boxed{x_{1}}\n", "x_{1}"),
        (r"It is \boxed{7}.", r"It is \boxed{7}."),
        (r"\boxed{1} \boxed{2}", r"\boxed{1} \boxed{2}"),
        (r"\boxed{}", r"\boxed{}"),
        (r"\boxed{7", r"\boxed{7"),
        (r"$\boxed{\text{Ada Holm}}$.", "Ada Holm"),
        ("plain", "plain"),
    ],
)
def test_a_box_around_the_whole_text_is_removed(text: str, plain: str) -> None:
    assert unboxed(text) == plain


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"The memory says so: it is \boxed{Ada Holm}, the miller.", "Ada Holm"),
        ("First \\boxed{3}.\nNo, it is $\\boxed{4}$.", "4"),
        (r"They are \boxed{red} and \boxed{blue}, not \boxed{red}.", "red, blue"),
        (r"\boxed{\text{Ada Holm}}", "Ada Holm"),
        (r"It grew by \boxed{5\%}", "5%"),
        ("\\boxed{a list:\none}", "a list:\none"),
        (r"Nothing is in \boxed{}", r"Nothing is in \boxed{}"),
        (r"It is \boxed{7", r"It is \boxed{7"),
        ("It is red.", "It is red."),
    ],
)
def test_of_a_reply_that_was_asked_for_a_box_the_box_is_the_answer(reply: str, answer: str) -> None:
    assert unboxed(reply, is_asked=True) == answer
