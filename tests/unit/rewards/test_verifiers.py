"""Laws that hold for the graders, and the measures under them."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memagent.errors import ConfigError, DataError
from memagent.rewards.metrics import MAX_WORDS, is_enumeration, is_stated, says_unknown, token_f1
from memagent.rewards.text import squad_key
from memagent.rewards.verifiers import GRADERS, Match, grade
from tests.support.timing import growth

FIRST_ANSWER_ONLY = ("original_sub_em", "original_sub_em_boxed")
names = st.sampled_from(sorted(GRADERS))
matches: st.SearchStrategy[Match] = st.sampled_from(("any", "all"))
pieces = st.sampled_from(
    [
        *("Paris", "London", "not ", "the ", ", ", " and ", "\n", ". ", "12", "1,200", "é", "no"),
        *(r"\boxed{", "}", "<think>", "</think>", "The answer is ", "*", "$", "yes", "unknown"),
    ]
)
replies = st.one_of(st.text(max_size=50), st.lists(pieces, max_size=10).map("".join))
golds = st.one_of(
    st.sampled_from(["Paris", "the Seine", "12", "yes", "Paris, France", "A", " ", "1,200"]),
    st.text(max_size=12),
)
answer_lists = st.lists(golds, min_size=1, max_size=4)


# --- laws -----------------------------------------------------------------------------------------


@given(names, replies, answer_lists, matches)
def test_a_score_lies_between_0_and_1_and_says_why(
    name: str, reply: str, answers: list[str], match: Match
) -> None:
    score = grade(name, reply, answers, match)
    assert 0.0 <= score.value <= 1.0
    assert score.reason
    assert score.extracted is not None or score.value == 0.0


@given(names, replies, answer_lists, matches, st.randoms())
def test_the_order_of_accepted_answers_does_not_count(
    name: str, reply: str, answers: list[str], match: Match, rng: random.Random
) -> None:
    assume(name not in FIRST_ANSWER_ONLY)
    shuffled = list(answers)
    rng.shuffle(shuffled)
    value = grade(name, reply, answers, match).value
    assert grade(name, reply, shuffled, match).value == pytest.approx(value, abs=1e-12)


@given(names, replies, answer_lists, golds)
def test_another_accepted_answer_never_lowers_a_score(
    name: str, reply: str, answers: list[str], more: str
) -> None:
    assume(name not in ("recall", "ruler_all"))  # they always ask for all
    assert grade(name, reply, [*answers, more]).value >= grade(name, reply, answers).value


@given(st.sampled_from(["recall", "ruler_all", "ruler_part"]), replies, answer_lists, replies)
def test_saying_more_never_lowers_what_was_found(
    name: str, reply: str, answers: list[str], more: str
) -> None:
    assume("<" not in reply + more)
    longer = f"{reply}\n{more}"
    before = grade(name, reply, answers).value
    # a number that goes on, or initials, may read differently when more follows
    assume(not more[:1].isdigit() and reply[-1:] not in ".,-+#")
    assert grade(name, longer, answers).value >= before


@given(st.sampled_from(["strict", "lenient", "exact", "f1", "contains"]), golds)
def test_an_accepted_answer_in_a_box_is_right(name: str, gold: str) -> None:
    assume(gold.strip() and not set(gold) & set("\\{}<"))
    assume(gold.isprintable() and (name not in ("exact", "f1") or squad_key(gold)))
    assume(name != "strict" or gold.strip("$%° "))
    assert grade(name, f"So it is \\boxed{{{gold}}}.", [gold]).value == 1.0


@given(replies, answer_lists)
def test_containment_accepts_what_is_equal(reply: str, answers: list[str]) -> None:
    lenient, contains = grade("lenient", reply, answers), grade("contains", reply, answers)
    if lenient.value == 1.0 and lenient.extracted == contains.extracted:
        assert contains.value == 1.0


@given(replies)
def test_a_stated_answer_is_there_and_is_lost_when_it_is_denied(reply: str) -> None:
    if grade("contains", reply, ["Paris"]).value == 1.0:
        assert "paris" in reply.lower()
    assert grade("contains", reply.replace("Paris", " not Paris"), ["Paris"]).value == 0.0


@given(names, answer_lists, matches)
def test_silence_is_never_right(name: str, answers: list[str], match: Match) -> None:
    reasoning = "<think>Paris, the Seine, 12 yes A"
    for reply in ("", "  \n", *([] if name == "original_contains" else [reasoning])):
        assert grade(name, reply, answers, match).value == 0.0
    if name in ("strict", "lenient", "exact", "f1", "contains"):
        assert grade(name, r"\boxed{} Paris", answers, match).value == 0.0


@given(st.text(max_size=30), st.text(max_size=30))
def test_f1_is_symmetric_and_1_only_for_the_same_words(one: str, other: str) -> None:
    value = token_f1(one, other)
    assert value == token_f1(other, one)
    assert (value == 1.0) == (
        sorted(squad_key(one).split()) == sorted(squad_key(other).split()) != []
    )


# --- values ---------------------------------------------------------------------------------------


def test_the_box_must_begin_within_the_last_300_characters() -> None:
    box = r"\boxed{Paris}"
    assert grade("strict", box + "." * (300 - len(box)), ["Paris"]).value == 1.0
    assert grade("strict", box + "." * (301 - len(box)), ["Paris"]).value == 0.0


def test_a_long_text_with_the_answer_in_it_is_no_answer() -> None:
    short = "word " * (MAX_WORDS - 1) + "Paris"
    assert is_stated(short, "Paris")
    assert not is_stated(f"word {short}", "Paris")


def test_a_denied_answer_counts_where_it_is_stated_again() -> None:
    assert not is_stated("It was never in Paris", "Paris")
    assert is_stated("It was never in London. It was in Paris, in Paris alone.", "Paris")
    assert is_stated("Some say it is not Paris. I say Paris.", "Paris")
    assert is_stated("It was not until 1900 that Paris won.", "Paris")
    assert not is_stated("London rather than Paris", "Paris")
    assert not is_stated("Paris would be wrong", "Paris")
    assert not is_stated("The text does not tell whether it is Paris", "Paris")


def test_many_short_items_are_guesses_but_long_clauses_are_not() -> None:
    assert is_enumeration("a, b, c, d, e, f")
    assert not is_enumeration("a, b, c, d, e")
    assert not is_enumeration("a, b, c, d, e, f", num_golds=6)
    assert is_enumeration("1) Rome\n2) Oslo\n3) Bern\n4) Riga\n5) Kyiv\n6) Paris")
    assert not is_enumeration("a, b, and then he went home again, c, d, e")


@pytest.mark.parametrize(
    "reply",
    [
        "The text does not tell.",
        "I don't know.",
        "It isn't mentioned in the passage.",
        "There is no information about this.",
        "The answer cannot be determined from the text.",
        "Not enough information",
        "The context doesn\u2019t say who won.",
        "N/A",
        r"\boxed{unknown}",
        "However, the answer is not in the memory.",
        "<think>Paris?</think>It remains unknown.",
    ],
)
def test_saying_that_it_is_unknown_is_heard(reply: str) -> None:
    assert grade("unanswerable", reply, []).value == 1.0


@pytest.mark.parametrize(
    "reply",
    [
        "Paris",
        "He did not find gold.",
        "It was not built by John.",
        "No Country for Old Men",
        "The passage does not say, but it was Anna.",
        "Unknown Pleasures",
        "The answer is unknown to many; however it is Paris",
        "",
    ],
)
def test_an_answer_is_not_taken_for_unknown(reply: str) -> None:
    assert not says_unknown(reply)
    assert grade("unanswerable", reply, ["x"]).value == 0.0


def test_an_unknown_grader_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="there is no grader 'lenien'; did you mean lenient\\?"):
        grade("lenien", "x", ["x"])
    with pytest.raises(ConfigError, match="known: strict, lenient"):
        grade("zzz", "x", ["x"])


def test_one_string_and_no_answers_are_refused() -> None:
    with pytest.raises(DataError, match="not one string"):
        grade("lenient", "P", "Paris")
    with pytest.raises(DataError, match="the grader is unanswerable"):
        grade("lenient", "P", [])


def test_reasons_name_what_was_met_and_stay_short() -> None:
    long = "x" * 200
    score = grade("lenient", long, ["Paris", long])
    assert score.reason == f"is {'x' * 57 + '...'!r}"
    assert grade("recall", "4 and 5", ["4", "5", "6"], "all").reason == "2 of 3 found"
    assert grade("contains", "a, b, c, d, e, f", ["f1"]).reason == "a list of guesses"


@pytest.mark.parametrize("name", sorted(GRADERS))
def test_the_cost_of_grading_grows_with_the_reply_and_no_faster(name: str) -> None:
    def work(num_sentences: int) -> None:
        text = "The house went to her in 1898. " * num_sentences
        grade(name, text + r"So the answer is \boxed{Hedda Sunde}.", ["Hedda Sunde", "Sunde"])

    assert growth(work, 1_000, 8_000) < 32
