"""What a dataset holds: counts, lengths, and the depth of the evidence.

inspection = inspect_dataset("dev.jsonl", samples=3)
inspection.summary.depths                          # [12, 9, 11, ...]: evidence by tenths of the text
for excerpt in excerpts(inspection.shown[0]): ...  # each evidence with the text around it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from memagent.data.example import Example, body_starts
from memagent.data.formats.benchmarks import read_dataset
from memagent.data.tasks.lengths import NUM_TENTHS, bucket_counts, uniformity_p
from memagent.data.tasks.registry import rebuild
from memagent.errors import DataError

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
