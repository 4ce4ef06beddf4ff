"""Where a section lies: pages, chapters, headings, lines, or else offsets."""

import io
from pathlib import Path

import docx
import pytest

from memagent.documents.document import LINE_BLOCK_CHARS, MAX_HEADINGS, Document, Heading, Place
from memagent.documents.formats import markdown_headings
from memagent.documents.loaders import load, load_bytes
from tests.unit.documents.test_loaders_formats import make_docx, make_epub


def where(document: Document, text: str) -> str:
    """The place of a passage, as people see it."""
    start = document.text.index(text)
    (place,) = document.places(start, start + len(text))
    return str(place)


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["book.txt", "code.py", "server.log", "data.csv", "log.jsonl"])
def test_sections_of_text_and_code_show_their_lines(name: str) -> None:
    document = load_bytes(b"one\ntwo\r\nthree\n\nfive\n", name)
    assert where(document, "two\nthree") == f"{name} lines 2-3"
    assert where(document, "two\n") == f"{name} line 2 [4:8]"
    assert where(document, "\nfive") == f"{name} lines 4-5"


def test_line_numbers_are_those_of_the_text_however_long_it_is() -> None:
    text = "".join(f"line {number}\n" for number in range(1, 30_000))
    assert len(text) > 4 * LINE_BLOCK_CHARS
    document = Document.from_text(text, "a.log", has_lines=True)
    for number in (1, 2, 999, 5461, 5462, 17_000, 29_999):
        start = text.index(f"line {number}\n")
        (place,) = document.places(start, start + 4)
        assert (place.first_line, place.last_line) == (number, number)
    (place,) = document.places(0, len(text))
    assert (place.first_line, place.last_line) == (1, 29_999)


def test_lines_are_counted_in_each_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.py").write_text("first = 1\nsecond = 2\nthird = 3\n")
    document = load([tmp_path / "a.txt", tmp_path / "b.py"])
    assert where(document, "second = 2\nthird").endswith("b.py lines 2-3")


def test_a_string_has_offsets_and_no_lines() -> None:
    document = Document.from_text("It was cold.\nSnow fell.", "weather")
    assert where(document, "Snow") == "weather [13:17]"


# --- headings -------------------------------------------------------------------------------------

MARKDOWN = b"""Before.

# Plan #

Mend the bridge.

```python
# not a heading
```

## Costs

Much.

Later
-----

Nothing.

---

| a | b |
| --- | --- |
"""


def test_markdown_shows_headings_and_lines() -> None:
    document = load_bytes(MARKDOWN, "plan.md")
    assert where(document, "Mend the bridge.") == 'plan.md "Plan" line 5 [19:35]'
    assert where(document, "# Plan #\n\nMend") == 'plan.md "Plan" lines 3-5'
    assert (
        where(document, "not a heading\n```\n\n## Costs") == 'plan.md "Plan" to "Costs" lines 8-11'
    )
    assert where(document, "Before.\n\n# Plan") == 'plan.md up to "Plan" lines 1-3'
    assert where(document, "Before.") == "plan.md line 1 [0:7]"
    assert where(document, "Nothing.\n\n---\n\n| a | b |\n| --- |") == 'plan.md "Later" lines 18-23'
    assert document.text == MARKDOWN.decode()


def test_a_section_that_begins_with_blanks_begins_under_the_heading_after_them() -> None:
    document = load_bytes(MARKDOWN, "plan.md")
    assert where(document, "\n\n## Costs\n\nMuch.") == 'plan.md "Costs" lines 9-13'


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("# A\n## B ##\n###### C", ["A", "B", "C"]),
        ("####### seven\n#none\n#\n#   \n    # code", []),
        ("Title\n=====\n\ntext\n===", ["Title", "text"]),
        ("one\ntwo\n---\n", []),
        ("---\ntitle: x\n---\n\n# A", ["A"]),
        ("> quote\n---\n\n- item\n---", []),
        ("~~~\n# no\n```\n# no\n~~~\n# A", ["A"]),
        ("````\n```\n# no\n````\n# A", ["A"]),
        ("```\n# no\n```python\n# no\n```\n# A", ["A"]),
        ("```inline``` code\n# A", ["A"]),
        ("   # A\n\tx", ["A"]),
    ],
)
def test_headings_of_markdown(text: str, titles: list[str]) -> None:
    assert [heading.title for heading in markdown_headings(text)] == titles


