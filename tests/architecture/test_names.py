"""Names that tell: no two public classes share one, and every folder says what is in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "memagent"


def public_classes(source: str) -> Iterator[str]:
    """Names of the classes that a module defines at its top; private ones are exempt."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names that several modules use for a class, with the modules."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for name in public_classes(source):
            homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_public_class_names_are_unique() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in paths}
    assert repeated(sources) == {}


# --- folders ----------------------------------------------------------------------------------------

MAX_ENTRIES = 16
"""What fits on one screen of a file browser."""


def folders() -> list[Path]:
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_each_folder_explains_itself_and_fits_on_a_screen(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    assert docstring is not None
    assert len(docstring.splitlines()) >= 2
    entries = [path for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__")]
    assert len(entries) <= MAX_ENTRIES
