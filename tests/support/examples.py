"""Checks the examples in docstrings without running them: they compile, and what they call exists.

    wrong_examples(module)      # ["Reader.ask: ask() got an unexpected keyword argument 'paths'", ...]

A paragraph of a docstring is an example if it is Python and calls something, also with notes beside the
calls. Names come from the module, from memagent and from the example itself; types follow annotations
as far as they are known. An unknown name that is only used is a placeholder; one that is called is wrong.
"""

import ast
import asyncio
import builtins
import collections.abc
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

import memagent

NOT_IMPORTED = ("memagent.engines.local.cuda.kernels", "memagent.__main__")
"""Needs Triton; runs the command."""
STARTS = re.compile(
    r"(async )?(with|for|def) .*:|from [\w.]+ import \w|import \w|[a-z_][\w.]*( = |\(.*\)$)|await "
)
NOTE = re.compile(r"^(\s*)(\S.*?\S) {2,}(\S.*)$")
PLAIN = re.compile(r"\[+\w[\w.]*\]+$|[$#] ", re.MULTILINE)
"""Lines of TOML and of a shell."""
WRAPPERS = (collections.abc.Iterator, collections.abc.AsyncIterator, collections.abc.Iterable)
CONTAINERS = (list, tuple, set, frozenset, collections.abc.Sequence, *WRAPPERS)


USUAL = {"Path": Path, "asyncio": asyncio, "json": json}
"""Names of the standard library that examples need not import."""


class Example(NamedTuple):
    """One example of a docstring."""

    owner: str
    """What it documents, such as `Reader.ask`; empty for a module."""
    tree: ast.Module | None
    """None where it looks like Python but does not compile."""
    text: str


class Known(NamedTuple):
    """What is known of a value: the object itself, or the annotation of its type."""

    value: Any = None
    hint: Any = None


UNKNOWN = Known()


def sources() -> dict[str, str]:
    """The source of every module of the package that can be imported here."""
    root = Path(str(memagent.__file__)).parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return {name: source for name, source in found.items() if name not in NOT_IMPORTED}


@cache
def public_names() -> dict[str, Any]:
    """Functions and classes of the package by name; None for a name that several have."""
    found: dict[str, list[Any]] = {}
    for module in map(importlib.import_module, sources()):
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", None) == module.__name__
            if is_own and not name.startswith("_") and callable(value):
                found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else None for name, values in found.items()}


def wrong_examples(module: ModuleType) -> list[str]:
    """What is wrong with the examples of a module, one line each."""
    wrong: list[str] = []
    scopes: dict[str, _Checker] = {}
    for example in examples(inspect.getsource(module)):
        where = f"{module.__name__} {example.owner}".strip()
        if example.tree is None:
            wrong.append(f"{where}: does not compile: {example.text.splitlines()[0]}")
            continue
        checker = scopes.setdefault(example.owner, _Checker(module))
        wrong += [f"{where}: {problem}" for problem in checker.check(example.tree)]
    return wrong


def examples(source: str) -> Iterator[Example]:
    """The examples in the docstrings of a module."""
    for owner, docstring in _docstrings(ast.parse(source), ""):
        for paragraph in re.split(r"\n\s*\n", docstring):
            text = dedent(paragraph).removeprefix("Example: ")
            if ">>>" in text or PLAIN.search(text):
                continue  # doctest runs the first; the others are no Python
            tree = _parsed(text)
            if tree is None and STARTS.match(text):
                yield Example(owner, None, text)
            elif tree is not None and _calls_something(tree):
                yield Example(owner, tree, text)


