"""Quotes are found word for word, then without regard to case, white space and typography; else they have no place."""

import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memagent.agent.evidence.quotes import Quote, item_key, locate, place_copies, place_quotes
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


@pytest.mark.parametrize(
    ("said", "text", "found"),
    [
        ("caf\u00e9 noir", "Un cafe\u0301 noir.", "cafe\u0301 noir"),
        ("cafe\u0301", "Un caf\u00e9.", "caf\u00e9"),
        ("don't stop", "We don\u2019t stop.", "don\u2019t stop"),
        ("so-called 'rule'", "A so\u2011called \u2018rule\u2019.", "so\u2011called \u2018rule"),
        ("example", "An ex\u00adam\u200bple.", "ex\u00adam\u200bple"),
        ("ex\u00adample", "An example.", "example"),
        ("wait...", "And wait\u2026 So", "wait\u2026"),
        ("كتاب", "هذا كِتَابٌ جديد", "كِتَابٌ"),
        ("كِتَابٌ", "هذا كتاب جديد", "كتاب"),
        ("שלום", "אמר שָׁלוֹם.", "שָׁלוֹם"),
        ("\u1ead", "x a\u0302\u0323 y", "a\u0302\u0323"),
        ("❤ it", "I ❤\ufe0f it", "❤\ufe0f it"),
    ],
)
def test_typography_does_not_hide_a_quote(said: str, text: str, found: str) -> None:
    span = locate(said, text)
    assert span == (text.index(found), text.index(found) + len(found))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("कि", "यह किताब है"),
        ("किता", "यह किताब है"),
        ("क", "यह कि है"),
        ("كتا", "هذا كِتَاب"),
        ("cafe", "un cafe\u0301"),
        ("ex", "an ex\u00adample"),
        ("Stras", "die Straße"),
        ("ก", "เขากิน"),  # Thai: a vowel stays with its letter
        ("\u1112\u1161", "\u1112\u1161\u11ab"),  # a Korean syllable is not found in another one
        ("\ud558", "\ud55c"),
        ("კარ", "კარგი"),  # Georgian
    ],
)
def test_no_quote_is_a_part_of_a_word(part: str, text: str) -> None:
    assert locate(part, text) is None


@pytest.mark.parametrize(
    ("word", "text"), [("นก", "นกกิน"), ("東京", "東京都に行く"), ("서울", "서울에서")]
)
def test_a_word_is_found_beside_another_where_no_blank_stands_between_them(
    word: str, text: str
) -> None:
    assert locate(word, text) == (0, 2)


def test_the_spelling_of_the_quote_decides_between_places() -> None:
    assert locate("caf\u00e9", "CAF\u00c9 cafe\u0301 caf\u00e9") == (11, 15)


WORDS = {
    "latin": ("c\u00e1fe\u0301", "Stra\u00dfe", "don't", "na\u00efve", "o\u2019clock", "r\u00f4le"),
    "devanagari": ("\u0915\u093f\u0924\u093e\u092c", "\u0915\u093f", "\u0939\u0948", "\u0958\u093c\u0932\u092e"),
    "arabic": ("\u0643\u062a\u0627\u0628", "\u0643\u062a\u0627", "\u0623\u062e", "\u0645\u062f\u0631\u0633\u0629"),
    "vietnamese": ("ti\u1ebfng", "Vi\u1ec7t", "ti", "ph\u1ed1"),
}  # fmt: skip
INVISIBLE = ("\u00ad", "\u200b", "\u200d", "\ufeff")
OTHER_FORMS = {"'": "'\u2019\u02bc", "\u2019": "'\u2019"}


@st.composite
def spellings(draw: st.DrawFn, word: str) -> str:
    """A word in another composition, with other apostrophes, invisible characters and Arabic vowel marks."""
    word = unicodedata.normalize(draw(st.sampled_from(["NFC", "NFD"])), word)
    out = ""
    for number, letter in enumerate(word):
        is_mark = unicodedata.category(letter)[0] == "M"
        if number and not is_mark and draw(st.integers(0, 3)) == 0:
            out += draw(st.sampled_from(INVISIBLE))
        out += draw(st.sampled_from(OTHER_FORMS.get(letter, letter)))
        is_last_part = number + 1 == len(word) or unicodedata.category(word[number + 1])[0] != "M"
        if "\u0620" <= letter <= "\u064a" and is_last_part and draw(st.booleans()):
            out += draw(st.sampled_from("\u064b\u064e\u0650\u0652"))
    return out


@given(st.data())
def test_a_quote_is_found_at_its_place_in_any_spelling(data: st.DataObject) -> None:
    words = data.draw(st.permutations([word for script in WORDS.values() for word in script]))
    text, spans = "", []
    for word in words:
        spelled = data.draw(spellings(word))
        spans.append((len(text), len(text) + len(spelled)))
        text += spelled + data.draw(st.sampled_from([" ", "\n", " \u200b ", ", "]))
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    said = ""
    for number in range(first, last + 1):
        until = spans[number + 1][0] if number < last else spans[number][1]
        said += data.draw(spellings(words[number])) + text[spans[number][1] : until]
    assert locate(said, text) == (spans[first][0], spans[last][1])


@given(st.sampled_from(["devanagari", "arabic", "latin", "vietnamese"]), st.data())
def test_no_part_of_a_word_is_found_in_it(script: str, data: st.DataObject) -> None:
    word = unicodedata.normalize(
        data.draw(st.sampled_from(["NFC", "NFD"])), data.draw(st.sampled_from(WORDS[script]))
    )
    assume("'" not in word and "\u2019" not in word)
    start = data.draw(st.integers(0, len(word) - 1))
    end = data.draw(st.integers(start + 1, len(word)))
    part = word[start:end]
    whole = part == word
    assert locate(part, f"({word})") == ((1, 1 + len(word)) if whole else None)


def test_names_that_differ_in_a_vowel_sign_are_two_items() -> None:
    assert item_key("\u0915\u093f") != item_key("\u0915\u093e")
    assert item_key("caf\u00e9") == item_key("CAFE\u0301")
