"""One page that holds runs, to keep or to send: it opens from a file and asks no server.

    exported = export_page(ViewerApi(open_library(["runs/bell"])))
    Path("bell.html").write_text(exported.html)

The modules of `pages` are joined into one script, and the answers that they would ask for lie beside it as
JSON. The page's policy allows this script and this stylesheet by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from memagent.errors import RunError
from memagent.viewer.api import ViewerApi, json_text
from memagent.viewer.app import PAGE, assets
from memagent.viewer.traces import Json

MAX_TRACES = 300
"""Traces of items and rollouts of one run in a page; those of wrong items come first."""
MAX_BYTES = 100_000_000
"""Size of a page; traces beyond it are left out."""
MODULES = (
    *("dom", "format", "api", "charts", "runs", "trace", "reading", "evaluation"),
    *("compare", "training", "main"),
)
"""The modules, each after those that it imports."""
STATUSES = ("", "wrong", "failed", "right")

_import = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.M)
_export = re.compile(r"^export ((?:async )?function|const) (\w+)", re.M)
_served = re.compile(
    r'<link rel="icon"[^>]*>\n<link rel="stylesheet"[^>]*>\n<script [^>]*></script>'
)


class ExportedPage(NamedTuple):
    """A page, and how much of the runs did not find room in it."""

    html: str
    num_left_out: int
    """Traces that are not in the page."""


def export_page(api: ViewerApi) -> ExportedPage:
    """All runs of the viewer as one page. Raises RunError where there is none."""
    runs = api.runs()
    if not runs["runs"]:
        raise RunError("there is no run to write")
    answers = _Answers(api)
    answers.add("/runs", runs)
    for run in runs["runs"]:
        answers.add_run(run["id"])
    return ExportedPage(_page(answers.found), answers.num_left_out)


def bundle() -> str:
    """The modules of the page as one script; each keeps its names to itself."""
    sources = assets()
    modules = []
    for name in MODULES:
        source = sources[f"{name}.js"]
        exports = ", ".join(match[2] for match in _export.finditer(source))
        body = _import.sub(lambda match: f"const {{{match[1]}}} = module_{match[2]};\n", source)
        body = _export.sub(r"\1 \2", body)
        wrapped = f"(() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"
        modules.append(f"const module_{name} = {wrapped}")
    return "".join(modules)


class _Answers:
    """The answers of the server that a page needs, by what is asked."""

    def __init__(self, api: ViewerApi) -> None:
        self.found: dict[str, Json] = {}
        self.num_left_out = 0
        self._api = api
        self._num_bytes = 0

    def add(self, path: str, answer: Json, **params: object) -> None:
        names = sorted(f"{name}={value}" for name, value in params.items() if value != "")
        self.found[" ".join([path, *names])] = answer
        self._num_bytes += len(json.dumps(answer))

    def add_run(self, run: str) -> None:
        found = self._api.run(run)
        self.add(f"/runs/{run}", found)
        if found["kind"] == "ask":
            for number in range(len(found["questions"])):
                self._add_trace(run, f"q{number}", has_prompts=True)
        elif found["kind"] == "eval":
            self._add_evaluation(run)
        elif found["kind"] == "train":
            self._add_training(run, found)

    def _add_evaluation(self, run: str) -> None:
        numbers: list[int] = []
        for grader in ("", *self._api.cells(run)["graders"]):
            table = self._api.cells(run, grader=grader or None)
            self.add(f"/runs/{run}/cells", table, grader=grader)
            cells = (
                {name: str(cell[name] or "") for name in ("task", "method", "tokens")}
                for cell in table["cells"]
            )
            for wanted in ({}, *cells):
                numbers += self._add_items(run, wanted, grader=grader)
        self._add_traces(run, (f"i{number}" for number in numbers))

    def _add_training(self, run: str, found: Json) -> None:
        self.add(f"/runs/{run}/metrics", self._api.metrics(run), after=0)
        keys = []
        for step in found["samples"]:
            rollouts = self._api.rollouts(run, step)
            self.add(f"/runs/{run}/rollouts", rollouts, step=step)
            keys += [
                f"s{step}.{each['number']}"
                for group in rollouts["groups"]
                for each in group["rollouts"]
            ]
        for step in found["validations"]:
            keys += [f"v{step}.{number}" for number in self._add_items(run, {}, step=step)]
        self._add_traces(run, reversed(keys))

    def _add_items(
        self, run: str, wanted: dict[str, str], *, step: int | None = None, grader: str = ""
    ) -> list[int]:
        """Add the first items of a cell, all and by status; their numbers."""
        numbers = []
        where = {} if step is None else {"step": step}
        for status in STATUSES:
            chosen: dict[str, Any] = {**wanted, **({"status": status} if status else {})}
            page = self._api.items(run, **chosen, step=step, grader=grader or None)
            self.add(f"/runs/{run}/items", page, **chosen, **where, grader=grader)
            numbers += [item["number"] for item in page["items"]]
        return numbers

    def _add_traces(self, run: str, keys: Iterator[str]) -> None:
        unique = iter(dict.fromkeys(keys))
        for key in islice(unique, MAX_TRACES):
            self._add_trace(run, key)
        self.num_left_out += sum(1 for _ in unique)

    def _add_trace(self, run: str, key: str, *, has_prompts: bool = False) -> None:
        if self._num_bytes > MAX_BYTES:
            self.num_left_out += 1
            return
        path = f"/runs/{run}/traces/{key}"
        trace = self._api.trace(run, key)
        self.add(path, trace)
        for number in range(len(trace["steps"])):
            step = self._api.step(run, key, number)
            self.add(f"{path}/steps/{number}", step)
            if has_prompts:
                with suppress(RunError):
                    self.add(f"{path}/steps/{number}/prompt", self._api.prompt(run, key, number))
            if step["has_text"]:
                self.add(f"{path}/steps/{number}/section", self._api.section(run, key, number))


def _page(answers: dict[str, Json]) -> str:
    script, style = bundle(), assets()["viewer.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = json_text(answers, is_ascii=True)
    data = data.replace("<", "\\u003c")
    parts = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="data:,">',
        f"<style>{style}</style>",
        f'<script type="application/json" id="run-data">{data}</script>',
        f'<script type="module">{script}</script>',
    ]
    inlined = "\n".join(parts)
    return _served.sub(lambda match: inlined, assets()[PAGE], count=1)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
