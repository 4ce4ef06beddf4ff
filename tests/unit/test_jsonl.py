"""Files of JSON lines: what is written is there, a torn end is cut, other damage is named."""

import errno
import os
from pathlib import Path

import pytest

from memagent import files
from memagent.errors import RunError
from memagent.run_files import Line, LineFile, read_lines, recover, truncate

TORN = [b'{"n":', b'{"n":1}', b"\x00\x00", b"[1]\n", b"not json\n"]
"""Ends of a file whose writer was killed; the last two are complete lines without a record."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    with LineFile(path) as lines:
        lines.append(b'{"n":0}', b'{"n":1}')
    return path


def test_lines_are_read_with_the_offsets_of_their_ends(path: Path) -> None:
    assert list(read_lines(path)) == [Line({"n": 0}, 8), Line({"n": 1}, 16)]


@pytest.mark.parametrize("torn", TORN, ids=repr)
def test_a_torn_end_is_passed_over_when_reading_and_cut_when_recovering(
    path: Path, torn: bytes
) -> None:
    path.write_bytes(path.read_bytes() + torn)
    assert [line.record for line in read_lines(path)] == [{"n": 0}, {"n": 1}]
    assert recover(path) == [{"n": 0}, {"n": 1}]
    assert path.read_bytes() == b'{"n":0}\n{"n":1}\n'


@pytest.mark.parametrize("damaged", [b"{\n", b"[]\n", b'"n"\n', b"\n", b"\xff\xfe\n"], ids=repr)
def test_damage_before_the_last_line_is_an_error_that_names_the_line(
    path: Path, damaged: bytes
) -> None:
    path.write_bytes(b'{"n":0}\n' + damaged + b'{"n":1}\n')
    with pytest.raises(RunError, match=r"lines\.jsonl, line 2, is damaged"):
        recover(path)
    assert path.read_bytes() == b'{"n":0}\n' + damaged + b'{"n":1}\n', "nothing is cut"


def test_records_may_be_made_smaller_before_they_are_held(path: Path) -> None:
    assert recover(path, lambda record: {"m": record["n"] * 10}) == [{"m": 0}, {"m": 10}]


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert recover(tmp_path / "none.jsonl") == []


def test_appending_continues_the_file(path: Path) -> None:
    with LineFile(path, sync=False) as lines:
        lines.append(b'{"n":2}')
    assert recover(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_full_disk_leaves_none_of_the_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def almost_full(descriptor: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:5])

    with LineFile(path) as lines:
        with monkeypatch.context() as patched:
            patched.setattr(files.os, "write", almost_full)
            with pytest.raises(OSError, match="No space left"):
                lines.append(b'{"n":2}', b'{"n":3}')
        lines.append(b'{"n":4}')
    assert recover(path) == [{"n": 0}, {"n": 1}, {"n": 4}]


def test_a_synced_line_is_on_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(
        "memagent.run_files._sync_data",
        lambda descriptor: synced.append(os.fstat(descriptor).st_size),
    )
    with LineFile(tmp_path / "a") as safe, LineFile(tmp_path / "b", sync=False) as quick:
        safe.append(b"{}")
        quick.append(b"{}")
        safe.append(b"{}")
    assert synced == [3, 6]


def test_truncating_cuts_and_never_extends(path: Path) -> None:
    truncate(path, 100)
    assert path.stat().st_size == 16
    truncate(path, 8)
    assert path.read_bytes() == b'{"n":0}\n'


def test_closing_twice_does_no_harm(path: Path) -> None:
    lines = LineFile(path)
    lines.close()
    lines.close()


def test_the_file_can_be_read_by_its_owner_only(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
