"""One method on the same questions in texts of several lengths: what it answers, and what its memory held.

    records of a method ─▶ by_length ─┬─▶ shared_rows    each length, on the questions that all lengths have
                                      └─▶ length_pairs   longer texts against the shortest ones, question by question

`tools/make_results.py` shows both on the results page. A question whose evidence is retained has all of it, word for word, in
its last memory: if it is answered wrongly, the answer was lost in the last step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from memagent.eval.records import ItemRecord
from memagent.eval.stats import Comparison, Interval, compare, mean_interval, wilson

PAPER_RULE = "original_sub_em_boxed"
Lengths = dict[int, dict[str, ItemRecord]]
"""Records by length and question."""
Pair = tuple[ItemRecord, ItemRecord]
"""A question in a shorter text and in a longer one."""


class Share(NamedTuple):
    """So many of so many."""

    num: int
    of: int

    def __str__(self) -> str:
        return f"{self.num} of {self.of}"


class LengthRow(NamedTuple):
    """A method at one length."""

    length: int
    score: Interval
    captured: Interval
    retained: Interval
    right_retained: Share
    """Right, of the questions with all evidence in the last memory."""
    right_other: Share
    """Right, of the others."""
    changes: float
    """Sections that changed the memory, of a text."""
    num_full: int
    """Texts whose memory was full at least once."""


class LengthPair(NamedTuple):
    """Longer texts against shorter ones, on the same questions."""

    shorter: int
    longer: int
    scores: tuple[float, float]
    """Means at both lengths."""
    strict: Comparison
    paper: Comparison | None
    """By the paper's rule; None where that has not graded them."""
    both_retained: Comparison | None
    """On the questions with all evidence in the last memory at both lengths."""
    lost: tuple[Pair, ...]
    """Questions that score less in the longer text."""

    @property
    def lost_retained(self) -> Share:
        """Lost questions with all evidence in the last memory of the longer text."""
        return Share(sum(is_retained(record) for _, record in self.lost), len(self.lost))


def by_length(records: Iterable[ItemRecord]) -> Lengths:
    """Records of one method and task, by length and question."""
    found: Lengths = defaultdict(dict)
    for record in records:
        if record.target_tokens:
            found[record.target_tokens][record.id.rpartition("/")[2]] = record
    return dict(sorted(found.items()))


def is_retained(record: ItemRecord) -> bool:
    """Whether all evidence is in the last memory."""
    return record.retained == 1.0


def changes(record: ItemRecord) -> int:
    """Sections that changed the memory."""
    return record.num_sections - int(record.metadata["reading"]["kept_memories"])


def was_full(record: ItemRecord) -> bool:
    """Whether the memory was full at least once; False where that is not known."""
    reading: dict[str, float] = record.metadata.get("reading", {})
    return reading.get("cut_memories", 0) > 0


def shared_rows(lengths: Lengths) -> list[LengthRow]:
    """Each length, on the questions that all of them have; none where traces said nothing about reading."""
    shared = _shared(lengths.values())
    return [
        _length_row(length, [found[one] for one in shared])
        for length, found in lengths.items()
        if shared and all("reading" in found[one].metadata for one in shared)
    ]


def _length_row(length: int, records: Sequence[ItemRecord]) -> LengthRow:
    holds = [record for record in records if is_retained(record)]
    others = [record for record in records if not is_retained(record)]
    return LengthRow(
        length,
        score=mean_interval([record.score for record in records]),
        captured=wilson(sum(record.captured == 1.0 for record in records), len(records)),
        retained=wilson(len(holds), len(records)),
        right_retained=_right(holds),
        right_other=_right(others),
        changes=fmean(changes(record) for record in records),
        num_full=sum(map(was_full, records)),
    )


def _right(records: Sequence[ItemRecord]) -> Share:
    return Share(sum(record.score == 1.0 for record in records), len(records))


def length_pairs(lengths: Lengths) -> list[LengthPair]:
    """The shortest texts with each longer kind that has some of their questions."""
    shortest = min(lengths)
    return [
        _pair(shortest, length, lengths[shortest], found)
        for length, found in lengths.items()
        if length > shortest and _shared((lengths[shortest], found))
    ]


def _pair(
    shorter: int, longer: int, short: dict[str, ItemRecord], long: dict[str, ItemRecord]
) -> LengthPair:
    both = [(short[one], long[one]) for one in _shared((short, long))]
    held = [pair for pair in both if all(map(is_retained, pair))]
    return LengthPair(
        shorter,
        longer,
        scores=(fmean(one.score for one, _ in both), fmean(one.score for _, one in both)),
        strict=compare([one.score for _, one in both], [one.score for one, _ in both]),
        paper=_compared(_paper_scores(both)),
        both_retained=_compared([(one.score, other.score) for one, other in held]),
        lost=tuple((one, other) for one, other in both if other.score < one.score),
    )


def _paper_scores(pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    graded = [(one.graded_by(PAPER_RULE), other.graded_by(PAPER_RULE)) for one, other in pairs]
    return [(one.score, other.score) for one, other in graded if one and other]


def _compared(scores: Sequence[tuple[float, float]]) -> Comparison | None:
    """Second scores minus first ones; None without any."""
    return (
        compare([score for _, score in scores], [score for score, _ in scores]) if scores else None
    )


def _shared(found: Iterable[dict[str, ItemRecord]]) -> list[str]:
    """Questions that all have, in order."""
    return sorted(set.intersection(*(set(one) for one in found)))
