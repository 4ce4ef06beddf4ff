"""What a dataset holds: counts, lengths, and where in the texts the evidence stands.

summary = summarize(read_examples("dev.jsonl"))
summary.depths          # [12, 9, 11, ...]: evidence by tenths of the text
for excerpt in excerpts(example): ...     # each evidence with the text around it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from memagent.data.example import Example, body_starts
from memagent.data.tasks.depth import bucket_counts, uniformity_p

NUM_BUCKETS = 10
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
    """Examples whose text has to be made again from its origin."""
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
    counts = bucket_counts(found_depths, num_buckets=NUM_BUCKETS)
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
