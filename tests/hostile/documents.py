"""Hostile documents of every format: damaged ones, and ones built to take time or memory.

    python -m tests.hostile.documents --count 1000 --seed 0

Each is read within the limits of `harness`, and becomes a document or an error of one line with its name.
"""

import gzip
import io
import json
import random
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache

from memagent.documents.loaders import load_bytes
from memagent.errors import DocumentError
from tests.hostile.harness import Connections, main, wrong_line
from tests.hostile.json_damage import damaged_bytes, damaged_json
from tests.hostile.texts import TEXTS, hostile_text

Rng = random.Random

PAGE = """<html><head><title>Mill</title></head><body><h1>The mill</h1><p>It <b>rains</b>.</p>
<ul><li>one<li>two</ul><pre>a\n  b</pre><table><tr><td>x<td>y<tr><td>1<td>2</table></body></html>"""
CONTAINER = '<container><rootfiles><rootfile full-path="book.opf"/></rootfiles></container>'
PACKAGE = """<package><manifest>
<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/>
<item id="b" href="b.xhtml" media-type="application/xhtml+xml"/></manifest>
<spine><itemref idref="a"/><itemref idref="b"/></spine></package>"""
WORD_SPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
ENTITIES = (
    '<!DOCTYPE x [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {name} "{("&" + before + ";") * 50}">' for before, name in zip("abcd", "bcde", strict=True))
    + "]>"
)  # fmt: skip
OUTSIDE = (
    '<!DOCTYPE x SYSTEM "http://192.0.2.7/x.dtd" [<!ENTITY e SYSTEM "file:///etc/passwd">'
    '<!ENTITY f SYSTEM "http://192.0.2.7/x">]>'
)


# --- files in order -------------------------------------------------------------------------------


def packed(files: Mapping[str, bytes]) -> bytes:
    """A zip archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


@cache
def originals() -> dict[str, bytes]:
    """A small file of every format, by its name."""
    cells = [
        {"cell_type": "markdown", "source": ["# Mill\n", "It rains."]},
        {
            "cell_type": "code",
            "source": "run()",
            "outputs": [{"output_type": "stream", "text": "10 %\r20 %\r\nfine\n"}],
        },
    ]
    notebook = {"cells": cells, "metadata": {"language_info": {"name": "python"}}}
    turn = {"role": "user", "content": "Hello"}
    turns = [turn, {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}]
    chat = "\n".join(map(json.dumps, [*turns, {"messages": turns}, {"conversations": turns}]))
    text = "It rains today. Nobody came to the mill.\n\nThe next day was dry.\n" * 40
    book = {
        "META-INF/container.xml": CONTAINER.encode(),
        "book.opf": PACKAGE.encode(),
        "a.xhtml": PAGE.encode(),
        "b.xhtml": PAGE.encode(),
    }
    return {
        "a.txt": text.encode(),
        "b.txt": text.encode("utf-16"),
        "c.txt": ("caf\xe9 " + text).encode("latin-1"),
        "d.md": text.encode(),
        "e.csv": text.replace(" ", ",").encode(),
        "f.html": PAGE.encode(),
        "g.xhtml": PAGE.encode(),
        "h.txt.gz": gzip.compress(text.encode()),
        "i.html.gz": gzip.compress(PAGE.encode()),
        "j.ipynb": json.dumps(notebook).encode(),
        "k.jsonl": chat.encode(),
        "l.epub": packed(book),
        "m.docx": _word(),
        "n.pdf": _pdf([b"BT /F1 12 Tf 72 700 Td (It rains.) Tj ET"] * 3),
        "unnamed": PAGE.encode(),
    }


def _word() -> bytes:
    import docx

    document = docx.Document()
    document.add_heading("The mill", 1)
    document.add_paragraph("It rains.")
    table = document.add_table(2, 2)
    table.cell(0, 0).text = "x"
    data = io.BytesIO()
    document.save(data)
    return data.getvalue()


def _pdf(contents: list[bytes], font: bytes = b"", extra: bytes = b"") -> bytes:
    """A PDF with a page for each content, written by hand so that anything may stand in it."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>"]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(len(contents)))
    objects.append(b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(contents)))
    objects.append(font or b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>")
    for number, content in enumerate(contents):
        stream = zlib.compress(content)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents %d 0 R"
            b"/Resources<</Font<</F1 3 0 R>>>>%s>>" % (5 + 2 * number, extra)
        )
        head = b"<</Length %d/Filter/FlateDecode>>" % len(stream)
        objects.append(head + b"stream\n" + stream + b"\nendstream")
    return _numbered(objects)


