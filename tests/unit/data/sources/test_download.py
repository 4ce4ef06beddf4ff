"""Downloads over a loopback server that cuts connections, forgets ranges and fails."""

import hashlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent.data.sources.cache import MAX_FRUITLESS, Fetched, download
from memagent.errors import DataError
from tests.support.file_server import FileServer, serving

DATA = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving(DATA) as running:
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "file.json"


def fetch(server: FileServer, target: Path, sha256: str | None = SHA256) -> None:
    download(server.url, target, num_bytes=len(DATA), sha256=sha256, first_delay_seconds=0.001)


def test_a_file_arrives_complete_and_reports_its_progress(server: FileServer, target: Path) -> None:
    seen: list[Fetched] = []
    download(server.url, target, num_bytes=len(DATA), sha256=SHA256, on_progress=seen.append)
    assert target.read_bytes() == DATA
    assert [path.name for path in target.parent.iterdir()] == ["file.json"]
    assert seen[-1] == Fetched(num_bytes=300_000, total_bytes=300_000)
    assert [one.num_bytes for one in seen] == sorted({one.num_bytes for one in seen})


def test_a_broken_download_resumes_where_it_stopped(server: FileServer, target: Path) -> None:
    server.cut_after = [1000, 0, 99_000]
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert server.asked == [None, "bytes=1000-", "bytes=1000-", "bytes=100000-"]


def test_a_later_call_resumes_from_the_part_that_is_there(server: FileServer, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("file.json.part").write_bytes(DATA[:250_000])
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert server.asked == ["bytes=250000-"]


@pytest.mark.parametrize("there", [DATA, DATA + b"more"], ids=["complete", "of a longer file"])
def test_a_part_is_renamed_or_dropped(server: FileServer, target: Path, there: bytes) -> None:
    target.parent.mkdir()
    target.with_name("file.json.part").write_bytes(there)
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_a_server_without_ranges_sends_all_again(server: FileServer, target: Path) -> None:
    server.knows_ranges = False
    server.cut_after = [1000]
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_errors_of_the_moment_are_tried_again(server: FileServer, target: Path) -> None:
    server.statuses = [503, 429, 500]
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert len(server.asked) == 4


def test_a_server_that_keeps_failing_ends_the_download(server: FileServer, target: Path) -> None:
    server.statuses = [503] * 100
    with pytest.raises(
        DataError, match=r"cannot fetch http.*file\.json \(HTTP 503\); run it again"
    ):
        fetch(server, target)
    assert len(server.asked) == MAX_FRUITLESS


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_not_repeated(server: FileServer, target: Path, status: int) -> None:
    server.statuses = [status] * 3
    with pytest.raises(DataError, match=f"HTTP {status}"):
        fetch(server, target)
    assert len(server.asked) == 1


def test_what_arrived_before_giving_up_is_kept(server: FileServer, target: Path) -> None:
    server.cut_after = [70_000] + [0] * MAX_FRUITLESS
    with pytest.raises(DataError, match=r"the connection was cut at 70,000 of 300,000 bytes"):
        fetch(server, target)
    assert not target.exists()
    assert target.with_name("file.json.part").read_bytes() == DATA[:70_000]
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_another_file_than_published_is_deleted(server: FileServer, target: Path) -> None:
    with pytest.raises(DataError, match=r"is not the published file \(sha256 .*, not 0000"):
        fetch(server, target, sha256="0" * 64)
    assert list(target.parent.iterdir()) == []


def test_a_file_of_another_size_than_published_is_deleted(server: FileServer, target: Path) -> None:
    server.data = DATA[:1000]
    with pytest.raises(DataError, match="is 1,000 bytes long, not 300,000 as published"):
        fetch(server, target)
    assert list(target.parent.iterdir()) == []


def test_nobody_there_is_one_line(target: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file.json"
    with pytest.raises(DataError, match=r"Connection refused.*; run it again to resume, or ask me"):
        download(url, target, elsewhere="ask me", first_delay_seconds=0.001)


def test_a_folder_that_cannot_be_created_is_one_line(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set XDG_CACHE_HOME to a folder of yours"):
        fetch(server, tmp_path / "file" / "file.json")
