"""Lines of a file that grows."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from memagent.errors import RunError
from memagent.run_files import LineFile
from memagent.viewer.line_index import LineIndex


def number_of(line: bytes) -> int:
    found: int = json.loads(line)["number"]
    return found


def append(path: Path, *numbers: int) -> None:
    with LineFile(path, checksums=True) as lines:
        lines.append(*(json.dumps({"number": number}).encode() for number in numbers))


def test_a_number_too_large_to_compute_with_is_a_damaged_line(tmp_path: Path) -> None:
    def head(line: bytes) -> bool:
        return math.isfinite(number_of(line))

    append(tmp_path / "lines", 1, 10**400, 2)
    index = LineIndex(tmp_path, "lines", head)
    index.refresh()
    assert index.heads == [True, None, True]


def test_a_file_that_is_replaced_while_it_is_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path / "lines", 1, 2)
    append(tmp_path / "others", 7, 8, 9)
    index = LineIndex(tmp_path, "lines", number_of)
    opened = os.open

    def open_and_replace(path: str | Path, *options: Any, **places: Any) -> int:
        file = opened(path, *options, **places)
        if path == "lines":
            (tmp_path / "others").replace(tmp_path / "lines")
        return file

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_replace)
        index.refresh()
    index.refresh()
    assert index.heads == [7, 8, 9]


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    seen = []

    def head(line: bytes) -> int:
        seen.append(number_of(line))
        return seen[-1]

    index = LineIndex(tmp_path, "lines", head)
    index.refresh()
    assert index.heads == []
    append(tmp_path / "lines", 1, 2)
    index.refresh()
    append(tmp_path / "lines", 3)
    index.refresh()
    assert (index.heads, seen) == ([1, 2, 3], [1, 2, 3])
    assert index.record(1) == {"number": 2}


def test_an_incomplete_last_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"number": 1}\n{"number"')
    index = LineIndex(tmp_path, "lines", number_of)
    index.refresh()
    assert index.heads == [1]
    path.write_bytes(b'{"number": 1}\n{"number": 2}\n')
    index.refresh()
    assert index.heads == [1, 2]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"number": 1}\n{"number": 2}\n')
    index = LineIndex(tmp_path, "lines", number_of)
    index.refresh()
    path.write_bytes(b'{"number": 7}\n')
    before = index.generation
    index.refresh()
    assert index.heads == [7]
    assert index.generation > before


def test_a_damaged_line_has_no_head_and_cannot_be_opened(tmp_path: Path) -> None:
    append(tmp_path / "lines", 1, 2, 3)
    text = (tmp_path / "lines").read_text()
    (tmp_path / "lines").write_text(text.replace('{"number": 2,', '{"number": 5,'))
    with (tmp_path / "lines").open("a") as lines:
        lines.write("not JSON\n")
    index = LineIndex(tmp_path, "lines", number_of)
    index.refresh()
    assert index.heads == [1, 5, 3, None]
    with pytest.raises(RunError, match="line 2, is damaged"):
        index.record(1)
    with pytest.raises(RunError, match="has no line 9"):
        index.line(8)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text('{"number": 1}\n')
    (run / "lines").symlink_to(tmp_path / "secret")
    for name in ("lines", "../secret"):
        index = LineIndex(run, name, number_of)
        with pytest.raises(RunError, match="is a link, no regular file"):
            index.refresh()
        assert index.heads == []
