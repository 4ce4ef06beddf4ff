"""Jupyter notebooks: cells in order, with the text they printed. Pictures are dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from memagent.documents.document import Document
from memagent.documents.encoding import decode
from memagent.documents.formats.raw import RawFile, damaged, tidy

TEXT_TYPES = ("text/plain", "text/markdown", "text/latex")
"""Forms of an output that are text, best first."""

_ADVICE = "open it in Jupyter and save it again"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_notebook(raw: RawFile) -> Document:
    """Markdown unchanged, code and outputs fenced by ``` to keep them apart."""
    try:
        notebook = json.loads(decode(raw.data, raw.source))
        cells = _cells(notebook)
        metadata = notebook.get("metadata", {})
        language = str(metadata.get("language_info", {}).get("name", ""))
        blocks = [block for cell in cells for block in _blocks(cell, language)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(raw, "notebook", error, _ADVICE) from error
    return Document.from_text(tidy("\n\n".join(blocks)), raw.source)


def _cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    if "worksheets" in notebook:  # the format before 2015
        return [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
    cells = notebook["cells"]
    if not isinstance(cells, list):
        raise TypeError("cells is not a list")
    return cells


def _blocks(cell: dict[str, Any], language: str) -> Iterator[str]:
    source = _text(cell.get("source", cell.get("input", ""))).strip("\n")
    if cell.get("cell_type") != "code":
        if source.strip():
            yield source
        return
    if source.strip():
        yield _fenced(source, language)
    outputs = "\n".join(filter(None, (_output(output) for output in cell.get("outputs", []))))
    if outputs:
        yield _fenced(outputs, "output")


def _output(output: dict[str, Any]) -> str:
    kind = output.get("output_type")
    if kind == "stream":
        text = _text(output.get("text", ""))
    elif kind in ("error", "pyerr"):
        text = "\n".join(output.get("traceback", [])) or f"{output['ename']}: {output['evalue']}"
    else:
        text = _shown(output.get("data", {}))
    return _last_states(_COLOURS.sub("", text)).strip("\n")


def _last_states(text: str) -> str:
    r"""Of a progress bar the last state. `\r` begins a state, except in `\r\n`."""
    *lines, last = text.split("\n")
    return "\n".join([*(_last_state(line.removesuffix("\r")) for line in lines), _last_state(last)])


def _last_state(line: str) -> str:
    return line.rpartition("\r")[2]


def _shown(forms: dict[str, Any]) -> str:
    """The text form of an output; beside a picture that is only the name of an object."""
    if any(name.startswith("image/") for name in forms):
        return ""
    return next((_text(forms[name]) for name in TEXT_TYPES if name in forms), "")


def _text(value: str | list[str]) -> str:
    """Notebooks keep a text as one string or as a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def _fenced(text: str, label: str) -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{label}\n{text}\n{fence}"
