"""Count the house: lines, files and functions of each room, settings, and options of each command.

python tools/count.py              a row for each room, then settings and options
python tools/count.py --long 60    the functions above 60 lines as well
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "memagent"


class Function(NamedTuple):
    place: str
    """`path:line name`."""
    num_lines: int
    """With its signature and docstring, without decorators."""


def source_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def functions(paths: list[Path]) -> Iterator[Function]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path}:{node.lineno} {node.name}"
                yield Function(place, (node.end_lineno or node.lineno) - node.lineno + 1)


def rooms() -> dict[str, list[Path]]:
    """Files by folder of the package; those beside the folders are the room `.`."""
    found: dict[str, list[Path]] = {}
    for path in source_files():
        parts = path.relative_to(PACKAGE).parts
        found.setdefault(parts[0] if len(parts) > 1 else ".", []).append(path)
    return found


def settings() -> dict[str, int]:
    """Number of fields that each class of settings declares itself."""
    import memagent
    from memagent.config import Settings

    for module in pkgutil.walk_packages(memagent.__path__, "memagent."):
        if "cuda.kernels" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    counts: Counter[str] = Counter()
    unseen = list(Settings.__subclasses__())
    while unseen:
        kind = unseen.pop()
        unseen += kind.__subclasses__()
        if kind.__module__.startswith("memagent."):
            counts[f"{kind.__module__}:{kind.__qualname__}"] = len(
                kind.__annotations__.keys() & kind.model_fields.keys()
            )
    return dict(counts)


def options() -> dict[str, int]:
    """Number of options of each command, without `--help`."""
    import click

    from memagent.cli.main import app

    def of(name: str, command: click.Command, context: click.Context) -> Iterator[tuple[str, int]]:
        named = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        yield name, len(named)
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=name, parent=context)
            for part in command.list_commands(inner):
                found = command.get_command(inner, part)
                if found is not None:
                    yield from of(f"{name} {part}".strip(), found, inner)

    return dict(of("", app, click.Context(app)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--long", type=int, metavar="LINES", help="list longer functions")
    chosen = parser.parse_args()
    print(
        f"{'room':12} {'files':>5} {'lines':>6} {'functions':>9} {'median':>6} {'p90':>4} {'max':>4}"
    )
    for name, paths in [*rooms().items(), ("all", source_files())]:
        sizes = sorted(function.num_lines for function in functions(paths))
        p90 = sizes[len(sizes) * 9 // 10]
        row = f"{len(paths):5} {num_lines(paths):6} {len(sizes):9} {statistics.median(sizes):6.0f}"
        print(f"{name:12} {row} {p90:4} {sizes[-1]:4}")
    tests = source_files(ROOT / "tests")
    print(f"{'tests':12} {len(tests):5} {num_lines(tests):6}")
    counts = settings()
    print(f"\n{sum(counts.values())} settings in {len(counts)} classes")
    for name, number in sorted(options().items()):
        print(f"{number:4} options  memagent {name}")
    if chosen.long:
        for function in sorted(functions(source_files()), key=lambda one: -one.num_lines):
            if function.num_lines > chosen.long:
                print(f"{function.num_lines:4} lines  {function.place}")


if __name__ == "__main__":
    main()
