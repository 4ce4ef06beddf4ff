"""Files that were made to take time, memory, or text from elsewhere: read or refused in one line."""

import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import docx
import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, NameObject

from memagent.cli.main import run
from memagent.documents import formats, loaders
from memagent.documents.document import Document
from memagent.documents.formats import raw as budget
from memagent.documents.formats.notebook import _last_states
from memagent.documents.formats.raw import RawFile
from memagent.documents.loaders import load, load_bytes, load_with_report
from memagent.documents.tree import _quick
from memagent.errors import DocumentError
from tests.hostile import documents
from tests.hostile.harness import tried


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Processor time of this process, which a busy machine does not change."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def notebook(output: str) -> bytes:
    outputs = [{"output_type": "stream", "text": output}]
    cell = {"cell_type": "code", "source": "run()", "outputs": outputs}
    return json.dumps({"cells": [cell], "metadata": {}}).encode()


def test_a_long_line_in_a_notebook_takes_no_time() -> None:
    with within(1):
        document = load_bytes(notebook("x" * 400_000), "a.ipynb")
    assert len(document.text) > 400_000


def test_progress_bars_keep_their_last_state_as_before() -> None:
    overwritten = re.compile(r"[^\n]*\r(?!\n)")
    for letters in itertools.product("a\r\n", repeat=7):
        text = "".join(letters)
        expected = overwritten.sub("", text).replace("\r\n", "\n")
        assert _last_states(text).replace("\r\n", "\n") == expected, repr(text)


def test_a_gitignore_pattern_with_many_stars_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*a*a*a*a*a*a*b\n*[]a]*[!b]*?*a*a*a*a*c\n")
    (tmp_path / ("a" * 250)).write_text("kept")
    (tmp_path / ("a" * 30 + "b")).write_text("ignored")
    with within(1):
        assert load([tmp_path]).text == "kept"


def test_quick_patterns_match_what_slow_ones_do() -> None:
    for glob in itertools.product("*ab?", repeat=5):
        slow = "^" + "".join({"*": "[^/]*", "?": "[^/]"}.get(char, char) for char in glob) + "$"
        if "[^/]*[^/]*" in slow:
            continue
        quick = re.compile(_quick(slow))
        for name in ("ab", "aabb", "abab", "babab", "bbaab", "aaaaa", "ababa", "b"):
            assert bool(quick.search(name)) == bool(re.search(slow, name)), (slow, name)


def test_a_gitignore_of_many_double_stars_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("**/a/**/a/**/a/**/a/**/a/**/b\n")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DocumentError, match=r"has a line with more than 4 `\*\*`; shorten it$"):
        load([tmp_path])


def test_a_link_in_a_folder_does_not_lead_to_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the key")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    (folder / "sub" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "second.txt").symlink_to("sub/notes.txt")
    loaded = load_with_report([folder])
    assert loaded.document.text == "text"
    assert [Path(item.source).name for item in loaded.skipped] == ["second.txt", "notes.txt"]


def test_a_pipe_without_end_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "MAX_PIPE_BYTES", 3_000_000)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as pipe:
        assert pipe.stdout is not None
        try:
            with pytest.raises(
                DocumentError, match=r"^standard input gives more than 3,000,000 by"
            ):
                load_with_report(["-"], stdin=pipe.stdout)
        finally:
            pipe.kill()


class Endless(io.RawIOBase):
    """A stream without end that fails a test once far too much of it was read."""

    num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self.num_bytes += len(buffer)
        assert self.num_bytes < 20_000_000, "read far beyond the limit"
        buffer[:] = b"y" * len(buffer)
        return len(buffer)


def test_ask_refuses_a_pipe_without_end_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loaders, "MAX_PIPE_BYTES", 3_000_000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    assert run(["ask", "-", "-q", "What?", "--engine", "scripted"]) == DocumentError.exit_code
    assert capsys.readouterr().err.startswith("memagent: standard input gives more than 3,000,000 ")