def test_pages_of_html_show_their_headings_and_only_those() -> None:
    page = (
        b"<title>Site</title><h2>Big &amp; <i>blue</i></h2><p>Whales.</p><pre># a comment\n</pre>"
        b"<p># 3 in a list</p><table><tr><td><h3>Cell</h3></td><td>b</td></tr></table><h2>Small</h2><p>Krill."
    )
    document = load_bytes(page, "page.html")
    assert where(document, "# Site") == 'page.html "Site"'
    assert where(document, "Whales.") == 'page.html "Big & blue"'
    assert where(document, "# 3 in a list") == 'page.html "Big & blue"'
    assert where(document, "Krill.") == 'page.html "Small"'
    assert where(document, "Site\n\n## Big") == 'page.html "Site" to "Big & blue"'
    assert where(load_bytes(b"<p>Whales.</p>", "a.html"), "Whales") == "a.html [0:6]"


def test_word_files_show_their_headings() -> None:
    document = load_bytes(make_docx(), "report.docx")
    assert where(document, "Before") == 'report.docx "Results"'
    assert where(document, "Report\n\n## Results") == 'report.docx "Report" to "Results"'
    plain = docx.Document()
    plain.add_paragraph("# not a heading")
    data = io.BytesIO()
    plain.save(data)
    assert where(load_bytes(data.getvalue(), "a.docx"), "heading") == "a.docx [8:15]"


def test_long_titles_are_cut_and_too_many_headings_are_none() -> None:
    place = Place(source="a.md", start=0, end=1, first_heading="T" * 200, last_heading="T" * 200)
    assert str(place) == f'a.md "{"T" * 80}..."'
    headings = [Heading(number, "x") for number in range(MAX_HEADINGS + 1)]
    document = Document.from_text("x" * (MAX_HEADINGS + 1), "a.md", headings=headings)
    assert document.parts[0].headings == ()


# --- chapters -------------------------------------------------------------------------------------

NAV = """<html xmlns:epub="http://www.idpf.org/2007/ops"><body><nav epub:type="landmarks"><a href="x">No</a></nav>
<nav epub:type="toc"><ol><li><a href="text/chapter%20two.xhtml#top">The <i>Storm</i></a></li></ol></nav></body></html>"""
NCX = """<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>
<navPoint><navLabel><text>I.  Loomings</text></navLabel><content src="one.xhtml#a"/></navPoint>
<navPoint><navLabel><text>II. The Carpet-Bag</text></navLabel><content src="one.xhtml#b"/></navPoint>
</navMap></ncx>"""
OLD_PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf" version="2.0"><manifest>
<item id="one" href="one.xhtml" media-type="application/xhtml+xml"/>
<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>
</manifest><spine toc="ncx"><itemref idref="one"/></spine></package>"""
TWO_CHAPTERS = """<html><body><h1>Moby Dick</h1><p>Cover.</p><h2 id="a">I. Loomings</h2><p>Call me Ishmael.</p>
<h3>An aside</h3><p>Some years ago.</p><h2 id="b">II. THE CARPET-BAG</h2><p>I stuffed a shirt.</p></body></html>"""


def test_books_show_chapters_of_their_table_of_contents_else_the_first_heading() -> None:
    book = load_bytes(make_epub({"OPS/toc.xhtml": NAV}), "book.epub")
    assert where(book, "Two.") == 'book.epub "The Storm"'
    assert where(book, "First chapter.") == 'book.epub "One"'
    assert where(book, "Two.\n\n# One") == 'book.epub "The Storm" to "One"'


def test_several_chapters_on_one_page_are_told_apart_by_its_headings() -> None:
    files = {"OPS/book.opf": OLD_PACKAGE, "OPS/toc.ncx": NCX, "OPS/one.xhtml": TWO_CHAPTERS}
    book = load_bytes(make_epub(files), "book.epub")
    assert where(book, "Cover.") == "book.epub [13:19]"
    assert where(book, "Some years ago.") == 'book.epub "I. Loomings"'
    assert where(book, "I stuffed") == 'book.epub "II. THE CARPET-BAG"'


@pytest.mark.parametrize(
    "contents", ["<html", "<html>&nbsp;</html>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>"]
)
def test_a_damaged_table_of_contents_costs_only_the_titles(contents: str) -> None:
    book = load_bytes(make_epub({"OPS/toc.xhtml": contents}), "book.epub")
    assert where(book, "First chapter.") == 'book.epub "One"'
