"""Who may import whom. Rooms stand in rows, and imports point down.

A module may import its own room and rooms of lower rows; the lowest row is one room. `memagent/__init__.py`
is the front door and may name anything, but nothing inside comes in through it.
"""

import ast
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from memagent.cli.main import app

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "memagent"
FRONT_DOOR = "memagent"

ROWS = """
    cli
    rl viewer
    eval serve
    agent data
    documents engines rewards
    tokens
    types errors config replies runs run_files tracking blocking files names plugins foreign gguf_format \
    profiles trust cluster cluster_workers processes launcher watchdog _version
"""
"""From the top down; a backslash continues a row. A new room is added here, and in ARCHITECTURE.md."""
ROW_OF = {
    room: number
    for number, row in enumerate(reversed(ROWS.strip().splitlines()))
    for room in row.split()
}

ONLY_ALLOWED: dict[tuple[str, str], tuple[str, ...]] = {
    ("rl", "eval"): ("memagent.eval.runner",),
    ("rl", "serve"): ("memagent.serve.agents",),
    ("viewer", "serve"): ("memagent.serve.listen",),
}
"""All that a room may import of another: training validates with the evaluation's runner, and serves agents in
other processes; the viewer listens and checks hosts as the other servers do."""
HOMES: dict[str, tuple[str, ...]] = {
    "torch": ("memagent.engines.local", "memagent.rl"),
    "vllm": ("memagent.engines.vllm",),
    "ray": (
        "memagent.cluster",
        "memagent.cluster_workers",
        "memagent.engines.replicas",
        "memagent.serve.cluster",
        "memagent.rl.distributed",
    ),
    "httpx": ("memagent.engines.openai",),
    "httpx_aiohttp": ("memagent.engines.openai",),
    "fastapi": ("memagent.serve", "memagent.viewer"),
    "starlette": ("memagent.serve", "memagent.viewer"),
    "uvicorn": ("memagent.serve", "memagent.viewer"),
    "mcp": ("memagent.serve.mcp",),
    "prometheus_client": ("memagent.serve",),
}
"""Libraries that appear in these modules and nowhere else."""

HEAVY = ("torch", "transformers", "vllm", "ray", "httpx", "tokenizers", "fastapi")
LIGHT_FACTOR = 3.0
"""CPU time of a start, in multiples of importing the libraries that it needs in any case."""


# --- the rule -------------------------------------------------------------------------------------


def imported(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Full names of all that a module imports, wherever in it: `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str:
    """`memagent.agent.reader` is in `agent`, `memagent.types` in `types`."""
    return module.split(".")[1]


def violation(module: str, name: str) -> str | None:
    """What is wrong with a module's import of `name`; None if nothing is."""
    library = name.split(".")[0]
    if library != FRONT_DOOR:
        homes = HOMES.get(library, (module,))
        return None if is_inside(module, homes) else f"{library} belongs in {' and '.join(homes)}"
    if module == FRONT_DOOR:
        return None
    room = room_of(module)
    other = room_of(name) if "." in name else ""
    if other not in ROW_OF:
        return f"{name} is the front door; import from the module it lives in"
    if other == room or ROW_OF[other] == ROW_OF[room] == 0:
        return None
    if ROW_OF[other] >= ROW_OF[room]:
        return f"{other} is in row {ROW_OF[other]}, {room} in row {ROW_OF[room]}"
    only = ONLY_ALLOWED.get((room, other))
    return None if only is None or is_inside(name, only) else f"of {other}, only {only}"


def is_inside(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """All wrong imports of a module, as `module imports name: reason`."""
    found = []
    for name in imported(source, module, is_package=is_package):
        if reason := violation(module, name):
            found.append(f"{module} imports {name}: {reason}")
    return found


def unknown_rooms(package: Path) -> list[str]:
    names = {
        path.stem
        for path in package.iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    }
    return sorted(names - set(ROW_OF) - {"__init__", "__main__"})


# --- the package keeps it -------------------------------------------------------------------------


def test_every_room_has_a_row() -> None:
    unknown = unknown_rooms(PACKAGE)
    assert not unknown, f"add {', '.join(unknown)} to ROWS in {Path(__file__).name}"


def test_imports_point_down() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, path.read_text(encoding="utf-8"), is_package=is_package)
    assert not found, "\n".join(found)


# --- the rule can fail ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memagent.documents.document", "from memagent.agent.reader import Reader"),
        ("memagent.documents.document", "def f():\n    import memagent.agent.reader"),
        ("memagent.documents.document", "from memagent.engines.base import open_engine"),
        ("memagent.documents.document", "from ..engines import base"),
        ("memagent.documents.document", "from memagent import engines"),
        ("memagent.tokens.tokenizers", "from memagent.documents.document import Document"),
        ("memagent.runs", "from memagent.documents import document"),
        ("memagent.runs", "from .documents import document"),
        ("memagent.agent.reader", "import memagent.cli.main"),
        ("memagent.agent.reader", "from memagent import Document"),
        ("memagent.agent.reader", "import memagent"),
        ("memagent.agent.prompts", "from memagent.data import example"),
        ("memagent.data.build", "from memagent.agent.reader import Reader"),
        ("memagent.rl.trainer", "from memagent.eval.report.report import table"),
        ("memagent.rl.trainer", "from memagent.serve import app"),
        ("memagent.viewer.app", "from memagent.serve import app"),
        ("memagent.eval.runner", "from memagent.serve import app"),
        ("memagent.agent.reader", "import torch"),
        ("memagent.engines.localized", "import torch"),
        ("memagent.engines.scripted", "from httpx import AsyncClient"),
        ("memagent.rl.trainer", "if True:\n    import ray.data"),
        ("memagent.engines.local.engine", "from vllm import LLM"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


# --- light to start, and public names -------------------------------------------------------------

LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"
HELP = "from memagent.cli.main import run; assert run(['--help']) == 0"


def seconds_and_modules(code: str) -> tuple[float, list[str]]:
    """CPU time of a new process, the best of three, and the modules it loaded."""
    times, output = [], ""
    for _ in range(3):
        before = _children_seconds()
        command = [sys.executable, "-c", f"{code}\n{LOADED}"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        times.append(_children_seconds() - before)
    return min(times), json.loads(output.splitlines()[-1])


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bare_seconds() -> float:
    """CPU time of Python itself and of what memagent's settings need."""
    return seconds_and_modules("import click, pydantic, rich.console")[0]


@pytest.mark.parametrize("code", ["import memagent", HELP], ids=["import", "help"])
def test_starting_is_quick_and_loads_nothing_heavy(code: str) -> None:
    seconds, modules = seconds_and_modules(code)
    assert "memagent" in modules
    assert [name for name in HEAVY if name in modules] == []
    assert seconds < LIGHT_FACTOR * bare_seconds()


def leaf_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of all commands, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from leaf_commands(command, (*path, name))


HELP_OF_EACH = """
import json, sys
from memagent.cli.main import run
first = {{}}
for command in json.loads(sys.argv[1]):
    assert run([*command, "--help"]) == 0
    for name in {heavy}:
        if name in sys.modules:
            first.setdefault(name, command)
print(json.dumps(first))
"""


def test_the_help_of_no_command_loads_anything_heavy() -> None:
    commands = list(leaf_commands(app))
    assert ("eval", "regrade") in commands
    code = HELP_OF_EACH.format(heavy=(*HEAVY, "numpy", "aiohttp", "httpx", "uvicorn", "pyarrow"))
    arguments = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert (
        json.loads(done.stdout.splitlines()[-1]) == {}
    )  # library: the first command that loads it