def test_a_named_pipe_without_end_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "MAX_PIPE_BYTES", 3_000_000)
    os.mkfifo(tmp_path / "pipe")
    write = "import sys\nwith open(sys.argv[1], 'wb') as f:\n while True: f.write(b'y' * 65536)"
    command = [sys.executable, "-c", write, str(tmp_path / "pipe")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as writer:
        try:
            with pytest.raises(DocumentError, match="pipe gives more than 3,000,000 bytes; "):
                load([tmp_path / "pipe"])
        finally:
            writer.kill()


def packed(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def book(page: bytes, num_named: int) -> bytes:
    package = (
        '<package><manifest><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/></manifest>'
        "<spine>" + '<itemref idref="a"/>' * num_named + "</spine></package>"
    )
    container = b'<container><rootfile full-path="book.opf"/></container>'
    files = {"META-INF/container.xml": container, "book.opf": package.encode(), "a.xhtml": page}
    return packed(files)


def word(body: bytes, before: bytes = b"") -> bytes:
    """A document whose main part is replaced."""
    data = io.BytesIO()
    docx.Document().save(data)
    with zipfile.ZipFile(data) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    space = b"http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    files["word/document.xml"] = (
        before + b'<w:document xmlns:w="' + space + b'"><w:body>' + body + b"</w:body></w:document>"
    )
    return packed(files)


def test_a_page_that_a_book_names_often_is_read_once() -> None:
    with within(1):
        document = load_bytes(book(b"<html><body><p>Once.</p></body></html>", 400), "a.epub")
    assert document.text == "Once."


def test_a_book_of_nothing_but_markup_is_refused_in_one_line() -> None:
    data = book(b"<p>" * 2_000_000, 1)
    with within(2), pytest.raises(DocumentError, match=r"^a.epub holds more than 400,000 tags on "):
        load_bytes(data, "a.epub")


def test_nested_tables_take_a_time_in_proportion_to_their_length() -> None:
    load_bytes(b"<html><p>warm", "a.html")
    with within(3):
        document = load_bytes(b"<html>" + b"<table><tr><td>x" * 4000, "a.html")
    assert document.text.count("x") == 4000


def test_code_in_a_nested_table_keeps_its_lines() -> None:
    page = "<table><tr><td>a<td><table><tr><td>b<td><pre>c\n  d</pre></table></table>"
    assert load_bytes(page.encode(), "a.html").text == "a\nb\nc\n  d"


def test_a_docx_that_would_take_gigabytes_is_refused_in_one_line() -> None:
    data = word(b"<w:p/>" * 3_500_000)
    with within(2), pytest.raises(DocumentError, match=r"^a.docx holds more than 750,000 pieces"):
        load_bytes(data, "a.docx")


def test_a_docx_with_entities_is_refused_rather_than_read_in_part() -> None:
    before = '<?xml version="1.0"?><!DOCTYPE w [<!ENTITY e "lost">]>'
    body = "<w:p><w:r><w:t>a &e; b</w:t></w:r></w:p>"
    data = word(body.encode(), before.encode())
    with pytest.raises(DocumentError, match=r"word/document.xml declares entities"):
        load_bytes(data, "a.docx")


def test_markup_in_a_compressed_page_is_counted_before_it_is_parsed() -> None:
    data = gzip.compress(b"<html>" + b"<b>" * 1_000_000)
    with within(1), pytest.raises(DocumentError, match=r"^a.html.gz holds more than 400,000 tags"):
        load_bytes(data, "a.html.gz")


def test_what_a_compressed_document_unpacks_to_depends_on_the_file_that_was_given() -> None:
    data = gzip.compress(packed({"word/document.xml": b" " * 80_000_000}))
    with pytest.raises(DocumentError, match=r"unpacks to more than 67,108,864 bytes"):
        load_bytes(data, "a.docx.gz")


def test_a_large_plain_page_may_hold_more_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MEMORY", 1_000_000)
    cells = b"<html><table>" + b"<tr><td>1</td><td>2</td></tr>\n" * 2000
    assert load_bytes(cells, "a.html").text.count("1 | 2") == 2000
    with pytest.raises(DocumentError, match="more than 888 tags"):
        load_bytes(gzip.compress(cells), "a.html.gz")


@pytest.mark.parametrize("name", ["j.ipynb", "k.jsonl", "f.html", "l.epub", "m.docx", "n.pdf"])
def test_every_format_has_a_limit_of_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(raw: RawFile) -> Document:
        with suppress(Exception):  # as libraries do
            while True:
                pass
        raise AssertionError

    monkeypatch.setitem(formats.FORMATS, name[1:], endless)
    monkeypatch.setattr(formats, "MAGIC", {})
    monkeypatch.setattr(budget, "SECONDS", 0.1)
    monkeypatch.setattr(budget, "SECONDS_PER_MB", 0.0)
    with within(2), pytest.raises(DocumentError, match=f"^{name} cannot be read: more than 0.1 s"):
        load_bytes(documents.originals()[name], name)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.ipynb", b'{"cells": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
        ("a.docx", word(b"<w:p>" * 150 + b"<w:r>" * 50 + b"</w:r>" * 50 + b"</w:p>" * 150)),
    ],
)
def test_files_that_nest_too_deeply_are_refused_in_one_line(name: str, data: bytes) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        with pytest.raises(DocumentError, match=f"^{name} is nested too deeply; save its text as"):
            load_bytes(data, name)
    finally:
        sys.setrecursionlimit(limit)


