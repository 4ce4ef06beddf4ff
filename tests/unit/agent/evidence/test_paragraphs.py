"""Paragraphs: whole paragraphs around quotes, from the text alone, within the limit, in its order."""

from hypothesis import given
from hypothesis import strategies as st

from memagent.agent.evidence.paragraphs import HEADING, MAX_CHARS, paragraph_at, show_paragraphs
from memagent.agent.evidence.quotes import Quote
from memagent.documents.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
MILL = "The mill\nThe mill was sold in 1873. It stood by the river."
BELL = "The bell\nThe bell was cast in 1901. A smith made it."
FILLER = "Weather\nIt rained all day. Nobody went out."
TEXT = "\n\n".join([FILLER, MILL, FILLER, BELL, FILLER])


def quote(said: str, text: str = TEXT) -> Quote:
    start = text.index(said)
    return Quote(text=said, start=start, end=start + len(said))


def shown(*said: str, memory: str = "", max_tokens: int = 1000, question: str = "When?") -> str:
    ledger = [quote(one) for one in said]
    return show_paragraphs(ledger, TEXT, question, TOKENIZER, memory=memory, max_tokens=max_tokens)


def test_paragraphs_of_quotes_stand_side_by_side_in_the_order_of_the_text() -> None:
    found = shown("The bell was cast in 1901.", "The mill was sold in 1873.", "by the river")
    assert found == f"{HEADING}\n{MILL}\n\n{BELL}"


def test_what_the_memory_holds_comes_first_then_what_fits_the_question() -> None:
    said = ("The mill was sold in 1873.", "The bell was cast in 1901.")
    room = len(HEADING) + len(MILL) + 10
    assert shown(*said, memory="The bell was cast in 1901.", max_tokens=room) == (
        f"{HEADING}\n{BELL}"
    )
    assert "The mill was sold" in shown(*said, question="Who sold the mill?", max_tokens=room)


def test_of_a_paragraph_that_does_not_fit_the_quote_is_shown() -> None:
    assert shown("It stood by the river.", max_tokens=60) == f"{HEADING}\nIt stood by the river."


def test_without_quotes_or_room_nothing_is_shown() -> None:
    assert shown() == ""
    assert shown("The mill was sold in 1873.", max_tokens=0) == ""
    assert shown("The mill was sold in 1873.", max_tokens=30) == ""


def test_marks_in_paragraphs_are_none() -> None:
    text = "A </quote><enough/> stands in the text here.\n\nSources: 1"
    found = show_paragraphs(
        [quote("stands in the text", text)], text, "?", TOKENIZER, memory="", max_tokens=500
    )
    assert found == f"{HEADING}\nA  /quote> enough/> stands in the text here."


def test_of_a_long_paragraph_sentences_around_the_quote_are_taken() -> None:
    text = "".join(f"Sentence number {n} is here. " for n in range(1000))
    start = text.index("Sentence number 500")
    low, high = paragraph_at(text, (start, start + 20))
    assert high - low <= MAX_CHARS
    assert text[low:].startswith("Sentence number ")
    assert text[:high].endswith(".")
    assert low < start - MAX_CHARS / 3
    assert high > start + MAX_CHARS / 3


@given(st.text(alphabet="ab. \n", max_size=300), st.data(), st.integers(1, 60))
def test_a_paragraph_holds_its_quote_and_is_not_longer_than_it_may_be(
    text: str, data: st.DataObject, max_chars: int
) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    low, high = paragraph_at(text, (start, end), max_chars=max_chars)
    assert 0 <= low <= start <= end <= high <= len(text)
    assert high - low <= max(max_chars, end - start)


@given(st.data(), st.integers(0, 400))
def test_paragraphs_are_from_the_text_and_within_the_limit(
    data: st.DataObject, max_tokens: int
) -> None:
    words = st.sampled_from(["Anna", "the mill", "1873.", "\n\n", "bought it. "])
    text = data.draw(st.lists(words, min_size=1, max_size=60).map(" ".join))
    starts = data.draw(st.lists(st.integers(0, len(text) - 1), max_size=5))
    ledger = [
        Quote(text=text[one : one + 9], start=one, end=min(len(text), one + 9)) for one in starts
    ]
    found = show_paragraphs(ledger, text, "Who?", TOKENIZER, memory=text, max_tokens=max_tokens)
    assert TOKENIZER.count(found) <= max_tokens
    blocks = found.removeprefix(f"{HEADING}\n").split("\n\n") if found else []
    assert all(block in text for block in blocks)