def _docstrings(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield path, docstring
        for child in node.body:
            name = getattr(child, "name", "")
            if name:
                yield from _docstrings(child, f"{path}.{name}".removeprefix("."))


def _parsed(text: str) -> ast.Module | None:
    text = re.sub(r",\s*\.\.\.\)", ", **more)", text)  # further arguments that are left out
    without_notes = "\n".join(NOTE.sub(r"\1\2", line) for line in text.splitlines())
    for candidate in (text, without_notes):
        try:
            flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            tree = compile(candidate, "example", "exec", flags)
        except (SyntaxError, ValueError):
            continue
        assert isinstance(tree, ast.Module)
        return tree
    return None


def _calls_something(tree: ast.Module) -> bool:
    kinds = (ast.Call, ast.Import, ast.ImportFrom)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


class _Checker(ast.NodeVisitor):
    """Follows an example from statement to statement."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._local: dict[str, Known] = {}
        self._problems: list[str] = []

    def check(self, tree: ast.Module) -> list[str]:
        self._problems = []
        self.visit(tree)
        return self._problems

    # --- statements ----------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = self._imported(alias.name)
            self._local[alias.asname or alias.name.partition(".")[0]] = Known(value=module)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._imported(node.module or "")
        for alias in node.names:
            value = getattr(module, alias.name, None)
            if value is None and module is not None:
                value = self._imported(f"{node.module}.{alias.name}")
            self._local[alias.asname or alias.name] = Known(value=value)

    def visit_Assign(self, node: ast.Assign) -> None:
        known = self._known(node.value)
        for target in node.targets:
            self._bind(target, known)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            known = self._known(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self._entered(known))
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With  # type: ignore[assignment]

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, _element(self._known(node.iter)))
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFor = visit_For  # type: ignore[assignment]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """The body is somebody else's code; its name may be called from here on."""
        self._local[node.name] = UNKNOWN

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Expr(self, node: ast.Expr) -> None:
        self._known(node.value)

    # --- values --------------------------------------------------------------------------------

    def _known(self, node: ast.expr) -> Known:
        """What is known of an expression; its calls are checked on the way."""
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Await):
            return self._known(node.value)
        if isinstance(node, ast.Name):
            return self._named(node.id) or UNKNOWN
        if isinstance(node, ast.Attribute):
            return self._attribute(self._known(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            self._known(node.slice)
            return _element(self._known(node.value))
        if isinstance(node, (ast.Lambda, ast.comprehension, ast.ListComp, ast.GeneratorExp)):
            return UNKNOWN  # it has its own names
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._known(child)
        return UNKNOWN

    def _named(self, name: str) -> Known | None:
        if name in self._local:
            return self._local[name]
        for namespace in (vars(self._module), public_names(), vars(builtins), USUAL):
            if name in namespace:
                return Known(value=namespace[name])
        return None

    def _attribute(self, known: Known, name: str) -> Known:
        if isinstance(known.value, (type, ModuleType)):
            if not hasattr(known.value, name) and name not in _annotations(known.value):
                self._problems.append(f"{known.value.__name__} has no {name}")
                return UNKNOWN
            return Known(value=getattr(known.value, name, None))
        owner = _class_of(known.hint)
        if owner is None:
            return UNKNOWN
        if name in _annotations(owner):
            return Known(hint=_annotations(owner)[name])
        if not hasattr(owner, name):
            if name not in _set_in_methods(owner) and not hasattr(owner, "__getattr__"):
                self._problems.append(f"{owner.__name__} has no {name}")
            return UNKNOWN
        value = inspect.getattr_static(owner, name)
        if isinstance(value, property):
            return Known(hint=_hints(value.fget).get("return"))
        if isinstance(value, types.FunctionType):
            return Known(value=_Method(value, owner))
        return Known(value=getattr(owner, name))

    def _called(self, node: ast.Call) -> Known:
        positional = [self._known(one) for one in node.args]
        named = {one.arg: self._known(one.value) for one in node.keywords}
        if isinstance(node.func, ast.Name) and self._named(node.func.id) is None:
            self._problems.append(f"there is no {node.func.id}()")
            return UNKNOWN
        function = self._known(node.func).value
        owner = function.owner if isinstance(function, _Method) else None
        function = function.function if isinstance(function, _Method) else function
        if not callable(function):
            return UNKNOWN
        given = [UNKNOWN, *positional] if owner is not None else positional
        self._check_arguments(node, function, given, named)
        if isinstance(function, type):
            if getattr(function, "_is_protocol", False):
                self._problems.append(f"{function.__name__} is a protocol")
            return Known(hint=function)
        hint = _hints(function).get("return")
        if hint is typing.Self:
            hint = owner or getattr(function, "__self__", None)
        return Known(hint=hint)

    def _check_arguments(
        self,
        node: ast.Call,
        function: Callable[..., Any],
        given: list[Known],
        named: dict[str | None, Known],
    ) -> None:
        if any(isinstance(one, ast.Starred) for one in node.args) or not _is_ours(function):
            return
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):
            return
        has_more = any(map(_is_ellipsis, node.args))
        given = given[: len(given) - has_more]
        keywords = {name: known for name, known in named.items() if name is not None}
        bind = signature.bind_partial if has_more or None in named else signature.bind
        try:
            bound = bind(*given, **keywords)
        except TypeError as error:
            self._problems.append(f"{ast.unparse(node.func)}(): {error}")
            return
        hints = _hints(function.__init__ if isinstance(function, type) else function)
        for name, known in bound.arguments.items():
            if isinstance(known, Known) and _conflicts(known.hint, hints.get(name)):
                found, expected = _shown(known.hint), _shown(hints[name])
                self._problems.append(
                    f"{ast.unparse(node.func)}(): {name} is {expected}, not {found}"
                )

    def _imported(self, name: str) -> ModuleType | None:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            if name.partition(".")[0] == "memagent":
                self._problems.append(f"there is no {name}")
            return None

    def _bind(self, target: ast.expr, known: Known) -> None:
        if isinstance(target, ast.Name):
            self._local[target.id] = known
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._bind(one, UNKNOWN)
        else:
            self._known(target)

    def _entered(self, known: Known) -> Known:
        """What `with` gives for a context manager."""
        if typing.get_origin(known.hint) in WRAPPERS or _class_of(known.hint) is None:
            return _element(known)
        owner = _class_of(known.hint)
        methods = [getattr(owner, name, None) for name in ("__enter__", "__aenter__")]
        if not any(methods):
            self._problems.append(f"{known.hint.__name__} is no context manager")
        for entered in (_hints(method).get("return") for method in methods):
            if entered is not None:
                return Known(hint=owner if entered is typing.Self else entered)
        return UNKNOWN


class _Method(NamedTuple):
    """A method of an object of a known class."""

    function: Callable[..., Any]
    owner: type


def _is_ours(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).startswith("memagent")


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _hints(function: Any) -> dict[str, Any]:
    function = inspect.unwrap(function) if callable(function) else None
    try:
        return typing.get_type_hints(function) if function is not None else {}
    except Exception:  # a name that only type checkers import
        return {}


def _annotations(owner: Any) -> dict[str, Any]:
    if not isinstance(owner, type):
        return {}
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        found |= vars(base).get("__annotations__", {})
    return found | _hints(owner)


@cache
def _set_in_methods(owner: type) -> frozenset[str]:
    """Attributes that methods set on `self`."""
    found: set[str] = set()
    for base in owner.__mro__:
        if str(base.__module__).startswith("memagent"):
            found |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
    return frozenset(found)


def _class_of(hint: Any) -> type | None:
    """The class of values with an annotation, if it is one of ours."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [_class_of(one) for one in typing.get_args(hint) if one is not type(None)]
        return options[0] if len(options) == 1 else None
    hint = typing.get_origin(hint) or hint
    is_ours = isinstance(hint, type) and str(hint.__module__).startswith("memagent")
    return hint if is_ours and not getattr(hint, "_is_protocol", False) else None


def _conflicts(found: Any, expected: Any) -> bool:
    """Whether a value of one annotation cannot be one of another, judged by their classes."""
    if typing.get_origin(found) in CONTAINERS and typing.get_origin(expected) in CONTAINERS:
        one, other = typing.get_args(found)[:1], typing.get_args(expected)[:1]
        return bool(one and other) and _conflicts(one[0], other[0])
    found, expected = typing.get_origin(found) or found, typing.get_origin(expected) or expected
    if not isinstance(found, type) or not isinstance(expected, type):
        return False
    if types.UnionType in (found, expected):
        return False
    if {found, expected} & {object, type(None)} or getattr(expected, "_is_protocol", False):
        return False
    return not issubclass(found, expected) and (found, expected) != (int, float)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _element(known: Known) -> Known:
    """What iterating, indexing or entering gives, where the annotation says."""
    arguments = typing.get_args(known.hint)
    if typing.get_origin(known.hint) in CONTAINERS and arguments:
        return Known(hint=arguments[0])
    return UNKNOWN
