"""Files and folders that are complete or not there."""

import errno
import os
from pathlib import Path

import pytest

from memagent import files
from memagent.files import (
    evict_oldest,
    mark_used,
    reason_of,
    replacing,
    replacing_folder,
    size_of,
    write_all,
    write_atomically,
)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, b"one")
    write_atomically(path, b"two", mode=0o644)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names_in(tmp_path) == ["a.txt"]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, b"old")

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert (path.read_bytes(), names_in(tmp_path)) == (b"old", ["a.txt"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_writing_to_a_full_device_is_an_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            write_all(descriptor, b"data")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("sync", [True, False])
def test_a_path_to_write_to_becomes_the_file(tmp_path: Path, sync: bool) -> None:
    with replacing(tmp_path / "a.txt", sync=sync) as part:
        part.write_text("all of it")
        assert names_in(tmp_path) == [part.name]
        assert part.name.startswith(".a.txt.")
    assert (tmp_path / "a.txt").read_text() == "all of it"
    assert names_in(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "a.txt").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "a.txt") as part:
            part.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert ((tmp_path / "a.txt").read_text(), names_in(tmp_path)) == ("old", ["a.txt"])


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as one, replacing(path) as two:
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert path.read_text() == "one", "the last to finish"


def test_a_folder_appears_with_everything_in_it(tmp_path: Path) -> None:
    with replacing_folder(tmp_path / "model") as part:
        (part / "inner").mkdir()
        (part / "inner" / "a").write_text("a")
        (part / "b").write_text("b")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "inner" / "a").read_text() == "a"
    assert names_in(tmp_path) == ["model"]


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing_folder(tmp_path / "model") as part:
            (part / "b").write_text("b")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert names_in(tmp_path) == []


def test_what_a_killed_writer_left_of_a_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model").mkdir()
    (tmp_path / ".model" / "stale").write_text("stale")
    with replacing_folder(tmp_path / "model") as part:
        (part / "b").write_text("b")
    assert names_in(tmp_path / "model") == ["b"]


def test_everything_in_a_folder_is_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync_file, sync_folder = files.sync_file, files.sync_folder
    monkeypatch.setattr(files, "sync_file", lambda p: (synced.append(p.name), sync_file(p)))
    monkeypatch.setattr(files, "sync_folder", lambda p: (synced.append(p.name), sync_folder(p)))
    with replacing_folder(tmp_path / "model") as part:
        (part / "b").write_text("b")
    assert synced == ["b", ".model", tmp_path.name]


def test_too_many_open_files_come_with_a_remedy() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert reason_of(error).endswith("raise the limit with `ulimit -n`")
    assert reason_of(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert reason_of(OSError("just words")) == "just words"


def test_what_was_not_used_for_longest_leaves_a_cache_that_is_too_large(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / f"folder {number}"
        folder.mkdir()
        (folder / "file").write_bytes(b"x" * 100)
        os.utime(folder, (number, number))
    (tmp_path / ".file.part").write_bytes(b"x" * 100)
    (tmp_path / "file").write_bytes(b"x" * 100)
    os.utime(tmp_path / "file", (2.5, 2.5))
    mark_used(tmp_path / "folder 1")
    keep = tmp_path / "folder 0"
    evict_oldest(tmp_path, max_bytes=500, keep=keep)
    assert len(names_in(tmp_path)) == 6
    evict_oldest(tmp_path, max_bytes=250, keep=keep)
    assert names_in(tmp_path) == [".file.part", "folder 0", "folder 1"]
    assert [size_of(tmp_path), size_of(tmp_path / ".file.part"), size_of(keep)] == [300, 100, 100]
    evict_oldest(tmp_path / "nothing", max_bytes=0, keep=keep)
