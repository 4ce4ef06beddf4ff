"""Examples in docstrings: those with `>>>` run, the others compile and call what exists."""

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.examples import as_module, examples, sources

ROOT = Path(__file__).resolve().parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SOURCES = sources()
WITH_EXAMPLES = [name for name, source in SOURCES.items() if any(examples(source))]
WITH_PROMPTS = [name for name, source in SOURCES.items() if ">>> " in source]


@pytest.mark.timeout(900)  # mypy reads the whole package, if it has not yet
def test_examples_compile_and_call_what_exists(tmp_path: Path) -> None:
    for name in WITH_EXAMPLES:
        (tmp_path / f"{name.replace('.', '_')}_examples.py").write_text(as_module(name))
    settings = ["--config-file", "pyproject.toml", "--cache-dir", ".mypy_cache"]
    command = [sys.executable, "-m", "mypy", *settings, str(tmp_path)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_an_example_with_a_prompt_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(import_module(name), optionflags=FLAGS)
    assert attempted > 0
    assert failed == 0
