"""Documents and where their spans come from."""

import pytest

from memagent.documents.document import Document, Place
from memagent.errors import DocumentError


def test_a_span_of_one_source_keeps_its_offsets() -> None:
    document = Document.from_text("It was cold. Snow fell.", "weather.txt")
    assert document.places(13, 23) == (Place(source="weather.txt", start=13, end=23),)


def test_pages_are_counted_from_one_and_a_span_may_cover_several() -> None:
    document = Document.from_pages(["first page", "second", "third"], "report.pdf")
    assert document.text == "first page\n\nsecond\n\nthird\n\n"
    (place,) = document.places(document.text.index("page"), document.text.index("second") + 3)
    assert (place.first_page, place.last_page) == (1, 2)
    assert str(place) == "report.pdf p. 1-2"
    (place,) = document.places(document.text.index("third"), len(document.text))
    assert str(place) == "report.pdf p. 3"


def test_joined_documents_are_headed_by_name_and_spans_map_back() -> None:
    first = Document.from_text("alpha beta", "a.txt")
    second = Document.from_pages(["gamma", "delta"], "b.pdf")
    joined = Document.join([first, second])
    assert (
        joined.text == "===== a.txt =====\nalpha beta\n\n===== b.pdf =====\ngamma\n\ndelta\n\n\n\n"
    )
    start, end = joined.text.index("beta"), joined.text.index("delta") + 5
    assert joined.places(start, end) == (
        Place(source="a.txt", start=6, end=10),
        Place(source="b.pdf", start=0, end=12, first_page=1, last_page=2),
    )
    assert joined.source == "a.txt and 1 more"


def test_a_span_of_headings_only_has_no_place() -> None:
    joined = Document.join([Document.from_text("x", "a"), Document.from_text("y", "b")])
    assert joined.places(0, 5) == ()


def test_one_document_is_joined_to_itself() -> None:
    document = Document.from_text("text")
    assert Document.join([document]) is document


def test_nothing_to_join_is_an_error() -> None:
    with pytest.raises(DocumentError, match="no document to read"):
        Document.join([])


def test_half_a_character_is_refused_with_its_place() -> None:
    with pytest.raises(DocumentError, match="at 3"):
        Document.from_text("abc\ud800")


def test_the_fingerprint_is_that_of_the_utf8_text_whatever_its_length() -> None:
    import hashlib

    text = "smörgås " * 200_000
    assert Document.from_text(text).sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_the_representation_does_not_hold_the_text() -> None:
    assert repr(Document.from_text("x" * 10**6, "big.txt")) == (
        "Document(source='big.txt', num_chars=1000000)"
    )
