"""`memagent data sources`: listed with licences, fetched, found, compared with what is published."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memagent.cli.main import run
from memagent.data import choices as sources
from memagent.data.choices import Source
from memagent.data.sources.cache import sha256_of
from tests.support.file_server import FileServer, serving

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """`tiny` is a source that a loopback server has; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(json.dumps(["x" * 2000]).encode(), "tiny.json") as running:
        tiny = Source(kind="hotpotqa", what="tiny", licence="CC0", url=running.url)
        monkeypatch.setitem(sources.SOURCES, "tiny", tiny)
        yield running


def test_the_list_shows_licences_and_what_is_here(
    server: FileServer, tmp_path: Path, capsys: Capture
) -> None:
    assert run(["data", "sources"]) == 0
    listed = capsys.readouterr().out
    assert run(["data", "sources", "list"]) == 0
    assert capsys.readouterr().out == listed
    rows = [line.split() for line in listed.splitlines()]
    assert rows[:6] == [
        ["NAME", "SIZE", "LICENCE", "WHERE"],
        ["hotpotqa-train", "566", "MB", "CC", "BY-SA", "4.0", "not", "fetched"],
        ["hotpotqa-dev", "46", "MB", "CC", "BY-SA", "4.0", "not", "fetched"],
        ["hotpotqa-paragraphs", "CC", "BY-SA", "4.0", "not", "derived"],
        ["squad-dev", "4", "MB", "CC", "BY-SA", "4.0", "not", "fetched"],
        ["essays", "yours", "a", "folder", "of", "yours"],
    ]
    run(["data", "sources", "pull", "tiny"])
    capsys.readouterr()
    run(["data", "sources"])
    here = tmp_path / "memagent" / "sources" / "tiny.json"
    assert ["tiny", "CC0", str(here)] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_pull_prints_the_path_and_resumes_a_broken_download(
    server: FileServer, tmp_path: Path, capsys: Capture
) -> None:
    server.cut_after = [500]
    assert run(["data", "sources", "pull", "tiny"]) == 0
    output, errors = capsys.readouterr()
    path = tmp_path / "memagent" / "sources" / "tiny.json"
    assert output == f"{path}\n"
    assert errors == f"fetching tiny: {server.url}, licence CC0\n"
    assert path.read_bytes() == server.data
    assert server.asked == [None, "bytes=500-"]


def test_path_does_not_fetch(server: FileServer, capsys: Capture) -> None:
    assert run(["data", "sources", "path", "tiny"]) == 2
    assert "run `memagent data sources pull tiny`" in capsys.readouterr().err
    assert server.asked == []
    run(["data", "sources", "pull", "tiny"])
    pulled = capsys.readouterr().out
    assert run(["data", "sources", "path", "tiny"]) == 0
    assert capsys.readouterr().out == pulled


def test_check_distinguishes_the_published_file_from_another(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_bytes(server.data)
    published = replace(sources.SOURCES["tiny"], sha256=sha256_of(mine))
    assert run(["data", "sources", "check", "tiny", str(mine)]) == 0
    assert capsys.readouterr().out.endswith("(no checksum of tiny is published)\n")
    monkeypatch.setitem(sources.SOURCES, "tiny", published)
    assert run(["data", "sources", "check", "tiny", str(mine)]) == 0
    assert capsys.readouterr().out == f"{published.sha256}  as published\n"
    mine.write_text("[]")
    assert run(["data", "sources", "check", "tiny", str(mine)]) == 1
    assert capsys.readouterr().out == f"{sha256_of(mine)}  not as published ({published.sha256})\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "tiny", "squad"], "there is no source 'squad'; did you mean squad-dev?"),
        (["path", "nothing"], "there is no source 'nothing'; known: hotpotqa-train"),
        (["pull", "essays"], "essays are texts of yours"),
        (["path", "essays"], "essays are texts of yours"),
        (["check", "tiny", "nowhere.json"], "nowhere.json does not exist"),
        (["pull"], "Missing argument 'NAME...'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, server: FileServer, capsys: Capture
) -> None:
    assert run(["data", "sources", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert message in errors
    assert server.asked == []