def test_whatever_a_library_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(raw: RawFile) -> Document:
        raise OSError("two\nlines \x1b[2J")

    monkeypatch.setitem(formats.FORMATS, ".html", broken)
    with pytest.raises(DocumentError) as caught:
        load_bytes(b"<html>", "a.html")
    assert (
        str(caught.value)
        == "a.html cannot be read: two lines \ufffd[2J; save its text as a .txt file"
    )


def test_a_gzip_file_that_grows_a_thousandfold_is_refused_early() -> None:
    data = gzip.compress(b" " * 70_000_000, 1)
    with within(2), pytest.raises(DocumentError, match=r"unpacks to more than 67,108,864 bytes"):
        load_bytes(data, "a.txt.gz")


def pdf(content: bytes) -> bytes:
    """One page with this content."""
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(9, 9)
    stream = DecodedStreamObject()
    stream.set_data(content)
    page[NameObject("/Contents")] = writer._add_object(stream.flate_encode())
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()


def test_a_pdf_whose_pages_unpack_to_too_much_is_refused_in_one_line() -> None:
    with within(3), pytest.raises(DocumentError, match=r"^a.pdf holds more than 9,000,000 bytes "):
        load_bytes(pdf(b"q Q " * 2_300_000), "a.pdf")


@pytest.mark.parametrize(
    "text",
    [
        "# " + "# " * 300_000,
        "# a\n" * 120_000,
        "a\n---\n\n" * 80_000,
        "x" * 500_000 + "\n---" * 20_000,
        "`" * 400_000,
        "```\n" * 100_000,
        " " * 400_000 + "#",
    ],
)
def test_headings_of_markdown_take_no_time(text: str) -> None:
    with within(1.5):
        document = load_bytes(text.encode(), "a.md")
        assert len(document.places(0, len(document.text))) == 1


def test_a_table_of_contents_of_nested_links_takes_no_time() -> None:
    package = (
        '<package><manifest><item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>'
        '<item id="n" href="n.xhtml" media-type="application/xhtml+xml" properties="nav"/></manifest>'
        '<spine><itemref idref="a"/></spine></package>'
    )
    depth = 100_000
    files = {
        "META-INF/container.xml": b'<container><rootfile full-path="book.opf"/></container>',
        "book.opf": package.encode(),
        "a.xhtml": b"<p>Text.</p>",
        "n.xhtml": b"<nav>" + b"<a>x" * depth + b"</a>" * depth + b"</nav>",
    }
    with within(1.5):
        assert load_bytes(packed(files), "a.epub").text == "Text."


def test_hostile_documents_are_read_or_refused_in_one_line() -> None:
    assert tried(documents.complaint, 25, 1) == []


@pytest.mark.parametrize("name", documents.originals())
def test_documents_in_order_are_read(name: str) -> None:
    text = load_bytes(documents.originals()[name], name).text
    assert "rains" in text or "Hello" in text
