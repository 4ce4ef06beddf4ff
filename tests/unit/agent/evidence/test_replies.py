"""Replies with quotes, items and marks; whatever a model writes can be used."""

import pytest

from memagent.agent.evidence.quotes import Quote
from memagent.agent.evidence.replies import ReplyFormat, parse_reply, shielded

QUOTES = ReplyFormat(quotes=True, stop=True)
ITEMS = ReplyFormat(items=True)


def test_quotes_and_marks_are_taken_out_of_the_memory() -> None:
    parsed = parse_reply("<quote>A b.</quote>\n<QUOTE> C. </QUOTE>\nNote.\n<enough/>", QUOTES)
    assert parsed.memory == "Note."
    assert [quote.text for quote in parsed.quotes] == ["A b.", "C."]
    assert (parsed.says_enough, parsed.is_malformed) == (True, False)


def test_a_reply_without_marks_is_the_memory() -> None:
    parsed = parse_reply("Just a memory, 3 < 4.", QUOTES)
    assert parsed == ("Just a memory, 3 < 4.", (), False, False)


def test_marks_of_other_formats_are_memory() -> None:
    assert parse_reply("a <quote>b</quote> <enough/>", ReplyFormat()).memory == (
        "a <quote>b</quote> <enough/>"
    )
    assert parse_reply("a <enough/>", ReplyFormat(quotes=True)).memory == "a <enough/>"
    assert not parse_reply("a <enough/>", ReplyFormat(quotes=True)).says_enough


@pytest.mark.parametrize(
    ("reply", "quotes", "memory"),
    [
        ("<quote>Cut off", ["Cut off"], ""),
        ("<quote>No end.\nThe memory.", ["No end."], "The memory."),
        ("<quote>One.\n<quote>Two.</quote>\nMemory.", ["One.", "Two."], "Memory."),
        ("Memory.</quote>", [], "Memory."),
        ("<quote>One.</item> Memory.", ["One."], "Memory."),
    ],
)
def test_a_malformed_reply_is_used_as_far_as_possible_and_counted(
    reply: str, quotes: list[str], memory: str
) -> None:
    parsed = parse_reply(reply, QUOTES)
    assert [quote.text for quote in parsed.quotes] == quotes
    assert parsed.memory == memory
    assert parsed.is_malformed


def test_a_mark_inside_a_quote_does_not_stop_the_reading() -> None:
    parsed = parse_reply("<quote>Say <enough/> now.</quote> Memory.", QUOTES)
    assert not parsed.says_enough
    assert parsed.quotes == (Quote(text="Say <enough/> now."),)


def test_items_have_a_name_a_value_and_a_quote() -> None:
    parsed = parse_reply(
        "<item>Ada | 14 | Ada sold 14 | or so.</item><item>Otto | | Otto came.</item>"
        "<item>Eve | Eve came.</item>",
        ITEMS,
    )
    assert parsed.quotes == (
        Quote(text="Ada sold 14 | or so.", item="Ada", value="14"),
        Quote(text="Otto came.", item="Otto"),
        Quote(text="Eve came.", item="Eve"),
    )
    assert not parsed.is_malformed


def test_an_item_without_a_name_is_a_quote_and_counted_as_malformed() -> None:
    parsed = parse_reply("<item>Ada came.</item>", ITEMS)
    assert parsed.quotes == (Quote(text="Ada came."),)
    assert parsed.is_malformed


def test_the_memory_may_be_wrapped_as_in_the_prompt() -> None:
    parsed = parse_reply("<quote>A.</quote><memory>\nIt is A.\n</memory>", QUOTES)
    assert (parsed.memory, parsed.is_malformed) == ("It is A.", False)


def test_marks_of_a_text_are_none_in_a_prompt_and_every_character_keeps_its_place() -> None:
    text = "a </quote><enough/> b < /item> <Think> <section> 3 < 4 <quoted>"
    shown = shielded(text)
    assert shown == "a  /quote> enough/> b   /item>  Think>  section> 3 < 4 <quoted>"
    assert len(shown) == len(text)


def test_many_open_marks_are_parsed_in_linear_time() -> None:
    parsed = parse_reply("<quote>" * 50_000, QUOTES)
    assert (parsed.memory, parsed.quotes, parsed.is_malformed) == ("", (), True)
