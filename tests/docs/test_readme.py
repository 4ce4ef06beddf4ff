"""Every bash and python block of the documentation runs, and prints what the page shows.

Blocks of a page run in order, in one folder that holds the files the pages mention. Python blocks are
self-contained; what a bash block exports is visible to the bash blocks after it. Notes in a page:

    <!-- exit code 4 -->     before a bash block: it is expected to end with this code
    <!-- prints -->          before a text block: what the block before printed, numbers aside;
                             `...` stands for anything
    # name.toml              as the first line of a toml block: the block is also that file

Training commands get the settings in SHORTER on top: one step with one task. `memagent demo` is answered by
the scripted engine, since its text is long. Servers are asked once and stopped.

A loopback endpoint replaces `http://localhost:8000/v1` and its model. A random model of a few thousand
parameters replaces the embedded one; nothing can be downloaded.
"""

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import docx
import pytest
from fpdf import FPDF

from memagent.agent.prompts import parse_prompts
from memagent.config import find_config
from memagent.data.formats.files import write_examples
from memagent.data.tasks.registry import open_task
from memagent.documents.sample import town_archive
from memagent.engines import store
from tests.support.hotpot import write_hotpot
from tests.support.loopback import Endpoint, running
from tests.support.timing import IF_SLOW
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SERVED = ROOT / "tests" / "support" / "served.py"
DOCUMENTED_URL = "http://localhost:8000/v1"
DOCUMENTED_MODEL = "Qwen/Qwen2.5-7B-Instruct"
SHORTER = (
    "steps=1", "warm_start.steps=1", "warm_start.batch=1", "rollout.prompts=1",
    "rollout.group_size=2", "update.updates=1", "validation.num=1",
)  # fmt: skip

