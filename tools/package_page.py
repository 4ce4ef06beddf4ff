"""The README as a page of a package index, where neither pictures nor pages of the repository are.

hatchling calls this when it builds a package (pyproject.toml, `[tool.hatch.metadata.hooks.custom]`). With a
`Repository` among the project's URLs, links and pictures lead there. Without one, a link is its text, a
picture its description, and the page says where the documentation is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

BRANCH = "main"
WHERE = (
    "\nPages that are named here are in `docs` of the source distribution (`pip download --no-binary "
    "memagent --no-deps memagent`), and in a clone.\n"
)
_link = re.compile(
    r"(?P<is_picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|mailto:|#)(?P<path>[^)\s]+)\)"
)


def package_page(readme: str, repository: str | None) -> str:
    """The README without links that only work in the repository."""
    if repository is None:
        return _link.sub(_described, readme) + WHERE
    base = repository.rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["is_picture"] else "blob"
        return f"{link['is_picture']}[{link['text']}]({base}/{kind}/{BRANCH}/{link['path']})"

    return _link.sub(absolute, readme)


def _described(link: re.Match[str]) -> str:
    return f"*Picture: {link['text']}.*" if link["is_picture"] else link["text"]


class PackagePage(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        page = package_page(readme, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