def _numbered(objects: list[bytes]) -> bytes:
    data, places = b"%PDF-1.5\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    lines = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return data + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, lines, size, start)  # fmt: skip


# --- damage ---------------------------------------------------------------------------------------


def damaged(name: str, data: bytes, rng: Rng) -> bytes:
    """A file with a few changes, often below its container."""
    if rng.random() < 0.3:
        return damaged_bytes(data, rng)
    if name.endswith(".gz"):
        inner = damaged(name[:-3], gzip.decompress(data), rng)
        return (
            damaged_bytes(gzip.compress(inner), rng) if rng.random() < 0.3 else gzip.compress(inner)
        )
    if name.endswith((".epub", ".docx")):
        files = unpacked(data)
        path = rng.choice([path for path in files if path.endswith(("ml", ".opf", ".rels"))])
        change = rng.randrange(4)
        if change == 0:
            files.pop(path)
        elif change == 1:
            files[path] = hostile_markup(rng)
        else:
            files[path] = damaged_bytes(files[path], rng)
        return packed(files)
    if name.endswith(".ipynb"):
        return damaged_json(data.decode(), rng)
    if name.endswith(".jsonl"):
        lines = data.decode().split("\n")
        place = rng.randrange(len(lines))
        changed = damaged_json(lines[place], rng)
        return "\n".join(lines[:place]).encode() + b"\n" + changed
    if name.endswith((".html", ".xhtml")) and rng.random() < 0.5:
        return hostile_markup(rng)
    if name.endswith(".pdf"):
        return _damaged_pdf(data, rng)
    return damaged_bytes(data, rng)


def _damaged_pdf(data: bytes, rng: Rng) -> bytes:
    """A number or a name of the file replaced: references, counts, lengths, places."""
    words = data.split(b" ")
    for _ in range(rng.choice((1, 2, 5))):
        values = (b"-1", b"0", b"2", b"99999999999", b"1e9", b"[", b"<<", b"(", b"/Kids", b"2 0 R")
        words[rng.randrange(len(words))] = rng.choice(values)
    return b" ".join(words)


# --- bombs ----------------------------------------------------------------------------------------


def hostile_markup(rng: Rng) -> bytes:
    """Markup that nests, repeats or refers."""
    size = rng.choice((1000, 20_000))
    tag = rng.choice(("div", "table", "td", "ul", "b", "pre", "p", "svg", "font", "select", "a"))
    kinds: list[Callable[[], str]] = [
        lambda: f"<html>{f'<{tag}>' * size}x",
        lambda: f"<html>{f'<{tag}>x' * size}{f'</{tag}>' * size}",
        lambda: "<html>" + "<table><tr><td>x" * size,
        lambda: f"<html>{f'<{tag} ' * size}",
        lambda: "<html><p " + " ".join(f'a{number}="x"' for number in range(size)) + ">x",
        lambda: "<html><p a='" + "x" * size * 50,
        lambda: "<html>" + "<!--" * size + "x",
        lambda: "<html>" + "</p>" * size + "x",
        lambda: "<html>" + "<b><i><u>" * size + "</b></i></u>" * size,
        lambda: "<html>" + "&lt;&amp;&nosuch;&#x110000;&#0;&#55296;" * size,
        lambda: ENTITIES + "<html>&e;</html>",
        lambda: OUTSIDE + "<html>&e;&f;</html>",
        lambda: '<?xml version="1.0" encoding="' + "x" * size + '"?><html>x',
        lambda: f'<html><meta charset="{rng.choice(("utf-7", "nosuch", "utf-16", "rot13"))}">x',
        lambda: "<html><pre>" + "\n" * size * 10 + "x",
        lambda: "<html>" + "<![CDATA[" * size + "x",
        lambda: "<html><h1>" + "x " * size * 10,
    ]
    return rng.choice(kinds)().encode()


def _hostile_text(rng: Rng) -> bytes:
    text = hostile_text(rng.choice(sorted(TEXTS)), 30_000, rng.randrange(99))
    return text.encode(rng.choice(("utf-8", "utf-16", "utf-32")), "replace")


def _hostile_gzip(rng: Rng) -> bytes:
    kinds: list[Callable[[], bytes]] = [
        lambda: gzip.compress(bytes(80_000_000), 1),
        lambda: gzip.compress(gzip.compress(b"x")),
        lambda: gzip.compress(b"x" * 1000) * 200,
        lambda: gzip.compress(b"x")[:-8] + b"\xff" * 8,
        lambda: b"\x1f\x8b\x08\x1c" + b"\xff" * 1000,
    ]
    return rng.choice(kinds)()


