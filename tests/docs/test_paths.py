"""Files, modules and functions that the pages name exist where the pages say."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    if path.name != "CHANGELOG.md"
]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]

_path = re.compile(r"`((?:src|tests|docs|configs|benchmarks|examples|memagent)/[\w./-]+)`")
_script = re.compile(r"python (?:-m (benchmarks\.\w+)|((?:docs|examples)/\w+\.py))")
_module = re.compile(r"`(memagent(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?)`")
_function = re.compile(r"\[`([\w.]+)`\]\((src/memagent/[\w/]+\.py)\)")


def named_paths(page: str) -> list[str]:
    """Paths in backticks; those with NAME in capitals stand for any."""
    found = [name for name in _path.findall(page) if "NAME" not in name]
    return [f"src/{name}" if name.startswith("memagent/") else name for name in found]


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names of functions, classes, methods and constants of a module: `Reader`, `Reader.steps`."""
    return frozenset(_defined(ast.parse(path.read_text("utf-8")).body, prefix=""))


def _defined(body: list[ast.stmt], *, prefix: str) -> list[str]:
    names: list[str] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            names += [prefix + node.name, *_defined(node.body, prefix=f"{prefix}{node.name}.")]
        elif isinstance(node, ast.Assign):
            names += [prefix + one.id for one in node.targets if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(prefix + node.target.id)
    return names


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_paths_that_a_page_names_exist(path: Path) -> None:
    page = path.read_text("utf-8")
    scripts = [
        module.replace(".", "/") + ".py" if module else script
        for module, script in _script.findall(page)
    ]
    missing = [name for name in [*named_paths(page), *scripts] if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_modules_that_a_page_names_exist(path: Path) -> None:
    for name in _module.findall(path.read_text("utf-8")):
        parts = name.split(".")
        places = [ROOT.joinpath("src", *parts[:end]) for end in range(len(parts), 0, -1)]
        home = next(
            place for place in places if place.is_dir() or place.with_suffix(".py").exists()
        )
        rest = ".".join(parts[len(home.relative_to(ROOT / "src").parts) :])
        source = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
        assert not rest or rest in definitions(source) or rest in source.read_text(), name


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_functions_that_a_page_links_are_defined_there(path: Path) -> None:
    links = _function.findall(path.read_text("utf-8"))
    missing = [
        (name, file)
        for name, file in links
        if not (ROOT / file).exists() or name not in definitions(ROOT / file)
    ]
    assert missing == []


def test_the_architecture_walks_through_linked_functions() -> None:
    walked = _function.findall((ROOT / "ARCHITECTURE.md").read_text("utf-8"))
    assert len(walked) >= 30
    assert ("read_in_order", "src/memagent/agent/reading.py") in walked


def test_the_picture_of_the_rooms_names_every_folder_and_module_of_the_first_row() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    package = ROOT / "src" / "memagent"
    folders = [path.parent for path in package.rglob("__init__.py") if path.parent != package]
    missing = [folder.name for folder in folders if f"{folder.name}/" not in page]
    modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith("_")]
    missing += [name for name in modules if not re.search(rf"^row 0 .*\b{name}\b", page, re.M)]
    assert missing == []
