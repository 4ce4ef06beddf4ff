"""The catalogue of sources: published files that datasets are built from, their licences and addresses.

    find_source("squad-dev").licence        # "CC BY-SA 4.0"
    held_by(Path("data/hotpotqa"))          # sources that a folder holds: {"hotpotqa-dev": Path(...), ...}

Not here: how a source gets onto this machine (`cache.py`, `download.py`), and what is in it (`readers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memagent import names
from memagent.errors import ConfigError

HOTPOT_ADDRESS = "http://curtis.ml.cmu.edu/datasets/hotpot"
SQUAD_ADDRESS = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
CC_BY_SA = "CC BY-SA 4.0"

SourceKind = Literal["hotpotqa", "paragraphs", "squad", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published file, or a kind of folder, that datasets are built from."""

    kind: SourceKind
    what: str
    """One line that describes it."""
    licence: str | None
    """None for texts of yours."""
    url: str | None = None
    """Where it is published; None when it is derived from other sources, or yours."""
    num_bytes: int | None = None
    """Size as published; None when not known."""
    sha256: str | None = None
    """Checksum as published; None when unknown; then that of the first download is kept."""
    names: tuple[str, ...] = ()
    """What the file is called in a folder of yours; the first that is there is taken."""

    @property
    def file(self) -> str:
        """What the file is called in the cache."""
        return self.url.rpartition("/")[2] if self.url else self.names[0]


def _names(*stems: str) -> tuple[str, ...]:
    endings = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
    return tuple(stem + ending for stem in stems for ending in endings)


SOURCES: dict[str, Source] = {
    "hotpotqa-train": Source(
        kind="hotpotqa",
        what="HotpotQA 1.1, training questions with ten paragraphs each (90,447)",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_train_v1.1.json",
        num_bytes=566_426_227,
        sha256="26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
        names=_names("hotpot_train_v1.1", "hotpotqa_train", "train"),
    ),
    "hotpotqa-dev": Source(
        kind="hotpotqa",
        what="HotpotQA 1, development questions, distractor setting (7,405); never train on them",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_dev_distractor_v1.json",
        num_bytes=46_320_117,
        sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        names=_names("hotpot_dev_distractor_v1", "hotpotqa_dev", "dev"),
    ),
    "hotpotqa-paragraphs": Source(
        kind="paragraphs",
        what="distinct Wikipedia paragraphs; those of both files above unless a file is given",
        licence=CC_BY_SA,
        names=("hotpotqa-paragraphs.jsonl.gz", *_names("paragraphs")),
    ),
    "squad-dev": Source(
        kind="squad",
        what="SQuAD 2.0, development questions (11,873, half without an answer)",
        licence=CC_BY_SA,
        url=f"{SQUAD_ADDRESS}/dev-v2.0.json",
        num_bytes=4_370_528,
        sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        names=_names("dev-v2.0", "squad"),
    ),
    "essays": Source(
        kind="texts",
        what="prose to hide things in: any folder of .txt and .md files, which may be gzipped",
        licence=None,
    ),
}
"""Sources by name. Sizes and checksums are those under which the files are published."""


def find_source(name: str) -> Source:
    """The source of a name; an error suggests the nearest name."""
    if name not in SOURCES:
        raise ConfigError(f"there is no source {name!r}; {names.hint(name, SOURCES)}")
    return SOURCES[name]


def source_setting(name: str) -> str:
    """How messages name the setting that says where a source lies."""
    return f"`sources.{name}=PATH`"


def held_by(folder: Path) -> dict[str, Path]:
    """The sources that a folder holds under the usual names of their files."""
    return {
        name: folder / file
        for name, source in SOURCES.items()
        for file in reversed(source.names)
        if (folder / file).is_file()
    }
