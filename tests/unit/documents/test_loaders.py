"""Files, standard input and gzip into one document, and what is said when that cannot be."""

import gzip
import io
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memagent.documents.document import Document
from memagent.documents.formats.raw import RawFile, unpack_gzip
from memagent.documents.loaders import load, load_bytes, load_stdin, load_with_report
from memagent.errors import DocumentError


def refusal(*paths: str | Path, encoding: str | None = None) -> str:
    """The message with which loading is refused; always one line."""
    with pytest.raises(DocumentError) as caught:
        load(paths, encoding=encoding)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


# --- files ----------------------------------------------------------------------------------------


def test_a_text_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("It was the best of times.\n\n  Indented € café.\n", encoding="utf-8")
    document = load([path])
    assert document.text == "It was the best of times.\n\n  Indented € café.\n"
    assert document.source == str(path)
    assert load(str(path)) == Document.load(path) == document


@pytest.mark.parametrize("name", ["a.csv", "a.log", "a.rst", "a.tex", "a.md", "Makefile", "a.json"])
def test_files_of_no_known_format_are_plain_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# a,b\n1,2\n")
    assert load([tmp_path / name]).text == "# a,b\n1,2\n"


def test_newlines_of_other_systems_become_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(b"dos\r\nmac\runix\n")
    assert load([path]).text == "dos\nmac\nunix\n"


def test_several_files_are_headed_by_the_names_the_user_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("first")
    Path("b.md").write_text("second")
    document = load(["./a.txt", "b.md"])
    assert document.text == "===== ./a.txt =====\nfirst\n\n===== b.md =====\nsecond\n\n"
    assert [document.text[part.start : part.end] for part in document.parts] == ["first", "second"]


def test_the_same_file_twice_is_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("again")
    assert [part.source for part in load([path, path]).parts] == [str(path)] * 2


def test_a_pipe_with_a_name_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"through a pipe")
    os.close(writer)
    try:
        assert load([f"/dev/fd/{reader}"]).text == "through a pipe"
    finally:
        os.close(reader)


# --- what cannot be read ----------------------------------------------------------------------------


def test_a_missing_file_is_answered_by_names_near_it(tmp_path: Path) -> None:
    (tmp_path / "moby-dick.txt").write_text("x")
    assert "did you mean moby-dick.txt?" in refusal(tmp_path / "moby-dik.txt")
    assert f"does not exist in {tmp_path}; check the name" in refusal(tmp_path / "zzz")
    assert f"there is no folder {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere" / "a.txt")


def test_a_broken_link_is_reported_as_one(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    assert "is a link to a file that does not exist" in refusal(tmp_path / "link.txt")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "symbolic links" in refusal(tmp_path / "loop")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.txt is empty; give a file with text in it"),
        (b" \n\t\r\n", "holds no text but blanks"),
        ("\ufeff \n".encode(), "holds no text but blanks"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert message in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize("content", [b"\x7fELF\x02\x01\x01\0\0", random.Random(0).randbytes(300)])
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "program").write_bytes(content)
    assert "program is binary, not text" in refusal(tmp_path / "program")


def test_binary_files_come_with_advice_for_their_kind(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04\0\0")
    (tmp_path / "a.doc").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 100)
    (tmp_path / "a.rtf").write_bytes(b"{\\rtf1 hello}")
    assert "OCR" in refusal(tmp_path / "a.png")
    assert "unpack it and give the folder" in refusal(tmp_path / "a.zip")
    assert "save it as .docx" in refusal(tmp_path / "a.doc")
    assert "save it as .docx" in refusal(tmp_path / "a.rtf")


def test_a_device_is_refused_rather_than_read_forever() -> None:
    assert refusal("/dev/zero") == "/dev/zero is a device, not a file; name a file"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([""], "one of the paths is empty"),
        (["a\0b"], "null byte"),
        (["x" * 5000], "too long"),
        (["https://example.org/book.txt"], "download it"),
        (["-", "-"], "only once"),
        ([], "name a file"),
    ],
)
def test_impossible_names_are_refused(paths: list[str], message: str) -> None:
    assert message in refusal(*paths)


def test_a_name_with_a_newline_is_shown_on_one_line(tmp_path: Path) -> None:
    assert r"a\nb.txt does not exist" in refusal(tmp_path / "a\nb.txt")


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A folder in which permissions count: root, who may read everything, becomes nobody there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def as_nobody() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_file_without_permission_says_so(guarded: Path) -> None:
    path = guarded / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with as_nobody():
        assert "secret.txt cannot be read: permission denied" in refusal(path)


