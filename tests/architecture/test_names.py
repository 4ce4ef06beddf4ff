"""One meaning for each public class name: no two classes of the package share one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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


def test_a_repeated_name_would_be_found() -> None:
    sources = {
        "a.py": "class Plan: ...\nclass _Part: ...",
        "b.py": "class Plan: ...\nclass _Part: ...\nclass Reader:\n    class Config: ...",
        "c.py": "class Config: ...",
    }
    assert repeated(sources) == {"Plan": ["a.py", "b.py"]}
