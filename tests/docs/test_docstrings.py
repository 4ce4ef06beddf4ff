"""Examples in docstrings: those with `>>>` run, the others compile and call what exists."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.examples import examples, sources, wrong_examples

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SOURCES = sources()
WITH_EXAMPLES = [name for name, source in SOURCES.items() if any(examples(source))]
WITH_PROMPTS = [name for name, source in SOURCES.items() if ">>> " in source]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_an_example_compiles_and_calls_what_exists(name: str) -> None:
    assert wrong_examples(import_module(name)) == []


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_an_example_with_a_prompt_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(import_module(name), optionflags=FLAGS)
    assert attempted > 0
    assert failed == 0
