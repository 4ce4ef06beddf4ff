"""The manifest of a dataset: what it was built from and what is in it, beside the file.

    dev.jsonl                       the examples
    dev.jsonl.manifest.json         settings, fingerprints, counts, lengths, depth of evidence
    dev.jsonl.depth.svg             the depths as a figure

Nothing in it depends on time: the same command on the same sources gives the same manifest.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memagent.data.example import Example, body_starts
from memagent.data.formats.files import disk_errors
from memagent.data.tasks.lengths import NUM_TENTHS, bucket_counts, uniformity_p
from memagent.data.tasks.registry import LEFT_OUT
from memagent.errors import DataError
from memagent.files import replacing, write_atomically

FORMAT = 1
FIGURE_INCHES = (6.0, 2.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRow:
    """What the manifest needs of one example."""

    num_tokens: int | None
    has_text: bool
    """Whether its documents are in the file."""
    num_answers: int
    depths: tuple[float, ...]
    num_left_out: int = 0
    """Own distractors that the text had no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the texts."""

    min: int
    mean: float
    max: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Depths of the evidence in the texts."""

    num: int
    """Number of depths: one for each document with evidence, or for each piece of evidence
    where there is only one document."""
    histogram: list[int]
    """How many lie in each tenth of the text."""
    p_value: float | None
    """Chance of a histogram this uneven if all depths are equally likely; None when too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a dataset is."""

    file: str
    sha256: str
    num_bytes: int
    task: str
    settings: dict[str, Any]
    """All settings of the task."""
    store: str
    sources: dict[str, str]
    """SHA-256 of each source, by its name."""
    num_examples: int
    num_with_text: int
    """Examples whose documents are in the file; the others are rebuilt from their origin."""
    num_answers: dict[str, int]
    """Number of examples by their number of accepted answers."""
    tokens: Lengths | None
    """None where lengths were not counted."""
    depth: Depths | None
    """None where no example has evidence."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the task itself reports, such as what it skipped."""
    memagent: str
    """Version that built it."""
    format: int = FORMAT


def row_of(example: Example, *, has_text: bool) -> ManifestRow:
    """What the manifest needs of an example, which has its documents."""
    return ManifestRow(
        num_tokens=example.num_tokens,
        has_text=has_text,
        num_answers=len(example.answers),
        depths=tuple(round(depth, 6) for depth in evidence_depths(example)),
        num_left_out=int(example.metadata.get(LEFT_OUT, 0)),
    )


def evidence_depths(example: Example) -> list[float]:
    """The depth of the evidence in the text, from 0 to 1.

    Sentences of one document count once: they are always adjacent, and counting each of them would
    exaggerate chance fluctuations.
    """
    if not example.evidence:
        return []
    passages = example.passages
    starts = body_starts(passages)
    num_chars = starts[-1] + len(passages[-1].text)
    if len(passages) == 1:
        return [(starts[0] + (one.start + one.end) / 2) / num_chars for one in example.evidence]
    documents = sorted({one.document for one in example.evidence})
    return [(starts[at] + len(passages[at].text) / 2) / num_chars for at in documents]


def lengths_of(rows: Iterable[ManifestRow]) -> Lengths | None:
    """Statistics of the texts' lengths."""
    counts = [row.num_tokens for row in rows if row.num_tokens is not None]
    if not counts:
        return None
    mean = round(statistics.fmean(counts), 1)
    return Lengths(min=min(counts), mean=mean, max=max(counts), total=sum(counts))


def depths_of(rows: Iterable[ManifestRow]) -> Depths | None:
    """The histogram of depths, and a test of its evenness."""
    depths = [depth for row in rows for depth in row.depths]
    if not depths:
        return None
    histogram = bucket_counts(depths, num_buckets=NUM_TENTHS)
    p_value = round(uniformity_p(histogram), 6) if len(depths) >= 5 * NUM_TENTHS else None
    return Depths(num=len(depths), histogram=histogram, p_value=p_value)


def answer_counts(rows: Iterable[ManifestRow]) -> dict[str, int]:
    """Number of examples by their number of accepted answers."""
    return {str(num): times for num, times in sorted(Counter(r.num_answers for r in rows).items())}


def left_out_counts(rows: Iterable[ManifestRow]) -> dict[str, int]:
    """Examples whose texts had no room for all of their own distractors, if any, for `about`."""
    num = sum(row.num_left_out > 0 for row in rows)
    return {"examples with fewer distractors of their own": num} if num else {}


def manifest_path(out: Path) -> Path:
    """Where the manifest of a dataset lies."""
    return out.with_name(f"{out.name}.manifest.json")


def figure_path(out: Path) -> Path:
    """Where the figure of a dataset's depths lies."""
    return out.with_name(f"{out.name}.depth.svg")


def write_manifest(out: Path, manifest: Manifest) -> None:
    """Put the manifest beside the dataset."""
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    with disk_errors(out):
        write_atomically(manifest_path(out), text.encode(), mode=0o666)


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest of a dataset; None if it has none."""
    path = manifest_path(out)
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest of this version of memagent")
    return contents


def draw_depths(out: Path, depths: Depths) -> Path | None:
    """The histogram as a figure beside the dataset; None without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return None
    path = figure_path(out)
    # a fixed salt and no date: the same histogram gives the same file
    with rc_context({"svg.hashsalt": "memagent", "svg.fonttype": "none"}), replacing(path) as part:
        figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        tenths = [(number + 0.5) / NUM_TENTHS for number in range(NUM_TENTHS)]
        axes.bar(tenths, depths.histogram, width=0.09)
        axes.axhline(depths.num / NUM_TENTHS, linestyle="--", linewidth=1, color="black")
        axes.set_xlim(0, 1)
        axes.set_xlabel("depth in the text")
        axes.set_ylabel("pieces of evidence")
        p_value = "" if depths.p_value is None else f", p = {depths.p_value:.3f}"
        axes.set_title(f"{out.name}: evidence by depth{p_value}", fontsize=9)
        figure.savefig(part, format="svg", metadata={"Date": None})
    return path