def _hostile_json(rng: Rng) -> bytes:
    size = rng.choice((1000, 100_000))
    cell = {"cell_type": "code", "source": "`" * size, "outputs": []}
    kinds: list[Callable[[], bytes]] = [
        lambda: b'{"cells": ' + b"[" * size + b"]" * size + b"}",
        lambda: b'{"cells": [{"source": "x", "n": ' + b"9" * size + b"}]}",
        lambda: json.dumps({"cells": [cell], "metadata": {}}).encode(),
        lambda: json.dumps({"cells": [{"source": ["x"] * size}], "metadata": {}}).encode(),
        lambda: json.dumps({"cells": [{"source": "\x1b[" * size}], "metadata": {}}).encode(),
        lambda: json.dumps(
            {
                "cells": [
                    {
                        "cell_type": "code",
                        "source": "",
                        "outputs": [
                            {
                                "output_type": "stream",
                                "text": rng.choice(("\r", "\x1b[1m", "a\r\n", "x")) * size,
                            }
                        ],
                    }
                ],
                "metadata": {},
            }
        ).encode(),
        lambda: b'{"role": "user", "content": "\\ud800"}\n' * 200,
        lambda: b'{"role": "user", "content": ' + b"[" * size + b"]" * size + b"}",
        lambda: b'{"messages": [' + b'{"role": "user", "content": "x"},' * 2000 + b"{}]}",
    ]
    return rng.choice(kinds)()


def _hostile_book(rng: Rng) -> bytes:
    files = unpacked(originals()["l.epub"])
    kind = rng.randrange(8)
    if kind == 0:
        files["book.opf"] = PACKAGE.replace(
            "<itemref", '<itemref idref="a"/>' * 5000 + "<itemref"
        ).encode()
    elif kind == 1:
        files["a.xhtml"] = b"<html><p>" + b"x " * 30_000_000
    elif kind == 2:
        files["book.opf"] = (ENTITIES + PACKAGE.replace("a.xhtml", "&e;")).encode()
    elif kind == 3:
        files["META-INF/container.xml"] = (OUTSIDE + CONTAINER.replace("book.opf", "&f;")).encode()
    elif kind == 4:
        files["book.opf"] = b"<x>" * 200_000
    elif kind == 5:
        files["book.opf"] = PACKAGE.replace("a.xhtml", "../" * 500 + "etc/passwd").encode()
    elif kind == 6:
        files["a.xhtml"] = b"<html>" + b"<br/>" * 400_000 + b"x"
    else:
        files["a.xhtml"] = files["b.xhtml"] = hostile_markup(rng)
    return packed(files)


def _hostile_word(rng: Rng) -> bytes:
    files = unpacked(originals()["m.docx"])
    size = rng.choice((500, 20_000))
    cell = "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>x</w:t></w:r></w:p>"
    ends = "</w:tc></w:tr></w:tbl>"
    kinds = [
        cell * size + ends * size,
        "<w:p>" * size + "x" + "</w:p>" * size,
        "<w:sdt><w:sdtContent>" * size + "</w:sdtContent></w:sdt>" * size,
        "<w:p>" + "<w:r><w:tab/></w:r>" * size * 10 + "</w:p>",
        "<w:tbl>" + "<w:tr>" * size + "<w:tc/>" + "</w:tr>" * size + "</w:tbl>",
        "<w:tbl><w:tr>" + "<w:tc><w:p/></w:tc>" * size * 5 + "</w:tr></w:tbl>",
        "<w:p><w:pPr><w:pStyle w:val='" + "x" * size + "'/></w:pPr></w:p>" * 3,
        "<w:p><w:r><w:t>&e;</w:t></w:r></w:p>",
        cell.replace("x", "y") + cell * 30 + ends * 31,
    ]
    before = rng.choice(("", "", ENTITIES, OUTSIDE))
    body = f'{before}<w:document xmlns:w="{WORD_SPACE}"><w:body>{rng.choice(kinds)}</w:body></w:document>'
    target = rng.choice(("word/document.xml", "word/document.xml", "word/styles.xml"))
    files[target] = body.encode()
    if rng.random() < 0.2:
        files["word/media/image1.png"] = bytes(70_000_000)
    return packed(files)


