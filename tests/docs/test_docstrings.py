"""Examples in docstrings: those with `>>>` run, the others compile and call what exists."""

import doctest
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

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


# --- the check itself -----------------------------------------------------------------------------

SOURCE = '''"""A module with examples.

{example}
"""

from memagent import Document, Reader, open_engine
from memagent.types import Sampling
'''


def module_with(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "with_examples.py"
    path.write_text(SOURCE.format(example=example))
    module = ModuleType("with_examples")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "with_examples", module)
    return module


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ("    answer = Reader(engine, promts='x')", None),  # settings are free
        ("    Sampling(max_tokens=9, max_tokns=3)", "unexpected keyword argument 'max_tokns'"),
        ("    Sampling()", "missing a required argument: 'max_tokens'"),
        ("    Document.open('a.txt')", "Document has no open"),
        ("    opened_engine('openai:x')", "there is no opened_engine()"),
        ("    from memagent.eval.tasks import make_plan", "there is no memagent.eval.tasks"),
        ("    from memagent.documents.document import NoSuchDocument", "NoSuchDocument"),
        ("    trace = Reader(engine).ask('q', text)\n    trace.reply", "Trace has no reply"),
        ("    with open_engine('scripted:x') as engine\n        pass", "does not compile"),
        ("    engine = open_engine('openai:x')      what a note says", None),
        ("    Reader(engine).ask('q', Sampling(max_tokens=3))", None),  # a union
        ("    Document.join(Sampling(max_tokens=3))", "documents is"),
        ("    with Sampling(max_tokens=3) as sampling: ...", "Sampling is no context manager"),
        ("    Sampling(max_tokns=3, ...)", "unexpected keyword argument 'max_tokns'"),
        ("    Document.load('a.txt')     a note\n    Document.read('b.txt')    another", "no read"),
        ("    lower `window`      what is printed", None),
        ("    async with open_engine('openai:x') as engine: ...", None),
    ],
)
def test_a_wrong_example_is_found(
    example: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = wrong_examples(module_with(example, tmp_path, monkeypatch))
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert problem in found[0]
