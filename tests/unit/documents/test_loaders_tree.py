"""Folders: which files are read, in which order, under which names, and what is left out."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from memagent.documents.loaders import lines_of_skipped, load, load_with_report
from memagent.documents.tree import Skipped
from memagent.errors import DocumentError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder `tree` inside the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def fill(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def sources(path: str | Path = "tree") -> list[str]:
    return [part.source.removeprefix("tree/") for part in load([path]).parts]


def test_a_folder_is_read_in_order_and_its_files_are_named_from_it(folder: Path) -> None:
    fill(folder, {"b/z.py": "z", "b/a.py": "a", "c.txt": "c", "a/deep/x.md": "x", "README": "r"})
    document = load(["tree"])
    assert [part.source for part in document.parts] == [
        *("tree/README", "tree/c.txt", "tree/a/deep/x.md", "tree/b/a.py", "tree/b/z.py")
    ]
    assert [document.text[part.start : part.end] for part in document.parts] == [*"rcxaz"]
    assert document.text.startswith("===== tree/README =====\nr\n\n===== tree/c.txt =====\nc\n\n")


@pytest.mark.parametrize(
    ("written", "source"), [(".", "tree/a.txt"), ("./tree/", "tree/a.txt"), ("../here/tree", None)]
)
def test_names_follow_what_the_user_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, source: str | None
) -> None:
    fill(tmp_path / "here", {"tree/a.txt": "a"})
    monkeypatch.chdir(tmp_path / "here")
    assert load([written]).source == (source or f"{written}/a.txt")


def test_the_only_file_of_a_folder_gets_no_heading_but_keeps_its_name(folder: Path) -> None:
    fill(folder, {"a.txt": "alone", "empty.txt": ""})
    document = load(["tree"])
    assert (document.text, document.source) == ("alone", "tree/a.txt")


def test_files_and_folders_are_joined(folder: Path, tmp_path: Path) -> None:
    fill(folder, {"a.txt": "a", "b.txt": "b"})
    fill(tmp_path, {"notes.md": "n"})
    assert [part.source for part in load(["notes.md", "tree"]).parts] == [
        *("notes.md", "tree/a.txt", "tree/b.txt")
    ]


# --- .gitignore -----------------------------------------------------------------------------------


def test_ignored_files_are_left_out_and_negation_takes_them_back(folder: Path) -> None:
    fill(
        folder,
        {
            ".gitignore": "\ufeff*.log\r\n!keep.log\n\n  \nbuild/\n/top.txt\n# comment\n",
            "run.log": "x",
            "keep.log": "x",
            "build/out.txt": "x",
            "src/build/out.txt": "x",
            "top.txt": "x",
            "src/top.txt": "x",
            "src/deep/run.log": "x",
        },
    )
    assert sources() == ["keep.log", "src/top.txt"]


def test_an_inner_gitignore_overrules_the_outer_one_below_it(folder: Path) -> None:
    fill(
        folder,
        {
            ".gitignore": "*.csv\n",
            "a.csv": "x",
            "data/.gitignore": "!*.csv\n*.tmp\n",
            "data/b.csv": "x",
            "data/c.tmp": "x",
            "data/sub/.gitignore": "/d.csv\n",
            "data/sub/d.csv": "x",
            "data/sub/deeper/d.csv": "x",
            "e.tmp": "x",
        },
    )
    assert sources() == ["e.tmp", "data/b.csv", "data/sub/deeper/d.csv"]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [  # each as git itself decides
        ("*\n!*/\n!*.py", ["src/a.py", "src/pkg/c.py"]),
        ("/*\n!/src", ["src/a.py", "src/b.txt", "src/pkg/c.py"]),
        ("/*\n!/src/\n/src/*\n!/src/pkg/", ["src/pkg/c.py"]),
        ("src/\nbuild/\ndata/*\n!data/keep.log", ["data/keep.log"]),
        ("src/\nbuild/\ndata/**\n!keep.log", ["data/keep.log"]),
        ("src\nbuild\ndata/**\n!data/**/\n!data/**/*.csv", ["data/a.csv", "data/sub/d.csv"]),
        ("data/\n!data/keep.log\nsrc", ["build/x"]),
        ("**/pkg\n*.txt\n/data\n**/build/**", ["src/a.py"]),
        (
            "src/**/c.py\n*.log\n!\n[\n\\\ndata/sub/\nbuild/",
            ["data/a.csv", "src/a.py", "src/b.txt"],
        ),
    ],
)
def test_the_usual_ways_to_write_gitignore_work(folder: Path, rules: str, kept: list[str]) -> None:
    names = "src/a.py src/b.txt src/pkg/c.py data/a.csv data/keep.log data/sub/d.csv build/x"
    fill(folder, {".gitignore": rules, **dict.fromkeys(names.split(), "x")})
    assert sources() == kept


def test_rules_of_the_repository_hold_for_a_folder_inside_it(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "*.log", "sub/tree/a.log": "x", "sub/tree/a.txt": "x"})
    assert [Path(name).name for name in sources(tmp_path / "sub" / "tree")] == ["a.log", "a.txt"]
    (tmp_path / ".git").mkdir()
    assert [Path(name).name for name in sources(tmp_path / "sub" / "tree")] == ["a.txt"]


def test_an_ignored_folder_is_read_when_it_is_asked_for_by_name(tmp_path: Path) -> None:
    fill(tmp_path, {".gitignore": "build/", "build/a.txt": "x", "build/b.log": "x"})
    (tmp_path / ".git").mkdir()
    assert len(sources(tmp_path / "build")) == 2


def test_gitignore_without_pathspec_is_an_error_that_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder, {"a.txt": "x", "sub/.gitignore": "*.log"})
    monkeypatch.setitem(sys.modules, "pathspec", None)
    with pytest.raises(DocumentError, match=r'pathspec: pip install "memagent\[documents\]"'):
        load(["tree"])


# --- left out -------------------------------------------------------------------------------------


def test_version_control_caches_and_hidden_files_are_left_out(folder: Path) -> None:
    hidden = ".git/config .hg/x .svn/x .cache/x .venv/lib/x.py .env .ssh/id_rsa .mypy_cache/x.json"
    machine_made = "__pycache__/a.pyc node_modules/m/index.js CVS/Root env/pyvenv.cfg env/x.py"
    marked = "target/CACHEDIR.TAG target/debug/x.txt"
    kept = [".github/workflows/ci.yml", "env.py", "src/a.py"]
    names = [*f"{hidden} {machine_made} {marked}".split(), *kept]
    fill(folder, dict.fromkeys(names, "x"))
    loaded = load_with_report(["tree"])
    assert sorted(part.source.removeprefix("tree/") for part in loaded.document.parts) == kept
    assert loaded.skipped == ()


def test_links_neither_loop_nor_repeat_what_is_read_anyway(folder: Path, tmp_path: Path) -> None:
    fill(folder, {"a.txt": "a", "sub/b.txt": "b"})
    fill(tmp_path, {"outside.txt": "o", "elsewhere/c.txt": "c"})
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "same.txt").symlink_to(folder / "a.txt")
    (folder / "linked.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "elsewhere").symlink_to(tmp_path / "elsewhere")
    assert sources() == ["a.txt", "sub/b.txt"]
    (skipped,) = load_with_report(["tree"]).skipped
    assert skipped.source == "tree/linked.txt"
    assert skipped.reason == "is a link that leads out of the folder; name the file itself"


def test_a_link_to_the_folder_is_read_under_the_name_of_the_link(
    folder: Path, tmp_path: Path
) -> None:
    fill(folder, {"a.txt": "a"})
    (tmp_path / "link").symlink_to(folder)
    assert load(["link"]).source == "link/a.txt"


def test_pipes_in_a_folder_are_not_waited_for(folder: Path) -> None:
    fill(folder, {"a.txt": "a"})
    os.mkfifo(folder / "pipe")
    assert sources() == ["a.txt"]


def test_a_name_that_is_not_utf8_can_be_read(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/t\xe9.txt", "w") as file:
        file.write("text")
    document = load(["tree"])
    assert (document.text, document.source) == ("text", r"tree/t\udce9.txt")


# --- reported -------------------------------------------------------------------------------------


def test_documents_in_a_folder_are_read_by_their_format(folder: Path) -> None:
    fill(folder, {"a.html": "<p>A &amp; B</p>", "b.jsonl": '{"role": "user", "content": "Hi"}'})
    document = load(["tree"])
    texts = [document.text[part.start : part.end] for part in document.parts]
    assert texts == ["A & B", "user: Hi"]


def test_files_that_cannot_be_read_are_reported_and_the_rest_is_read(folder: Path) -> None:
    fill(
        folder,
        {
            "a.txt": "fine",
            "broken.pdf": b"%PDF-1.4 nothing else",
            "empty.py": "",
            "picture.png": b"\x89PNG\r\n\x1a\n\0\0",
            "mixed.txt": "é".encode() * 50 + b"\xff",
        },
    )
    (folder / "dangling.txt").symlink_to("/nowhere/at/all.txt")
    loaded = load_with_report(["tree"])
    assert loaded.document.text == "fine"
    assert [Path(item.source).name for item in loaded.skipped] == [
        *("broken.pdf", "dangling.txt", "mixed.txt", "picture.png")
    ]
    assert [item.reason.split(" (")[0].split(";")[0] for item in loaded.skipped] == [
        "is not a readable pdf file",
        "is a link to a file that does not exist",
        "is utf-8 but for byte 100",
        "is binary, not text",
    ]
    assert not any("\n" in item.reason for item in loaded.skipped)
    assert load(["tree"]) == loaded.document


def test_many_files_that_are_skipped_for_one_reason_share_a_line() -> None:
    binary = [Skipped(f"bin/{number}", "is binary, not text") for number in range(1200)]
    links = [Skipped(f"links/{number}", "is a link") for number in range(3)]
    assert lines_of_skipped([*binary[:600], *links, *binary[600:]]) == [
        "skipped 1,200 files, such as bin/0, bin/1, bin/2: each is binary, not text",
        *(f"skipped links/{number}: is a link" for number in range(3)),
    ]
    assert lines_of_skipped([]) == []


def test_a_report_of_skipped_files_has_an_end() -> None:
    damaged = [Skipped(f"{number}.txt", f"is damaged at {number}") for number in range(100)]
    lines = lines_of_skipped(damaged)
    assert (len(lines), lines[-1]) == (21, "... 80 more lines")


def test_a_folder_without_text_is_refused_and_says_what_it_met(folder: Path) -> None:
    with pytest.raises(DocumentError, match=r"tree has no readable text files \(none\)"):
        load(["tree"])
    fill(folder, {"a.bin": b"\0\0", "empty.txt": ""})
    with pytest.raises(DocumentError, match=r"\(1 skipped, the first: tree/a.bin is binary"):
        load(["tree"])


def test_run_directories_in_a_folder_are_no_text(folder: Path) -> None:
    fill(folder, {"a.txt": "fine", "run.json": "{}", "mine/run.json": "{}", "mine/b.txt": "kept"})
    fill(
        folder, {f"runs/one/{name}": "{}" for name in ("run.json", "steps.jsonl", "carried.jsonl")}
    )
    fill(folder, {"runs/begun/run.json": "{}", "runs/begun/.lock": ""})
    loaded = load_with_report(["tree"])
    assert [part.source for part in loaded.document.parts] == [
        *("tree/a.txt", "tree/run.json", "tree/mine/b.txt", "tree/mine/run.json")
    ]
    assert loaded.skipped == ()
    assert "{}" in load(["tree/runs/one"]).text, "it was named"