_fence = re.compile(
    r"(?:<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_link = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
_requirement = re.compile(r"memagent(?:\[(?P<extras>[\w,-]+)\])?")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    note: str
    line: int


class Outcome(NamedTuple):
    exit_code: int
    output: str


def blocks_of(page: str) -> list[Block]:
    return [
        Block(
            language=match["language"],
            text=match["text"],
            note=match["note"] or "",
            line=page.count("\n", 0, match.start("language")) + 1,
        )
        for match in _fence.finditer(page)
    ]


class Shell:
    """Runs the blocks of one page in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.exports = folder / ".exports"

    def run(self, block: Block) -> Outcome:
        if block.language == "python":
            return self._outcome(["python", "-W", "error", "-c", block.text])
        commands = "\n".join(self._checked(line) for line in logical_lines(block.text))
        script = (
            f"[ ! -f {self.exports} ] || . {self.exports}\n{commands}\nexport -p > {self.exports}"
        )
        return self._outcome(["bash", "-euo", "pipefail", "-c", script])

    def _outcome(self, command: list[str]) -> Outcome:
        done = subprocess.run(
            ["/usr/bin/env", *command],  # found on the path of the environment
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        return Outcome(done.returncode, done.stdout.decode())

    def _checked(self, line: str) -> str:
        """The line, or nothing for installations and make, which are checked and not run."""
        words = line.split()
        if "pip" in words and "install" in words:
            check_requirements(line)
            return ""
        if words[:1] == ["make"]:
            check_targets(words[1:])
            return ""
        if words[:2] == ["memagent", "demo"] and not {"--engine", "--save"} & set(words):
            return line.replace("memagent demo", "memagent demo --engine scripted")
        if words[:2] == ["memagent", "train"] and words[2] != "export":
            return shorter(line, self.folder)
        if words[:1] == ["memagent"] and words[1] in ("serve", "view") and "--export" not in words:
            return f"{sys.executable} {SERVED} {line}"
        return line


def logical_lines(script: str) -> list[str]:
    return script.replace("\\\n", " ").splitlines()


def shorter(line: str, folder: Path) -> str:
    """A training command that takes seconds. A resumed run gets another step."""
    changes: tuple[str, ...] = ("steps=2",)
    if config := re.search(r"memagent train (?:run |sft )?([^\s-]\S*)", line):
        own = folder / config[1]
        path = own if own.exists() else find_config("train", config[1])
        values = tomllib.loads(path.read_text())
        optional = {"warm_start", "validation"} - values.keys()
        changes = tuple(one for one in SHORTER if one.partition(".")[0] not in optional)
    return f"{line} {' '.join(f'--set {change}' for change in changes)}"


def check_requirements(line: str) -> None:
    """A `pip install memagent[...]` must name extras that exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = _requirement.search(line.replace('".[', "memagent["))
    named = found["extras"].split(",") if found and found["extras"] else []
    assert set(named) <= set(known), f"{line!r} names an extra that is not in pyproject.toml"


def check_targets(words: list[str]) -> None:
    """`make` must name targets that exist."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for word in words:
        assert word in targets, f"make {word}: the Makefile has no such target"


def matches(expected: str, output: str) -> bool:
    """Whether an output is as a page shows it: `...` stands for anything, any number for any other."""
    pattern = r".*?".join(re.escape(part) for part in _bare(expected).split("..."))
    said = "\n".join(line for line in output.splitlines() if not IF_SLOW.match(line))
    return re.fullmatch(pattern, _bare(said), re.S) is not None


def _bare(text: str) -> str:
    """Without what may differ from machine to machine and from version to version."""
    numbers_aside = re.sub(r"\d[\d,.]*(?<=\d)", "0", text)
    return "\n".join(" ".join(line.split()) for line in numbers_aside.strip().splitlines())


# --- the folder the pages use ----------------------------------------------------------------


def make_samples(folder: Path) -> None:
    """The files of a user that pages name; nothing of the repository, which pip users do not have."""
    archive = town_archive()
    (folder / "book.txt").write_text(archive)
    (folder / "log.txt.gz").write_bytes(gzip.compress(archive[:2000].encode()))
    turns = [
        {"role": "user", "content": "Who wrote it?"},
        {"role": "assistant", "content": "Brita."},
    ]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps(turn) for turn in turns))
    (folder / "notes").mkdir()
    (folder / "notes" / "plan.md").write_text("# Plan\n\nMend the lower bridge before harvest.\n")
    (folder / "notes" / "retry.py").write_text('"""Retries are handled here."""\n')
    pages = FPDF()
    pages.set_font("helvetica", size=12)
    for text in ("The house stands by the quay.", "Hedda Sunde inherits the house."):
        pages.add_page()
        pages.cell(text=text)
    pages.output(str(folder / "report.pdf"))
    contract = docx.Document()
    contract.add_paragraph("Either side may give notice within 30 days.")
    contract.save(str(folder / "contract.docx"))
    needles = open_task("ruler/niah_single_1", {"tokens": 500, "tokenizer": "bytes"})
    write_hotpot(folder / "data" / "hotpotqa")
    write_examples(folder / "train.jsonl", [needles.example(index) for index in range(3)])


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with running(model=DOCUMENTED_MODEL) as loopback:
        yield loopback


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a stand-in for the embedded model, of the same window."""
    data = tmp_path_factory.mktemp("data")
    folder = data / "memagent" / "models" / store.base_of(store.EMBEDDED)
    make_tiny_model(folder, "llama", max_position_embeddings=8192, num_hidden_layers=1)
    (folder / "README.md").write_bytes(
        b" " * 1_000_000
    )  # so that its size is in MB, as the real one's
    if adapter := store.KNOWN[store.EMBEDDED].adapter:
        make_tiny_adapter(folder, data / "memagent" / "adapters" / adapter)
    return data


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first page leaves the compiled kernel for the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shell(tmp_path: Path, embedded: Path, cache: Path, programs: Path) -> Shell:
    folder = tmp_path / "here"
    folder.mkdir()
    make_samples(folder)
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_DATA_HOME": str(embedded),
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return Shell(folder, environment)


# --- the pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_every_block_of_a_page_runs(path: Path, shell: Shell, endpoint: Endpoint) -> None:
    page = path.read_text().replace(DOCUMENTED_URL, endpoint.base_url)
    last = Outcome(0, "")
    for block in blocks_of(page):
        where = f"{path.name}:{block.line}"
        if block.language in ("bash", "python"):
            expected = int(block.note.rpartition(" ")[2]) if "exit code" in block.note else 0
            last = shell.run(block)
            shown = f"{where}\n{block.text}\n--- printed:\n{last.output}"
            assert last.exit_code == expected, shown
        elif block.language == "toml":
            values = tomllib.loads(block.text)
            if name := re.match(r"# (\S+\.toml)\n", block.text):
                (shell.folder / name[1]).write_text(block.text)
            if "read" in values:
                parse_prompts(values, source=where)
        elif block.language == "json":
            json.loads(block.text)
        elif block.note == "prints":
            assert matches(block.text, last.output), (
                f"{where} shows something else than:\n{last.output}"
            )


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_between_pages_exist(path: Path) -> None:
    text = _fence.sub("", path.read_text())
    dead = [link for link in _link.findall(text) if not (path.parent / link).exists()]
    assert dead == []


def test_the_page_of_the_package_has_no_link_that_only_the_repository_has() -> None:
    package_page = runpy.run_path(str(ROOT / "tools" / "package_page.py"))["package_page"]
    readme = (ROOT / "README.md").read_text()
    alone, linked = package_page(readme, None), package_page(readme, "https://example.org/m/")
    assert _link.findall(readme)
    assert _link.findall(alone) == _link.findall(linked) == []
    assert "*Picture: The loop: each call reads one section" in alone
    assert "Getting started walks through" in alone
    assert "](https://example.org/m/raw/main/docs/images/loop.svg)" in linked
    assert "[Getting started](https://example.org/m/blob/main/docs/start.md)" in linked
    assert "(https://arxiv.org/abs/2507.02259)" in alone


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 300


def test_the_page_of_the_command_line_is_what_the_help_says() -> None:
    """In a process of its own: click keeps the help option of a command as it was first asked for."""
    page = "import runpy; print(runpy.run_path('tools/generate_cli.py')['cli_page'](), end='')"
    generated = subprocess.check_output([sys.executable, "-c", page], cwd=ROOT, text=True)
    assert (ROOT / "docs" / "cli.md").read_text() == generated, "run `make docs`"


def test_the_settings_of_the_embedded_model_are_those_on_its_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    settings = store.reading_defaults(store.EMBEDDED)
    assert settings
    for name, value in settings.items():
        assert f"| `{name}` | {value} |" in page
