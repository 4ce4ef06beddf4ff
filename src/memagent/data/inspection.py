"""What a dataset holds: counts, lengths, and the depth of the evidence; and its manifest, which says so beside it.

    inspection = inspect_dataset("dev.jsonl", samples=3)
    inspection.summary.depths                          # [12, 9, 11, ...]: evidence by tenths of the text
    for excerpt in excerpts(inspection.shown[0]): ...  # each evidence with the text around it

    dev.jsonl                       the examples
    dev.jsonl.manifest.json         settings, fingerprints, counts, lengths, depth of evidence
    dev.jsonl.depth.svg             the depths as a figure

Nothing in a manifest depends on time: the same command on the same sources gives the same manifest.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from memagent.data.example import Example, body_starts
from memagent.data.formats.benchmarks import read_dataset
from memagent.data.formats.files import disk_errors
from memagent.data.tasks.lengths import NUM_TENTHS, bucket_counts, uniformity_p
from memagent.data.tasks.registry import LEFT_OUT, rebuild
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


# --- what a dataset holds -------------------------------------------------------------------------

AROUND_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How numbers are spread.

    Example: Spread(min=8004, median=8110.0, mean=8101.5, max=8190)
    """

    min: int
    median: float
    mean: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dataset in numbers. A Spread is None where no example has the number."""

    num_examples: int
    num_repeated_ids: int
    """Examples whose id an earlier one has; 0 in a sound dataset."""
    num_without_text: int
    """Examples whose text has to be rebuilt from its origin."""
    tasks: dict[str, int]
    """Examples by task."""
    graders: dict[str, int]
    """Examples by grader."""
    num_tokens: Spread | None
    num_documents: Spread | None
    num_answers: Spread | None
    num_evidence: Spread | None
    """Evidence spans per example."""
    num_without_evidence: int
    answers: dict[str, int]
    """The most frequent answers and how often they are accepted."""
    depths: list[int]
    """Evidence by tenths of the text in which it begins, over examples that have their text."""
    depths_p: float
    """Chance of depths at least this uneven if all are equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Evidence with the text around it, within its document."""

    document: int
    title: str
    depth: float
    """Where it begins in the whole text, from 0 to 1."""
    before: str
    text: str
    after: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A dataset in numbers, and some of its examples."""

    file: Path
    summary: Summary
    shown: dict[int, Example]
    """Examples by their index."""

    def to_dict(self, *, around_chars: int = AROUND_CHARS) -> dict[str, Any]:
        """Plain values, with the evidence of each example in the text around it."""
        return {
            "file": str(self.file),
            **asdict(self.summary),
            "examples": [
                _entry(index, example, around_chars) for index, example in self.shown.items()
            ],
        }


def inspect_dataset(
    file: str | Path, *, indices: Collection[int] = (), samples: int = 3, with_text: bool = False
) -> Inspection:
    """The numbers of a dataset, and the examples of `indices`, or else the first `samples`.

    With `with_text`, texts that the file has only the origin of are rebuilt: those of `indices`, or all.
    """
    file = Path(file)
    wanted = set(indices) or range(samples)
    rebuilt: Collection[int] | None = ()
    if with_text:
        rebuilt = indices or None
    shown: dict[int, Example] = {}
    summary = summarize(_passing(file, wanted, shown, rebuilt))
    if summary.num_examples == 0:
        raise DataError(f"{file} holds no examples")
    for index in sorted(set(indices) - shown.keys()):
        raise DataError(f"{file} has no example {index}: it has {summary.num_examples:,}")
    return Inspection(file=file, summary=summary, shown=shown)


def _passing(
    file: Path, wanted: Collection[int], shown: dict[int, Example], rebuilt: Collection[int] | None
) -> Iterator[Example]:
    """The examples of a file; those of `wanted` are kept in `shown`.

    Missing texts of `rebuilt` are rebuilt; of all examples when it is None.
    """
    for index, example in enumerate(read_dataset(file)):
        whole = rebuild(example) if rebuilt is None or index in rebuilt else example
        if index in wanted:
            shown[index] = whole
        yield whole


def _entry(index: int, example: Example, around_chars: int) -> dict[str, Any]:
    evidence = None
    if example.documents is not None:
        evidence = [asdict(one) for one in excerpts(example, around_chars=around_chars)]
    return {
        "index": index,
        "id": example.id,
        "task": example.task,
        "question": example.question,
        "answers": list(example.answers),
        "match": example.match,
        "num_tokens": example.num_tokens,
        "evidence": evidence,
    }


def summarize(examples: Iterable[Example], *, num_answers: int = 10) -> Summary:
    """The numbers of a dataset, in one pass; with the `num_answers` most frequent answers."""
    ids: set[str] = set()
    tasks, graders, answers = Counter[str](), Counter[str](), Counter[str]()
    tokens: list[int] = []
    documents: list[int] = []
    answers_each: list[int] = []
    evidence_each: list[int] = []
    found_depths: list[float] = []
    num_examples = num_repeated = 0
    for example in examples:
        num_examples += 1
        num_repeated += example.id in ids
        ids.add(example.id)
        tasks[example.task] += 1
        graders[example.grader] += 1
        answers.update(example.answers)
        answers_each.append(len(example.answers))
        evidence_each.append(len(example.evidence))
        if example.num_tokens is not None:
            tokens.append(example.num_tokens)
        if example.documents is not None:
            documents.append(len(example.documents))
            found_depths += depths(example)
    counts = bucket_counts(found_depths, num_buckets=NUM_TENTHS)
    return Summary(
        num_examples=num_examples,
        num_repeated_ids=num_repeated,
        num_without_text=num_examples - len(documents),
        tasks=dict(sorted(tasks.items())),
        graders=dict(sorted(graders.items())),
        num_tokens=spread(tokens),
        num_documents=spread(documents),
        num_answers=spread(answers_each),
        num_evidence=spread(evidence_each),
        num_without_evidence=evidence_each.count(0),
        answers=dict(answers.most_common(num_answers)),
        depths=counts,
        depths_p=uniformity_p(counts),
    )


def depths(example: Example) -> list[float]:
    """How deep in the text each evidence begins, from 0 to 1; for examples that have their text."""
    if not example.evidence:
        return []
    starts = body_starts(example.passages)
    num_chars = max(starts[-1] + len(example.passages[-1].text), 1)
    return [(starts[item.document] + item.start) / num_chars for item in example.evidence]


def excerpts(example: Example, *, around_chars: int = AROUND_CHARS) -> list[Excerpt]:
    """Each evidence of an example that has its text, with the text around it."""
    found = []
    for item, depth in zip(example.evidence, depths(example), strict=True):
        passage = example.passages[item.document]
        found.append(
            Excerpt(
                document=item.document,
                title=passage.title,
                depth=depth,
                before=passage.text[max(item.start - around_chars, 0) : item.start],
                text=item.text,
                after=passage.text[item.end : item.end + around_chars],
                note=item.note,
            )
        )
    return found


def spread(values: Sequence[int]) -> Spread | None:
    """How values are spread; None if there are none."""
    if not values:
        return None
    middle = quantiles(values, n=2, method="inclusive")[0] if len(values) > 1 else values[0]
    return Spread(
        min=min(values), median=float(middle), mean=sum(values) / len(values), max=max(values)
    )
