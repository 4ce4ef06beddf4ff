"""The documentation site builds without a warning, needs nothing from elsewhere, and holds every page."""

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class _Assets(HTMLParser):
    """Collects what a page loads, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(str(values["src"]))
        if tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(str(values.get("href")))


def assets_of(page: str) -> list[str]:
    """What a browser loads to show a page."""
    parser = _Assets()
    parser.feed(page)
    return parser.loaded


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return out


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for asset in assets_of(page.read_text("utf-8")):
            assert not re.match(r"(https?:)?//", asset), f"{page.name} loads {asset}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text("utf-8"))


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in pages if not (site / page.with_suffix(".html")).exists()]
    assert missing == []
    for name in ("index", "architecture", "contributing", "changelog"):
        assert (site / f"{name}.html").exists()


def test_every_module_has_its_place_in_the_api_reference(site: Path) -> None:
    places = "".join(path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    hooks = runpy.run_path(str(ROOT / "tools" / "hooks.py"))
    for path in (ROOT / "src" / "memagent").rglob("*.py"):
        if not path.name.startswith("_") and (found := hooks["api_place"](path)):
            assert f'id="{found[1].removeprefix("#")}"' in places, f"{path} is not in the reference"


def test_names_that_programs_start_from_are_documented(site: Path) -> None:
    reader = (site / "api" / "agent.html").read_text("utf-8")
    assert 'id="memagent.agent.reader.Reader.ask"' in reader
    assert 'id="memagent.engines.base.open_engine"' in (site / "api" / "engines.html").read_text()


def test_the_page_of_config_keys_is_what_the_settings_say() -> None:
    generated = runpy.run_path(str(ROOT / "tools" / "generate_config.py"))["config_page"]()
    assert (ROOT / "docs" / "config.md").read_text() == generated, "run `make docs`"


# --- the parts that make the site ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_picture"),
    [
        ("rewards   1.0   0.0\nmean      0.5", True),
        ("file ─▶ Document", True),
        ("from memagent import Reader\nReader(engine)", True),
        ("python tools/generate_cli.py", True),
        ("A sentence that ends here. And one more.", False),
        ("- a list\n- of things", False),
        ("    indented  already", False),
    ],
)
def test_pictures_and_code_in_docstrings_are_kept_as_they_are(text: str, is_picture: bool) -> None:
    displayed = runpy.run_path(str(ROOT / "tools" / "docstrings.py"))["displayed"](text)
    assert (displayed != text) == is_picture
