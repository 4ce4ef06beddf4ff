"""What the documentation site adds to the pages in docs/: pages from elsewhere, and links that fit.

    README.md ARCHITECTURE.md SECURITY.md CONTRIBUTING.md CHANGELOG.md     become pages of the site
    docs/design/NNNN-*.md                                      are listed in the navigation
    src/memagent/ROOM/*.py                                     become api/ROOM.md, from their docstrings

Pages are written for a repository browser, so links are relative to the repository. A link to a page
becomes a link within the site (and where its text is the name of a file, the page's title), a link to a
module leads to its place in the API reference, and a link to any other file (a config, a test) becomes
plain text.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "memagent"
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
NOT_IN_THE_API = {"cli", "engines/local/cpu", "engines/local/cuda"}
"""Folders of the package without a page: the command line has its own, kernels have callers."""

_link = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>(?!\w+:|#)[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
)
_fence = re.compile(r"^```.*?^```$", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the parts of the navigation that follow from folders."""
    notes = [f"design/{path.name}" for path in sorted((ROOT / "docs" / "design").glob("*.md"))]
    pages = {"design/": notes, "api/": ["api/index.md", *api_pages()]}
    config.nav = _filled(config.nav, pages)
    return config


def _filled(nav: Any, pages: dict[str, list[str]]) -> Any:
    """The navigation with each `FOLDER/` replaced by the pages of that folder."""
    if isinstance(nav, list):
        return [_filled(entry, pages) for entry in nav]
    if isinstance(nav, dict):
        return {title: _filled(entry, pages) for title, entry in nav.items()}
    return pages.get(nav, nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    for page, content in {"api/index.md": api_index(), **api_pages()}.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site, outside of code blocks."""
    here = page.file.src_uri
    parts = re.split(f"({_fence.pattern})", markdown, flags=re.M | re.S)
    titles = dict(_titles(config.nav))
    return "".join(
        part
        if _fence.fullmatch(part)
        else _link.sub(lambda link: site_link(link, here, titles), part)
        for part in parts
    )


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Each page of the navigation with the title that it has there."""
    entries = nav if isinstance(nav, list) else []
    for title, inner in (
        pair for entry in entries if isinstance(entry, dict) for pair in entry.items()
    ):
        if isinstance(inner, str):
            yield inner, title
        yield from _titles(inner)


def site_link(link: re.Match[str], here: str, titles: Mapping[str, str]) -> str:
    """A Markdown link as the page `here` of the site needs it."""
    sources = {page: name for name, page in ROOT_PAGES.items()}
    source = sources.get(here, f"docs/{here}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    anchor = link["anchor"] or ""
    if target in ROOT_PAGES:
        found = ROOT_PAGES[target]
    elif target.startswith("docs/"):
        found = target.removeprefix("docs/")
    elif target.startswith("src/memagent/") and (place := api_place(ROOT / target)):
        found, anchor = place
    else:
        return link["text"]
    relative = posixpath.relpath(found, posixpath.dirname(here) or ".")
    text = titles.get(found, link["text"]) if link["text"].endswith(".md") else link["text"]
    return f"{link['image']}[{text}]({relative}{anchor})"


# --- the API reference ----------------------------------------------------------------------------


def api_index() -> str:
    """What each folder of the package is for."""
    rows = [
        f"| [`{_name(folder)}`]({_page(folder).removeprefix('api/')}) | {_first_line(folder)} |"
        for folder in _folders()
    ]
    return "\n".join(
        [
            "# Python API",
            "",
            "From the docstrings of the package. `from memagent import Document, Reader, open_engine` is",
            "where most programs start: see [From Python](../python.md).",
            "",
            "| package | what it holds |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )


def api_pages() -> dict[str, str]:
    """A page for each folder of the package, with its modules."""
    return {_page(folder): _api_page(folder) for folder in _folders()}


def api_place(path: Path) -> tuple[str, str] | None:
    """The page and the anchor of a module or a folder; None if it has none."""
    folder = path if path.is_dir() else path.parent
    if folder not in _folders():
        return None
    return _page(folder), "" if path == folder else f"#{_name(path)}"


def _api_page(folder: Path) -> str:
    package = _name(folder)
    docstring = _docstring(folder / "__init__.py")
    modules = [f"::: {_name(path)}\n" for path in _modules(folder)]
    return "\n".join([f"# `{package}`\n", f"{docstring}\n", *modules])


def _folders() -> list[Path]:
    """The package and its folders, outermost first, those with modules only."""
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
    named = {folder: folder.relative_to(PACKAGE).as_posix() for folder in folders}
    hidden = [
        folder
        for folder, name in named.items()
        if any(name == skipped or name.startswith(f"{skipped}/") for skipped in NOT_IN_THE_API)
    ]
    return [folder for folder in folders if folder not in hidden and _modules(folder)]


def _modules(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def _page(folder: Path) -> str:
    name = _name(folder).removeprefix("memagent").lstrip(".")
    return f"api/{name or 'memagent'}.md"


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def _first_line(folder: Path) -> str:
    return _docstring(folder / "__init__.py").partition("\n")[0]
