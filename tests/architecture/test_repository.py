"""The repository itself: nothing of any one machine in it, one licence, one place for the version."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from platformdirs import user_cache_path, user_config_path, user_data_path, user_state_path

from memagent import __version__

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = tuple(f"/{folder}/" for folder in ("work", "root"))
"""Paths of some machine. Put together here, or this file would be found itself."""
NOT_OURS = ("__pycache__", "runs", "dist", "build")


def our_files(root: Path) -> list[Path]:
    """The files under version control or about to be; all but hidden folders where git is missing."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") and (root / ".git").exists():
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode == 0:
            paths = (root / name for name in done.stdout.split("\0") if name)
            return sorted(path for path in paths if path.is_file())
    return sorted(_walk(root))


def _walk(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in NOT_OURS]
        found += [Path(folder) / name for name in names]
    return found


def lines_with(word: str, path: Path) -> list[str]:
    """`file:line` of each line of a text file that has the word; none for a binary file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [f"{path.name}:{number}" for number, line in enumerate(lines, start=1) if word in line]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_file_names_a_path_of_some_machine(word: str) -> None:
    assert [hit for path in our_files(ROOT) for hit in lines_with(word, path)] == []


def test_the_licence_is_apache_2() -> None:
    head = (ROOT / "LICENSE").read_text().split("\n\n")[0]
    assert re.sub(r"\s+", " ", head).strip().startswith("Apache License Version 2.0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"


def test_the_version_is_written_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    home = ROOT / project["tool"]["hatch"]["version"]["path"]
    written = re.compile(rf"""(?<![\w.=]){re.escape(__version__)}(?![\w.])""")
    found = [
        path
        for path in our_files(ROOT)
        if path.suffix in (".py", ".md", ".toml") and written.search(path.read_text("utf-8"))
    ]
    assert found == [home]


def test_continuous_integration_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.fixture(scope="session")
def folders_of_the_session() -> list[Path]:
    """Where a fixture that outlives a test would write."""
    found = (user_cache_path, user_state_path, user_data_path, user_config_path)
    return [Path.home(), *(path("memagent", appauthor=False) for path in found)]


def test_no_fixture_and_no_test_uses_folders_of_the_user(
    folders_of_the_session: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp()
    assert [path for path in folders_of_the_session if not path.is_relative_to(base)] == []
