"""Formats, one by one: the exact text they give, what they refuse, and how they bear damage."""

import gzip
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import docx
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from fpdf import FPDF
from fpdf.enums import AccessPermission, EncryptionMethod

from memagent.documents.document import Document
from memagent.documents.formats.raw import RawFile, open_zip
from memagent.documents.loaders import load_bytes
from memagent.errors import DocumentError


def refusal(data: bytes, source: str) -> str:
    """The message with which data is refused; always one line."""
    with pytest.raises(DocumentError) as caught:
        load_bytes(data, source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def html(markup: str) -> str:
    return load_bytes(markup.encode(), "page.html").text


# --- HTML -----------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html><head><title>Whales &mdash; a page</title><style>p { color: red }</style></head>
<body>
<nav><a href="/">Home</a></nav><div role="navigation">Menu</div>
<script>track("<p>not text</p>");</script>
<!-- a comment -->
<h2>Big &amp; blue</h2>
<p>A <a href="whale.html">blue   whale</a>
weighs&nbsp;150&#32;tons<sup>1</sup>.<br>It eats <b>krill</b>.</p>
<ul><li>krill</li><li>more <i>krill</i><li></ul>
<div>one</div><div>two</div>
<p hidden>unseen</p><button>Press</button><noscript>Enable scripts</noscript>
<table><tr><th>Name<th>Length</tr><tr><td>Blue</td><td><p>30&nbsp;m</p></td></tr><tr></tr></table>
<pre>def f():
    return 1
</pre>
<p>End.
</body></html>"""


def test_a_page_becomes_its_readable_text() -> None:
    assert html(PAGE) == (
        "# Whales \u2014 a page\n\n## Big & blue\n\n"
        "A blue whale weighs 150 tons1.\nIt eats krill.\n\n"
        "- krill\n- more krill\n\none\ntwo\n\n"
        "Name | Length\nBlue | 30 m\n\n"
        "def f():\n    return 1\n\nEnd."
    )


def test_the_title_is_not_repeated() -> None:
    assert html("<title>Whales | Site</title><h1>Whales</h1><p>Big.") == "# Whales\n\nBig."


def test_a_table_that_arranges_a_page_is_not_squeezed_into_lines() -> None:
    page = "<table><tr><td>Menu</td><td><p>{}</p><p>Second.</p></td></tr></table>"
    long = "It rains. " * 20
    assert html(page.format(long)) == f"Menu\n{long.strip()}\n\nSecond."
    assert html(page.format("First.")) == "Menu | First. Second."


def test_a_table_in_a_table_keeps_its_rows() -> None:
    inner = "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>"
    assert html(f"<table><tr><td>{inner}</td></tr></table>") == "a | b\nc | d"


def test_broken_markup_is_read_as_far_as_it_makes_sense() -> None:
    assert html("<p>one<p>two<td>three<li>four</div></b> &bogus; <![x") == (
        "one\n\ntwo\n\nthree\n- four &bogus;"
    )


def test_deep_nesting_is_no_trouble() -> None:
    assert html("<div>" * 5000 + "deep" + "</div>" * 5000) == "deep"


def test_the_encoding_a_page_declares_is_believed_unless_it_is_utf8() -> None:
    text = "Ελλάδα και Κύπρος"
    declared = '<meta charset="iso-8859-7"><p>' + text
    assert load_bytes(declared.encode("iso-8859-7"), "a.htm").text == text
    assert load_bytes(declared.encode("utf-8"), "a.htm").text == text
    old = '<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1"><p>\u201cquoted\u201d'
    assert load_bytes(old.encode("cp1252"), "a.htm").text == "\u201cquoted\u201d"


def test_a_page_without_text_is_refused() -> None:
    assert "holds no text" in refusal(b"<html><body><script>x()</script></body></html>", "a.html")


# --- PDF ------------------------------------------------------------------------------------------


def make_pdf(*pages: str, password: str | None = None, owner: str | None = None) -> bytes:
    pdf = FPDF()
    pdf.set_font("Helvetica", size=12)
    if owner is not None:
        pdf.set_encryption(
            owner_password=owner,
            user_password=password,
            encryption_method=EncryptionMethod.RC4,
            permissions=AccessPermission.none(),
        )
    for page in pages:
        pdf.add_page()
        pdf.multi_cell(0, text=page)
    return bytes(pdf.output())


def test_a_sentence_knows_the_page_it_stands_on() -> None:
    document = load_bytes(make_pdf("Call me Ishmael.", "", "The whale is white."), "moby.pdf")
    start = document.text.index("The whale")
    (place,) = document.places(start, start + len("The whale is white."))
    assert str(place) == "moby.pdf p. 3"
    assert str(document.places(0, len(document.text))[0]) == "moby.pdf p. 1-3"
    assert document.text == "Call me Ishmael.\n\n\n\nThe whale is white.\n\n"


def test_pages_are_kept_when_a_pdf_is_joined_with_other_files() -> None:
    pdf = load_bytes(make_pdf("One.", "Two."), "a.pdf")
    document = Document.join([load_bytes(b"Before.", "b.txt"), pdf])
    start = document.text.index("Two.")
    assert str(document.places(start, start + 4)[0]) == "a.pdf p. 2"


def test_a_pdf_is_known_by_its_first_bytes() -> None:
    assert load_bytes(make_pdf("Text."), "stdin").text == "Text.\n\n"
    assert load_bytes(gzip.compress(make_pdf("Text.")), "download.bin").text == "Text.\n\n"


def test_a_pdf_locked_only_against_changes_is_read() -> None:
    assert load_bytes(make_pdf("Open.", owner="owner"), "a.pdf").text == "Open.\n\n"


def test_a_pdf_with_a_password_is_refused() -> None:
    message = refusal(make_pdf("Closed.", owner="owner", password="secret"), "a.pdf")
    assert message.startswith("a.pdf is protected by a password; save an unprotected copy")


def make_aes_pdf() -> bytes:
    """A pdf in AES-256 by hand, since making and reading one takes a library that may be missing."""
    keys = " ".join(f"/{user} <{'00' * 48}> /{user}E <{'00' * 32}>" for user in "OU")
    objects = [
        "<</Type /Catalog /Pages 2 0 R>>",
        "<</Type /Pages /Count 0 /Kids []>>",
        f"<</Filter /Standard /V 5 /R 6 /Length 256 /P -4 {keys}"
        f"/Perms <{'00' * 16}> /CF <</StdCF <</CFM /AESV3>>>> /StmF /StdCF /StrF /StdCF>>",
    ]
    body, table = "%PDF-2.0\n", "0000000000 65535 f \n"
    for number, content in enumerate(objects, start=1):
        table += f"{len(body):010} 00000 n \n"
        body += f"{number} 0 obj\n{content}\nendobj\n"
    trailer = "trailer\n<</Root 1 0 R /Encrypt 3 0 R /ID [<00> <00>] /Size 4>>"
    return f"{body}xref\n0 4\n{table}{trailer}\nstartxref\n{len(body)}\n%%EOF".encode()


def test_a_pdf_in_a_strong_cipher_is_refused() -> None:
    message = refusal(make_aes_pdf(), "a.pdf")
    assert message.startswith(("a.pdf is encrypted (", "a.pdf is protected by a password"))


def test_a_scanned_pdf_is_sent_to_ocr() -> None:
    message = refusal(make_pdf("", ""), "a.pdf")
    assert message.startswith("a.pdf has 2 pages and no text, so it is probably scanned")
    assert "ocrmypdf" in message


def test_a_damaged_pdf_is_refused_without_noise(capfd: pytest.CaptureFixture[str]) -> None:
    message = refusal(make_pdf("Text.")[:300], "a.pdf")
    assert message.startswith("a.pdf is not a readable pdf file (")
    assert capfd.readouterr() == ("", "")


# --- DOCX -----------------------------------------------------------------------------------------


def make_docx() -> bytes:
    document = docx.Document()
    document.add_heading("Report", level=0)
    document.add_heading("Results", level=2)
    document.add_paragraph("Before\tthe table.")
    table = document.add_table(rows=2, cols=2)
    for cell, text in zip([*table.row_cells(0), *table.row_cells(1)], "abcd", strict=True):
        cell.text = text
    table.cell(1, 1).add_paragraph("e")
    document.add_paragraph("")
    after = document.add_paragraph("After ")
    after._p.append(parse_xml(f"<w:ins {nsdecls('w')}><w:r><w:t>put in</w:t></w:r></w:ins>"))
    after._p.append(
        parse_xml(f"<w:del {nsdecls('w')}><w:r><w:delText>taken out</w:delText></w:r></w:del>")
    )
    document.element.body.insert(
        len(document.element.body) - 1,
        parse_xml(
            f"<w:sdt {nsdecls('w')}><w:sdtContent><w:p><w:r><w:t>In a form.</w:t></w:r></w:p>"
            "</w:sdtContent></w:sdt>"
        ),
    )
    data = io.BytesIO()
    document.save(data)
    return data.getvalue()


def test_a_word_file_gives_headings_paragraphs_and_tables_in_order() -> None:
    assert load_bytes(make_docx(), "report.docx").text == (
        "# Report\n\n## Results\n\nBefore the table.\n\na | b\nc | d e\n\nAfter put in\n\nIn a form."
    )


def test_lists_notes_formulas_and_boxes_of_a_word_file_are_read() -> None:
    document = docx.Document()
    for text, style in (("mow", "List Number"), ("rake", "List Number"), ("hay", "List Bullet")):
        document.add_paragraph(text, style=style)
    spaces = nsdecls("w", "m") + ' xmlns:v="urn:schemas-microsoft-com:vml"'
    sum_of = "<m:r><m:rPr><m:sty m:val='p'/></m:rPr><m:t>a+</m:t></m:r><m:r><m:t>b</m:t></m:r>"
    parts = (
        "<w:r><w:footnoteReference w:id='2'/></w:r>",
        f"<m:oMath><m:d><m:e>{sum_of}</m:e></m:d></m:oMath>",
        "<w:r><w:pict><v:textbox><w:txbxContent><w:p><w:r><w:t>in a box</w:t></w:r></w:p>"
        "</w:txbxContent></v:textbox></w:pict></w:r>",
    )
    for text, part in zip(("A claim", "The sum ", "Beside"), parts, strict=True):
        paragraph = document.add_paragraph(text)
        paragraph._p.append(parse_xml(part.replace(">", f" {spaces}>", 1)))
    data = io.BytesIO()
    document.save(data)
    note = f"<w:footnote w:id='2'><w:p><w:r><w:t>Said {'x' * 3}.</w:t></w:r></w:p></w:footnote>"
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("word/footnotes.xml", f"<w:footnotes {nsdecls('w')}>{note}</w:footnotes>")
    assert load_bytes(data.getvalue(), "a.docx").text == (
        "1. mow\n2. rake\n\n- hay\n\nA claim[1]\n\nThe sum a+b\n\nBeside\n\nin a box\n\n1. Said xxx."
    )


def test_a_word_file_is_known_without_a_name() -> None:
    assert load_bytes(make_docx(), "stdin").text.startswith("# Report")


@pytest.mark.parametrize("data", [b"text", make_docx()[:2000], b"PK\x03\x04"])
def test_a_damaged_word_file_is_refused(data: bytes) -> None:
    assert "is not a readable docx file" in refusal(data, "a.docx")


def test_a_word_file_with_a_password_is_refused() -> None:
    assert "password-protected" in refusal(
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 99, "a.docx"
    )


# --- EPUB -----------------------------------------------------------------------------------------

CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>"""
PACKAGE = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><manifest>
<item id="one" href="text/one.xhtml" media-type="application/xhtml+xml"/>
<item id="two" href="text/chapter%20two.xhtml" media-type="application/xhtml+xml"/>
<item id="toc" href="toc.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="art" href="cover.svg" media-type="image/svg+xml"/>
</manifest><spine><itemref idref="art"/><itemref idref="toc"/><itemref idref="two"/><itemref idref="one"/>
</spine></package>"""
CHAPTERS = {
    "OPS/toc.xhtml": "<html><body><nav>Contents</nav></body></html>",
    "OPS/text/one.xhtml": '<?xml version="1.0" encoding="utf-8"?><html><head><title/>'
    '<script src="x.js"/></head><body><h1>One</h1><p><a id="p1"/>First&nbsp;chap\u00adter.</p></body></html>',
    "OPS/text/chapter two.xhtml": "<html><head><title>Book</title></head><body><p>Two.</p></body></html>",
}


def make_epub(files: Mapping[str, str] | None = None) -> bytes:
    content = {"META-INF/container.xml": CONTAINER, "OPS/book.opf": PACKAGE, **CHAPTERS}
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        for name, text in {**content, **(files or {})}.items():
            if text:
                archive.writestr(name, text)
    return data.getvalue()


def test_a_book_is_read_in_the_order_of_its_spine() -> None:
    assert load_bytes(make_epub(), "book.epub").text == "Two.\n\n# One\n\nFirst chapter."


def test_a_book_is_known_without_a_name() -> None:
    assert load_bytes(make_epub(), "stdin").text.startswith("Two.")


def test_a_book_under_drm_is_refused() -> None:
    encryption = (
        '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><EncryptedData><CipherData>'
        '<CipherReference URI="{}"/></CipherData></EncryptedData></encryption>'
    )
    fonts = make_epub({"META-INF/encryption.xml": encryption.format("OPS/font.otf")})
    assert load_bytes(fonts, "book.epub").text.startswith("Two.")
    locked = make_epub({"META-INF/encryption.xml": encryption.format("OPS/text/one.xhtml")})
    assert refusal(locked, "book.epub").startswith("book.epub is protected by DRM")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"text", "is not a zip file"),
        (make_epub()[:-200], "is not a readable epub file"),
        (make_epub({"META-INF/container.xml": ""}), "no item named 'META-INF/container.xml'"),
        (make_epub({"META-INF/container.xml": "<container/>"}), "names no package"),
        (make_epub({"OPS/book.opf": "<package>"}), "is not a readable epub file"),
        (make_epub({"OPS/text/one.xhtml": ""}), "no item named 'OPS/text/one.xhtml'"),
        (make_epub({"OPS/book.opf": '<!DOCTYPE x [<!ENTITY a "b">]><x/>'}), "declares entities"),
        (make_epub({"OPS/book.opf": "<package/>"}), "holds no text"),
    ],
)
def test_a_damaged_book_is_refused(data: bytes, message: str) -> None:
    assert message in refusal(data, "book.epub")


def test_an_archive_that_unpacks_to_too_much_is_refused() -> None:
    raw = RawFile(source="bomb.epub", name="bomb.epub", data=make_epub({"big": " " * 2_000_000}))
    with pytest.raises(DocumentError, match=r"bomb.epub unpacks to more than 1,000,000 bytes"):
        open_zip(raw, "epub", "", max_bytes=1_000_000)


# --- notebooks ------------------------------------------------------------------------------------

NOTEBOOK: dict[str, Any] = {
    "nbformat": 4,
    "metadata": {"language_info": {"name": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# Title\n", "Some *text*."]},
        {
            "cell_type": "code",
            "source": "print('hi')\n1 + 1",
            "outputs": [
                {"output_type": "stream", "text": ["  0%\r", " 50%\r", "100%\n", "hi\n"]},
                {
                    "output_type": "execute_result",
                    "data": {"text/plain": ["2"], "text/html": "<b>2"},
                },
            ],
        },
        {
            "cell_type": "code",
            "source": "plot()",
            "outputs": [
                {
                    "output_type": "display_data",
                    "data": {"image/png": "aaaa", "text/plain": "<Figure>"},
                }
            ],
        },
        {
            "cell_type": "code",
            "source": "'```'",
            "outputs": [{"output_type": "error", "traceback": ["\x1b[31mValueError\x1b[0m: no"]}],
        },
        {"cell_type": "code", "source": "", "outputs": []},
        {"cell_type": "raw", "source": "the end"},
    ],
}


def test_a_notebook_gives_cells_and_printed_text_in_order() -> None:
    assert load_bytes(json.dumps(NOTEBOOK).encode(), "a.ipynb").text == (
        "# Title\nSome *text*.\n\n"
        "```python\nprint('hi')\n1 + 1\n```\n\n```output\n100%\nhi\n2\n```\n\n"
        "```python\nplot()\n```\n\n"
        "````python\n'```'\n````\n\n```output\nValueError: no\n```\n\nthe end"
    )


def test_an_old_notebook_is_read_too() -> None:
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "1", "outputs": []}]}]}
    assert load_bytes(json.dumps(old).encode(), "a.ipynb").text == "```\n1\n```"


@pytest.mark.parametrize(
    "data",
    [
        b'{"cells": [',
        b"[]",
        b"{}",
        b'{"cells": 3}',
        b'{"cells": [1]}',
        b'{"cells": [{"cell_type": "code", "source": 5}]}',
    ],
)
def test_a_damaged_notebook_is_refused(data: bytes) -> None:
    assert "is not a readable notebook file" in refusal(data, "a.ipynb")


# --- chat logs --------------------------------------------------------------------------------------


def chat(*records: Any) -> str:
    lines = "\n".join(json.dumps(record) for record in records)
    return load_bytes(lines.encode(), "chat.jsonl").text


def test_messages_on_lines_are_one_conversation() -> None:
    parts = [{"type": "text", "text": "Hi."}, {"type": "image_url", "image_url": {}}, "Bye."]
    assert chat(
        {"role": "user", "content": "Hello\nthere"},
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None},
    ) == ("user: Hello\nthere\n\nassistant: Hi.\nBye.")


def test_conversations_on_lines_are_set_apart() -> None:
    assert chat(
        {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]},
        {
            "id": 7,
            "conversations": [{"from": "human", "value": "C"}, {"from": "gpt", "value": "D"}],
        },
    ) == ("user: A\n\nassistant: B\n\n---\n\nhuman: C\n\ngpt: D")


def test_tool_calls_are_kept() -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    assert chat(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found"},
    ) == ('assistant: search({"q": "x"})\n\ntool: found')


@pytest.mark.parametrize(
    "text",
    [
        '{"question": "a", "answer": "b"}\n',
        '{"role": "user", "content": "a"}\n{"event": "login"}\n',
        '{"role": "user", "content": "a"}\nnot json\n',
        '{"role": "user", "content": {"deep": 1}}\n',
        '{"messages": []}\n',
        '{"messages": ["a"]}\n',
        "[1, 2]\n",
    ],
)
def test_lines_that_are_no_chat_stay_as_they_are(text: str) -> None:
    assert load_bytes(text.encode(), "log.ndjson").text == text


def test_half_a_character_in_json_is_replaced() -> None:
    assert (
        chat({"role": "user", "content": "a\ud83d b \ud83d\ude00"}) == "user: a\ufffd b \U0001f600"
    )