def test_a_folder_without_permission_says_so(guarded: Path) -> None:
    folder = guarded / "secret"
    folder.mkdir(mode=0)
    with as_nobody():
        assert "secret cannot be read: permission denied" in refusal(folder)
        assert "a.txt cannot be read: permission denied" in refusal(folder / "a.txt")
    folder.chmod(0o111)
    with as_nobody():
        assert "a.txt does not exist" in refusal(folder / "a.txt")


def test_permissions_inside_a_folder_are_reported(guarded: Path) -> None:
    tree = guarded / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("read")
    (tree / "b.txt").write_text("x")
    (tree / "b.txt").chmod(0)
    (tree / "secret").mkdir(mode=0)
    (guarded / "locked").mkdir(mode=0)
    (tree / "c.txt").symlink_to(guarded / "locked" / "here.txt")
    with as_nobody():
        loaded = load_with_report([tree])
    assert loaded.document.text == "read"
    assert {Path(item.source).name for item in loaded.skipped} == {"secret", "b.txt", "c.txt"}


# --- standard input -------------------------------------------------------------------------------


def test_standard_input_is_read_as_text() -> None:
    document = load_stdin(io.BytesIO("piped € text\r\n".encode()))
    assert (document.text, document.source) == ("piped € text\n", "stdin")


def test_a_dash_stands_for_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("file")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    document = load(["-", tmp_path / "a.txt"])
    assert [part.source for part in document.parts] == ["stdin", str(tmp_path / "a.txt")]


def test_a_dash_may_stand_for_a_stream_of_the_caller() -> None:
    assert load_with_report(["-"], stdin=io.BytesIO(b"kept")).document.text == "kept"


def test_the_format_of_standard_input_is_detected() -> None:
    assert load_stdin(io.BytesIO(b"<!DOCTYPE html><p>Hello<p>you")).text == "Hello\n\nyou"
    assert load_stdin(io.BytesIO(b'{"role": "user", "content": "Hi"}\n')).text == "user: Hi"
    assert load_stdin(io.BytesIO(b'{"cells": [{"cell_type": "raw", "source": "x"}]}')).text == "x"
    assert load_stdin(io.BytesIO(b'{"any": "json"}')).text == '{"any": "json"}'
    assert load_stdin(io.BytesIO(gzip.compress(b"packed"))).text == "packed"


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (io.BytesIO(b""), "standard input is empty"),
        (Terminal(b"x"), "standard input is a terminal"),
    ],
)
def test_standard_input_without_text_is_refused(stream: io.BytesIO, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        load_stdin(stream)


def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refusal("-")


# --- gzip -----------------------------------------------------------------------------------------


def test_a_gzip_file_is_read_by_the_name_inside(tmp_path: Path) -> None:
    (tmp_path / "page.html.gz").write_bytes(gzip.compress(b"<p>packed &amp; sent</p>"))
    document = load([tmp_path / "page.html.gz"])
    assert document.text == "packed & sent"
    assert document.source == str(tmp_path / "page.html.gz")


def test_gzip_is_known_by_its_first_bytes_too() -> None:
    members = gzip.compress(b"one ") + gzip.compress(b"two")
    assert load_bytes(members, "book.txt").text == "one two"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not packed", "rename it without .gz"),
        (gzip.compress(b"text" * 100, mtime=0)[:-10], "not a readable gzip file"),
        (gzip.compress(b"text", mtime=0)[:-8] + b"\0" * 8, "not a readable gzip file"),
        (gzip.compress(b"", mtime=0), "holds no text"),
        (gzip.compress(gzip.compress(b"text", mtime=0), mtime=0), "gzip inside gzip"),
        (gzip.compress(b"\0\1\2", mtime=0), "is binary"),
    ],
)
def test_gzip_that_holds_no_text_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        load_bytes(data, "book.txt.gz")


def test_a_packed_archive_is_to_be_unpacked_by_the_user() -> None:
    with pytest.raises(DocumentError, match="unpack it and give the folder"):
        load_bytes(gzip.compress(b"a.txt" + b"\0" * 507), "all.tar.gz")


def test_a_decompression_bomb_stops_at_the_limit() -> None:
    raw = RawFile(source="bomb.gz", name="bomb.gz", data=gzip.compress(b" " * 5_000_000))
    with pytest.raises(DocumentError, match=r"bomb.gz unpacks to more than 1,000,000 bytes"):
        unpack_gzip(raw, max_bytes=1_000_000)


# --- optional libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"), [("pypdf", "a.pdf"), ("mammoth", "a.docx"), ("bs4", "a.html")]
)
def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"content")
    assert 'pip install "memagent[documents]"' in refusal(tmp_path / name)


def test_plain_text_needs_no_optional_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pypdf", "docx", "bs4", "pathspec", "lxml"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"role": "user", "content": "Hi"}')
    assert len(load_with_report([tmp_path]).document.parts) == 2
