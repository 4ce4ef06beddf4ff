"""Essays: a folder of texts as one, read once per process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memagent.data.sources.cache import open_source, sha256_of
from memagent.data.sources.readers import texts_in


class Essays(NamedTuple):
    """The texts of a folder, one after the other."""

    text: str
    sources: dict[str, str]
    """Fingerprint of the folder, as an example's origin keeps it."""


def open_essays(folder: str | None) -> Essays:
    """The texts of a folder or file, in the order of their names."""
    path = open_source("essays", folder)
    sha256 = sha256_of(path)
    return Essays(_joined(path, sha256), {"essays": sha256})


@lru_cache(maxsize=1)
def _joined(path: Path, sha256: str) -> str:
    return "\n\n".join(text.strip() for _, text in texts_in(path))
