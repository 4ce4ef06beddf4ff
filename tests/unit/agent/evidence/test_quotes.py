"""Quotes are found word for word, then without regard to case and white space; else they have no place."""

import pytest

from memagent.agent.evidence.quotes import Quote, locate, place_copies, place_quotes
from memagent.documents.document import Document

SECTION = "Once upon a time.\nThe House  is\nred, and Anna   owns it. The end."


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("Once upon a time.", "Once upon a time."),
        ('"Once upon a time."', "Once upon a time."),
        ("the house is red", "The House  is\nred"),
        ("\u201cANNA OWNS IT\u201d", "Anna   owns it"),
        ("owns\n\nit. the end", "owns it. The end"),
        ("the end.\u00a0", "The end."),
    ],
)
def test_a_quote_is_found_as_the_text_has_it(said: str, found: str) -> None:
    span = locate(said, SECTION)
    assert span is not None
    assert SECTION[slice(*span)] == found


@pytest.mark.parametrize(
    "said", ["The house is blue", "", "...", '""', "Once upon a time. The end"]
)
def test_what_the_text_does_not_have_is_nowhere(said: str) -> None:
    assert locate(said, SECTION) is None


def test_letters_that_grow_in_lower_case_keep_their_place() -> None:
    assert locate("strasse nine", "İ Die Straße  NINE") == (6, 18)


def test_a_found_quote_has_the_words_lines_and_offsets_of_the_document() -> None:
    document = Document.from_text("Head.\n" + SECTION, source="a.txt", has_lines=True)
    (quote,) = place_quotes([Quote(text="the HOUSE")], document, start=6, section=SECTION)
    assert (quote.text, quote.span) == ("The House", (24, 33))
    assert [str(place) for place in quote.places] == ["a.txt line 3 [24:33]"]


def test_a_quote_that_is_not_found_keeps_the_models_words_and_no_place() -> None:
    document = Document.from_text(SECTION)
    (quote,) = place_quotes([Quote(text="never said")], document, start=0, section=SECTION)
    assert quote == Quote(text="never said")
    assert not quote.is_found


LOG = "disk full\nall well\nDisk  full\ndisk full, again\n"


def spans(*said: Quote) -> list[tuple[int, int]]:
    document = Document.from_text("Head.\n" + LOG)
    placed = place_quotes(said, document, start=6, section=LOG)
    return [(quote.span[0] - 6, quote.span[1] - 6) for quote in placed]


def test_what_is_said_again_is_at_its_next_place_as_long_as_there_is_one() -> None:
    fault = Quote(text="disk full", item="fault")
    assert spans(fault, fault, fault, fault) == [(0, 9), (19, 29), (30, 39), (0, 9)]


def test_several_items_of_one_sentence_are_at_one_place() -> None:
    said = [Quote(text="disk full", item=name) for name in ("fault", "disk", "The fault")]
    assert spans(*said) == [(0, 9), (0, 9), (19, 29)]


def test_what_a_memory_copied_from_its_section_are_quotes() -> None:
    document = Document.from_text("Head. " + SECTION)
    memory = (
        "Something else entirely, said before.\nThe mill: the House is red, and Anna owns it.\n"
        "Anna owns it. Once upon a time. So it began long ago."
    )
    found = place_copies(memory, document, start=6, section=SECTION)
    assert [quote.text for quote in found] == [
        "The House  is\nred, and Anna   owns it.",
        "Once upon a time.",
    ]
    assert all(quote.is_inferred for quote in found)


TOWN = (
    "Ann Lee came home in 1871.\n\nIn Norgate, the post of mayor is held\nby Ann Lee. Ann Lee owns 12 boats. "
    "Ann Lee was seen in Norgate."
)


@pytest.mark.parametrize(
    ("note", "sentence"),
    [
        ("The mayor of Norgate is Ann Lee.", "In Norgate, the post of mayor is held\nby Ann Lee."),
        ("Number of boats of Ann Lee: 12", "Ann Lee owns 12 boats."),
        ("The boats of Ann Lee: 13", None),  # another number
        ("The mayor of Norgate is Bo Lee.", None),  # another name
        ("Ann Lee sings, dances, paints and juggles.", None),  # too few of its words
        ("the post of a mayor held by somebody", None),  # no name
        ("Norgate: Lee", None),  # too short
    ],
)
def test_a_note_in_other_words_is_a_quote_of_the_sentence_with_its_names_and_numbers(
    note: str, sentence: str | None
) -> None:
    document = Document.from_text("Head. " + TOWN)
    found = place_copies(note, document, start=6, section=TOWN)
    assert [quote.text for quote in found] == ([sentence] if sentence else [])
    assert all(document.text[slice(*quote.span)] == quote.text for quote in found)
    assert all(quote.is_inferred for quote in found)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("art", None),
        ("red", "red"),
        ("The party was in Ma", "The party was in May"),
        ("he PARTY was  in May", "The party was in May"),
        ("in 187", None),
        ("sold it in 187", "sold it in 1871"),
        ("\u6771\u4eac\u306b", "\u6771\u4eac\u306b"),
    ],
)
def test_a_quote_has_whole_words(said: str, found: str | None) -> None:
    section = (
        "The party was in May. Hundred, and red. He sold it in 1871. \u6771\u4eac\u306b\u884c\u304f"
    )
    span = locate(said, section)
    assert (span and section[slice(*span)]) == found
