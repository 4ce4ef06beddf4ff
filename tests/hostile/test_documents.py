"""Files that were made to take time, memory, or text from elsewhere: read or refused in one line."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memagent.documents import loaders
from memagent.documents.formats.notebook import _last_states
from memagent.documents.loaders import load, load_bytes, load_with_report
from memagent.documents.tree import _quick
from memagent.errors import DocumentError


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
