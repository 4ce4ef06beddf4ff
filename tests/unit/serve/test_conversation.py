"""Which part of a conversation is read, and which is the question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent.documents.document import Document
from memagent.serve.reading.requests import (
    MessagePart,
    Utterance,
    as_messages,
    cut_question,
    split_long,
)
from memagent.serve.wire import ApiError

LONG = "word " * 50


def is_short(text: str) -> bool:
    return len(text) <= 40


def said(role: str, *texts: str | Document) -> Utterance:
    pieces = [
        MessagePart(text="", file=text) if isinstance(text, Document) else MessagePart(text=text)
        for text in texts
    ]
    return Utterance(role=role, pieces=tuple(pieces))


def test_files_of_one_name_are_cited_without_an_id() -> None:
    def stored(name: str, file_id: str) -> MessagePart:
        return MessagePart(text="", file=Document.from_text(LONG, name), file_id=file_id)

    parts = (stored("a.txt", "1"), stored("a.txt", "2"), stored("b.txt", "3"))
    asked = [Utterance(role="user", pieces=parts), said("user", "Who?")]
    long = split_long(asked, is_short)
    assert long.file_ids == {"b.txt": "3"}
    assert long.all_file_ids == {"1", "2", "3"}


def test_earlier_messages_are_the_text_and_the_last_one_is_the_question() -> None:
    conversation = [said("user", LONG), said("assistant", "Yes."), said("user", "Who?")]
    long = split_long(conversation, is_short)
    assert long.question == "Who?"
    assert [part.source for part in long.document.parts] == ["user", "assistant"]
    assert LONG in long.document.text


def test_short_instructions_are_part_of_the_question_and_long_ones_of_the_text() -> None:
    conversation = [said("system", "Be brief."), said("user", LONG), said("user", "Who?")]
    assert split_long(conversation, is_short).question == "Be brief.\n\nWho?"
    conversation[0] = said("developer", LONG)
    long = split_long(conversation, is_short)
    assert long.question == "Who?"
    assert [part.source for part in long.document.parts] == ["developer", "user"]


def test_long_parts_and_files_of_the_last_message_are_read() -> None:
    file = Document.from_text("Of a file.", "novel.txt")
    long = split_long([said("user", LONG, file, "Who?", "And when?")], is_short)
    assert long.question == "Who?\nAnd when?"
    assert [part.source for part in long.document.parts] == ["user", "novel.txt"]
    assert "Of a file." in long.document.text


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (f"{LONG}\n\nWho left?", "Who left?"),
        (f"{LONG}\nWho left?", "Who left?"),
        (f"{LONG.strip()}. Who left?", "Who left?"),
        (f"Who left?\n\n{LONG}\n\nThe end.", "Who left?"),
        (f"Summarise this text:\n\n{LONG}\n\nThe end.", "Summarise this text:"),
        (f"A title\n\n{LONG}\n\nTell me who left.", "Tell me who left."),
    ],
)
def test_a_long_message_has_its_question_at_the_end_or_at_the_beginning(
    text: str, question: str
) -> None:
    long = split_long([said("user", text)], is_short)
    assert long.question == question
    assert LONG.strip() in long.document.text
    assert question not in long.document.text


def test_without_a_question_nothing_is_read() -> None:
    for conversation in (
        [said("user", LONG)],
        [said("user", Document.from_text(LONG, "a.txt"))],
        [said("user", " ")],
        [said("user", "Who?")],
    ):
        with pytest.raises(ApiError, match="separate messages") as caught:
            split_long(conversation, is_short)
        assert caught.value.status == 400


def test_a_file_that_fits_stands_under_its_name_in_the_message() -> None:
    file = Document.from_text("Rain.", "diary.txt")
    messages = as_messages([said("developer", "Be brief."), said("user", file, "What?")])
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "===== diary.txt =====\nRain.\n\nWhat?"},
    ]


@given(st.lists(st.text(alphabet="ab?:. \n", min_size=1, max_size=60), min_size=1, max_size=8))
def test_cutting_a_question_loses_no_word(parts: list[str]) -> None:
    text = "\n\n".join(parts)
    question, rest = cut_question(text, is_short)
    assert is_short(question)
    assert sorted(f"{question} {rest}".split()) == sorted(text.split())
