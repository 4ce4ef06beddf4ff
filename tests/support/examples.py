"""The examples in docstrings, and modules of them that mypy checks without running them.

    as_module("memagent.agent.reader")     # a function for the examples of each object that is documented

A paragraph of a docstring is an example if it is Python and calls something, also with notes beside the
calls. Names come from the module, from memagent and from the example itself. An unknown name that is only
used is a placeholder; one that is called is wrong.
"""

import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

import memagent

NOT_IMPORTED = ("memagent.engines.local.cuda.kernels", "memagent.__main__")
"""Needs Triton; runs the command."""
STARTS = re.compile(
    r"(async )?(with|for|def) .*:|from [\w.]+ import \w|import \w|[a-z_][\w.]*( = |\(.*\)$)|await "
)
NOTE = re.compile(r"^(\s*)(\S.*?\S) {2,}(\S.*)$", re.MULTILINE)
PLAIN = re.compile(r"\[+\w[\w.]*\]+$|[$#] ", re.MULTILINE)
"""Lines of TOML and of a shell."""
LENIENT = '# mypy: no-strict-optional, allow-untyped-defs, disable-error-code="unreachable, no-untyped-def"'
USUAL = (
    f"{LENIENT}\nimport asyncio\nimport json\nfrom pathlib import Path\nfrom typing import Any\n"
)
"""What examples need not import."""
MORE = re.compile(r"(?<=[(,])\s*\.\.\.\)")
"""Arguments that are left out."""


class Example(NamedTuple):
    """One example of a docstring."""

    owner: str
    """What it documents, such as `Reader.ask`; empty for a module."""
    text: str


def sources() -> dict[str, str]:
    """The source of every module of the package that can be imported here."""
    root = Path(str(memagent.__file__)).parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return {name: source for name, source in found.items() if name not in NOT_IMPORTED}


def examples(source: str) -> Iterator[Example]:
    """The examples in the docstrings of a module; those that do not compile as they are."""
    for owner, docstring in _docstrings(ast.parse(source), ""):
        for paragraph in re.split(r"\n\s*\n", docstring):
            text = dedent(paragraph).removeprefix("Example: ")
            if ">>>" in text or PLAIN.search(text):
                continue  # doctest runs the first; the others are no Python
            code = _code(text)
            if code is None and STARTS.match(text):
                yield Example(owner, text)
            elif code is not None and _calls_something(code):
                yield Example(owner, code)


def as_module(name: str) -> str:
    """The examples of a module as functions, whose parameters are the placeholders."""
    bodies: dict[str, str] = {}
    for example in examples(sources()[name]):
        bodies[example.owner] = bodies.get(example.owner, "") + example.text + "\n"
    own = vars(importlib.import_module(name))
    lines = [USUAL]
    for number, (owner, body) in enumerate(bodies.items()):
        placeholders, imports = ["more: Any"], []
        for one, is_called in sorted(_unbound(body).items()):
            is_public = one in public_names() and (is_called or one[0].isupper())
            if one in own or is_public:
                home = name if one in own else public_names()[one]
                imports.append(
                    f"from {home} import {one}  # type: ignore[attr-defined, unused-ignore]"
                )
            elif not is_called:
                placeholders.append(f"{one}: Any")
        lines.append(f"async def example_{number}({', '.join(placeholders)}) -> Any:  # {owner}")
        lines.append(indent("\n".join([*imports, body]), "    "))
    return "\n".join(lines)


@cache
def public_names() -> dict[str, str]:
    """The module of each function and class of the package by its name, but for names that several have."""
    homes: dict[str, set[str]] = {}
    for name in sources():
        for one, value in vars(importlib.import_module(name)).items():
            if getattr(value, "__module__", None) == name and not one.startswith("_"):
                homes.setdefault(one, set()).add(name)
    return {one: modules.pop() for one, modules in homes.items() if len(modules) == 1}


def _docstrings(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if docstring := ast.get_docstring(node):
            yield path, docstring
        for child in node.body:
            if name := getattr(child, "name", ""):
                yield from _docstrings(child, f"{path}.{name}".removeprefix("."))


def _code(text: str) -> str | None:
    """A text as Python, if need be without the notes beside it; None if it is none."""
    text = MORE.sub(" **more)", text)
    for candidate in (text, NOTE.sub(r"\1\2", text)):
        try:
            ast.parse(f"async def _():\n{indent(candidate, '    ')}")
        except (SyntaxError, ValueError):
            continue
        return candidate
    return None


def _calls_something(code: str) -> bool:
    kinds = (ast.Call, ast.Import, ast.ImportFrom)
    return any(isinstance(node, kinds) for node in _nodes(code))


def _nodes(code: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(f"async def _():\n{indent(code, '    ')}"))


def _unbound(code: str) -> dict[str, bool]:
    """The names that an example does not bind itself, and whether it calls them."""
    bound = {*vars(builtins), *re.findall(r"import (\w+)", USUAL), "more"}
    read: dict[str, bool] = {}
    for node in _nodes(code):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.setdefault(node.id, False)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            read[node.func.id] = True
    return {name: is_called for name, is_called in read.items() if name not in bound}