def _hostile_pdf(rng: Rng) -> bytes:
    text = b"BT /F1 12 Tf 72 700 Td (x) Tj ET "
    cmap = (
        b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap "
        b"1 begincodespacerange <0000> <FFFF> endcodespacerange %s endcmap end end"
    )
    span = rng.choice(
        (b"<0000> <FFFFFFFF> <0000>", b"<0000> <00FFFFFF> <0000>", b"<00> <FFFF> <00>")
    )
    mapping = zlib.compress(cmap % (b"1 beginbfrange " + span + b" endbfrange"))
    kinds: list[Callable[[], bytes]] = [
        lambda: _pdf([text * 100_000]),
        lambda: _pdf([b"q " * 500_000]),
        lambda: _pdf([b"[" * 100_000]),
        lambda: _pdf([b"<<" * 50_000]),
        lambda: _pdf([b"(" * 200_000]),
        lambda: _pdf([b"BT /F1 12 Tf [" + b"(a) -900 " * 100_000 + b"] TJ ET"]),
        lambda: _pdf([b"/X1 Do " * 1000]),
        lambda: _pdf([text] * 400),
        lambda: _pdf([text]).replace(b"/Count 1", b"/Count 1000000000"),
        lambda: _pdf([text]).replace(b"/Kids[4 0 R]", b"/Kids[" + b"4 0 R " * 20_000 + b"]"),
        lambda: _pdf([text]).replace(b"/Kids[4 0 R]", b"/Kids[2 0 R]"),
        lambda: _pdf([text]).replace(b"/Filter/FlateDecode", b"/Filter[" + b"/FlateDecode" * 500 + b"]"),
        lambda: _pdf([text], font=b"<</Type/Font/Subtype/Type0/ToUnicode 6 0 R/Encoding/Identity-H>>")
        .replace(b"xref\n", b"6 0 obj\n<</Length %d/Filter/FlateDecode>>stream\n" % len(mapping) + mapping + b"\nendstream\nendobj\nxref\n", 1),
        lambda: _pdf([text], font=b"3 0 R"),
        lambda: _pdf([text], extra=b"/Contents 4 0 R"),
        lambda: _pdf([text]).replace(b"startxref\n", b"startxref\n9"),
        lambda: _pdf([text]) + b"trailer<</Prev 9 /Root 1 0 R>>\nstartxref\n9\n%%EOF",
        lambda: b"%PDF-1.5\n" + b"1 0 obj\n" * 100_000,
        lambda: b"%PDF-1.5\n" + b"<<" * 50_000 + b"\nstartxref\n9\n%%EOF",
        lambda: b"%PDF-1.5\n" + b"startxref\n0\n%%EOF\n" * 50_000,
        lambda: _pdf([bytes(7_000_000)]),
        lambda: _pdf([b"BI /W 1 /H 1 ID " + b"x" * 2_000_000]),
    ]  # fmt: skip
    return rng.choice(kinds)()


BOMBS: dict[str, Callable[[Rng], bytes]] = {
    "a.txt": _hostile_text,
    "f.html": hostile_markup,
    "h.txt.gz": _hostile_gzip,
    "i.html.gz": lambda rng: gzip.compress(
        rng.choice((hostile_markup(rng), b"<html>" + b"<b>" * rng.choice((100_000, 20_000_000))))
    ),
    "j.ipynb": _hostile_json,
    "k.jsonl": _hostile_json,
    "l.epub": _hostile_book,
    "m.docx": _hostile_word,
    "m.docx.gz": lambda rng: gzip.compress(_hostile_word(rng)),
    "n.pdf": _hostile_pdf,
    "unnamed": _hostile_json,
}


def hostile_document(number: int, seed: int) -> tuple[str, bytes]:
    """A name and the bytes; the same for the same numbers."""
    rng = Rng(f"document {seed} {number}")
    if rng.random() < 0.5:
        name = rng.choice(sorted(BOMBS))
        return name, BOMBS[name](rng)
    name = rng.choice(sorted(originals()))
    return name, damaged(name, originals()[name], rng)


@cache
def _connections() -> Connections:
    return Connections()


def complaint(number: int, seed: int) -> str | None:
    """What is wrong with how a hostile document is read; None if nothing is."""
    name, data = hostile_document(number, seed)
    connections = _connections()
    try:
        document = load_bytes(data, name)
    except DocumentError as error:
        if reason := wrong_line(error, name):
            return f"{name}: {reason}"
    else:
        if not document.text.strip():
            return f"{name}: a document without text"
    if strangers := connections.strangers("127.0.0.1:0"):
        return f"{name}: connections to {strangers}"
    return None


if __name__ == "__main__":
    sys.exit(main("tests.hostile.documents", complaint, count=1000, what="hostile documents"))
