"""The house stays small: upper bounds of its lines, settings, options and walks, and its public names.

Whoever makes something smaller lowers the bound. `python tools/count.py` and `python tools/walk.py` print the figures.
"""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import memagent

ROOT = Path(__file__).resolve().parents[2]

MAX_LINES = 62_193
MAX_FILES = 269
MAX_TEST_LINES = 58_469
MAX_SETTINGS = 272
MAX_OPTIONS = {"ask": 25, "eval run": 25, "serve run": 18, "mcp": 15, "data filter": 16}
MAX_OTHER_OPTIONS = 22
"""Of every command that is not named above."""
MAX_FUNCTION_LINES = 90
MAX_P90_LINES = 35
WALKS = {
    "ask": (298, 39),
    "ask-evidence": (336, 39),
    "ask-parallel": (324, 40),
    "reader": (98, 21),
    "item": (390, 57),
    "gateway": (270, 38),
    "gateway-short": (107, 19),
    "train": (443, 64),
}
"""Functions of the package that are entered, and files they are in."""
PUBLIC_NAMES = {
    "Chunk",
    "Document",
    "MemagentError",
    "Reader",
    "Step",
    "Trace",
    "__version__",
    "open_engine",
}


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def printed_by(script: str, *arguments: str) -> list[str]:
    """Lines that a script of tools/ prints in a process that has imported nothing yet."""
    command = [sys.executable, str(ROOT / "tools" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def count() -> ModuleType:
    return load_tool("count")


def test_source_and_tests_do_not_grow(count: ModuleType) -> None:
    source = count.source_files()
    assert count.num_lines(source) <= MAX_LINES
    assert len(source) <= MAX_FILES
    assert count.num_lines(count.source_files(ROOT / "tests")) <= MAX_TEST_LINES


def test_functions_fit_on_a_screen(count: ModuleType) -> None:
    found = sorted(count.functions(count.source_files()), key=lambda one: one.num_lines)
    assert [one for one in found if one.num_lines > MAX_FUNCTION_LINES] == []
    assert found[len(found) * 9 // 10].num_lines <= MAX_P90_LINES


def test_settings_and_options_do_not_grow() -> None:
    lines = printed_by("count.py")
    (settings,) = (line.split()[0] for line in lines if " settings in " in line)
    assert int(settings) <= MAX_SETTINGS
    counted = (line.split(" options  memagent ") for line in lines if " options  " in line)
    options = {name: int(number) for number, name in counted}
    assert MAX_OPTIONS.keys() <= options.keys()
    limits = {name: MAX_OPTIONS.get(name, MAX_OTHER_OPTIONS) for name in options}
    assert {name: number for name, number in options.items() if number > limits[name]} == {}


@pytest.mark.parametrize("name", WALKS)
def test_walks_do_not_grow(name: str) -> None:
    functions, files, _ = map(int, printed_by("walk.py", name)[-1].split()[1:])
    assert functions <= WALKS[name][0]
    assert files <= WALKS[name][1]


def test_public_names_are_these() -> None:
    assert set(memagent.__all__) == PUBLIC_NAMES
    assert all(hasattr(memagent, name) for name in PUBLIC_NAMES)
