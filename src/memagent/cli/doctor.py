"""What works on this machine, what is missing, and the command that adds it.

    for finding in examine():
        print(finding.state, finding.name, finding.detail, finding.remedy)

Nothing is downloaded, and no endpoint is asked unless `connects` is set: then those in the environment and of the
profiles are asked which models they serve. No text is sent.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from platformdirs import user_cache_path, user_data_path

from memagent._version import __version__
from memagent.cli.shared.console import print_json
from memagent.engines import store
from memagent.engines.addresses import endpoint_from, public_url
from memagent.engines.base import EMBEDDED, ENGINES, local_runtimes, open_engine, opener_of
from memagent.errors import ConfigError, MemagentError, one_line, plain
from memagent.files import size_of
from memagent.profiles import config_file, list_profiles, load_profile
from memagent.runs import runs_folder

FindingState = Literal["ok", "missing", "broken", "note"]
NOT_FOR_USERS = ("dev", "docs")
"""Extras that only developers of memagent need."""
MEGABYTE, GIGABYTE = 1e6, 1e9

_requirement = re.compile(r"""^([\w.-]+).*?;.*\bextra == ["']([\w-]+)["']""")


class Finding(NamedTuple):
    """One thing that was looked at.

    Example: Finding("extras", "viewer", "missing", "without fastapi", 'pip install "memagent[viewer]"')
    """

    area: str
    name: str
    state: FindingState
    """ok: it works. missing: it is not installed or not set. broken: it is there and does not work."""
    detail: str = ""
    remedy: str | None = None
    """What to run or change; None where nothing has to."""


def examine(*, connects: bool = False) -> list[Finding]:
    """Everything that is looked at, in order. `connects`: ask the endpoints which models they serve."""
    return list(findings(connects=connects))


def findings(*, connects: bool = False) -> Iterator[Finding]:
    """As `examine`, one by one: trying an engine can take seconds."""
    python = f"Python {platform.python_version()} at {sys.executable}"
    yield Finding("system", "memagent", "ok", f"{__version__}, {python}")
    cores = os.cpu_count() or 1
    yield Finding("system", "machine", "ok", f"{platform.platform()}, {cores} cores")
    yield from _extras()
    for kind in ENGINES:
        yield _tried("engines", kind, partial(_engine_detail, kind))
    yield from _models()
    yield from _folders()
    yield from _profiles(connects=connects)
    yield from _endpoint(connects=connects)


def _extras() -> Iterator[Finding]:
    for extra, libraries in needed_by_extras().items():
        missing = [name for name in libraries if not _is_installed(name)]
        yield Finding(
            "extras",
            extra,
            "missing" if missing else "ok",
            f"without {', '.join(missing)}" if missing else ", ".join(libraries),
            remedy=f'pip install "memagent[{extra}]"' if missing else None,
        )


def needed_by_extras() -> dict[str, list[str]]:
    """The libraries of each extra that users install; empty where memagent is not installed as a package."""
    try:
        lines = metadata.requires("memagent") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        match = _requirement.match(line)
        if match and match[2] not in NOT_FOR_USERS and match[1] != "memagent":
            found.setdefault(match[2], []).append(match[1])
    return found


def _engine_detail(kind: str) -> str:
    opener_of(kind)
    if kind == "scripted":
        with open_engine("scripted") as engine:
            return f"replies by rule, without a model ({engine.model})"
    if kind == "local":
        return local_runtimes()
    if kind == "vllm" and not _is_installed("vllm"):
        raise ConfigError('vLLM is not installed for this Python: pip install "memagent[vllm]"')
    return (
        "starts servers on the GPUs here"
        if kind == "vllm"
        else "for any OpenAI-compatible endpoint"
    )


def _models() -> Iterator[Finding]:
    try:
        found = store.installed()
    except (MemagentError, OSError) as error:
        yield Finding("models", "models", "broken", one_line(error))
        return
    for model in found:
        yield Finding("models", model.name, "ok", str(model.path))
    embedded = EMBEDDED.partition(":")[2]
    if store.find(store.base_of(embedded)) is None:
        yield Finding(
            "models",
            embedded,
            "missing",
            "the embedded model is fetched when it is first used",
            remedy=f"memagent models pull {embedded}",
        )


def _folders() -> Iterator[Finding]:
    for name, path in (
        ("runs", runs_folder()),
        ("data", user_data_path("memagent", appauthor=False)),
        ("cache", user_cache_path("memagent", appauthor=False)),
    ):
        yield _tried("folders", name, partial(_writable, path))


def _writable(path: Path) -> str:
    """Where a folder is and how much room it has. Raises OSError where nothing can be written."""
    there = next(each for each in (path, *path.parents) if each.exists())
    with tempfile.TemporaryFile(dir=there):
        free = shutil.disk_usage(there).free / GIGABYTE
        return f"{path}, {size_of(path) / MEGABYTE:,.0f} MB used, {free:.0f} GB free"


def _profiles(*, connects: bool) -> Iterator[Finding]:
    path = config_file()
    if not path.exists():
        yield Finding("profiles", "config file", "note", f"none at {path}")
        return
    try:
        names = list_profiles(path)
    except MemagentError as error:
        yield Finding("profiles", "config file", "broken", str(error))
        return
    for name in names:
        yield _tried("profiles", name, partial(_profile_detail, name, connects=connects))


def _profile_detail(name: str, *, connects: bool) -> str:
    values = load_profile(name).engine()
    if connects and "base_url" in values:
        return _asked(**values)
    return public_url(values.get("base_url") or "") or str(values.get("engine", "reading only"))


def _endpoint(*, connects: bool) -> Iterator[Finding]:
    address = endpoint_from(os.environ).base_url
    if address is None:
        detail = "none is set in the environment; texts are read by the embedded model"
        yield Finding("endpoint", "endpoint", "note", detail)
    elif connects:
        yield _tried("endpoint", public_url(address), _asked)
    else:
        yield Finding("endpoint", public_url(address), "note", "not asked")


def _asked(**settings: Any) -> str:
    """What an endpoint serves."""
    with open_engine(**{"engine": "openai:", **settings, "patience": 0.0}) as engine:
        return f"serves {engine.model}"


def _tried(area: str, name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(area, name, "ok", look())
    except MemagentError as error:
        message = str(error)
        is_missing = "pip install" in message
        remedy = re.search(r'pip install "[^"]+"', message)
        return Finding(
            area,
            name,
            "missing" if is_missing else "broken",
            message.replace(f": {remedy[0]}", "") if remedy else message,
            remedy=remedy[0] if remedy else None,
        )
    except Exception as error:  # a library that is there and does not load is what is looked for
        return Finding(area, name, "broken", one_line(error))


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


# --- the command ----------------------------------------------------------------------------------

SIGNS = {"ok": "ok", "missing": "--", "broken": "!!", "note": "  "}
MAX_CHARS = 300
MIN_WIDTH = 13
"""The width of names, so that most areas are aligned."""


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--connect",
    "connects",
    is_flag=True,
    help="Ask the endpoints of the environment and of your profiles which models they serve; sends no text.",
)
def command(as_json: bool, connects: bool) -> int:
    """Look at this machine: what is installed, which engines and devices work, which models and
    profiles there are, what is missing and the command that adds it.

    Something that is there and does not work gives exit code 1.
    """
    if as_json:
        found = examine(connects=connects)
        print_json([finding._asdict() for finding in found])
    else:
        found = _print(findings(connects=connects))
    return int(any(finding.state == "broken" for finding in found))


def _print(found: Iterable[Finding]) -> list[Finding]:
    """Each area as soon as it was looked at; all findings."""
    shown: list[Finding] = []
    for area, group in groupby(found, key=attrgetter("area")):
        in_area = list(group)
        click.echo(f"{chr(10) if shown else ''}{area}")
        width = max(MIN_WIDTH, *(len(finding.name) for finding in in_area))
        for finding in in_area:
            _print_finding(finding, width)
        shown += in_area
    return shown


def _print_finding(finding: Finding, width: int) -> None:
    line = f"  {SIGNS[finding.state]}  {plain(finding.name):<{width}}  {plain(finding.detail, MAX_CHARS)}"
    click.echo(line.rstrip())
    if finding.remedy:
        click.echo(f"      {'':<{width}}  add it: {finding.remedy}")
