"""What became of the answers in a validation: other graders, losses from the memory, and where wrong answers got lost.

    python tools/explain_validation.py RUN/validation/step-000037.jsonl

Of tasks with one right answer. `lost` counts sections after which an answer that was in the memory is no longer in it, of all
sections that had it before; yes and no are left out there. A form of the answer shares a word with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from compare_validations import read

from memagent.eval.records import ItemRecord
from memagent.rewards.text import last_boxed, words_of
from memagent.rewards.verifiers import grade

GRADERS = ("strict", "lenient", "f1", "original_sub_em_boxed")


def memories(record: ItemRecord) -> list[str]:
    """The memory after each section, in lower case."""
    steps = (record.trace or {}).get("steps", [])
    return [step["memory"].lower() for step in steps if step["kind"] == "read"]


def losses(record: ItemRecord) -> tuple[int, int]:
    """Sections after which the answer is lost, and sections that had it before."""
    answer, kept = record.answers[0].lower(), memories(record)
    had = [after for before, after in pairwise(kept) if answer in before]
    return sum(answer not in after for after in had), len(had)


def fate(record: ItemRecord) -> str:
    """Where a wrong answer got lost."""
    answer, kept = record.answers[0].lower(), memories(record)
    if answer in ("yes", "no"):
        return "yes or no"
    if not any(answer in memory for memory in kept):
        return "never in a memory"
    if answer not in kept[-1]:
        return "not in the last memory"
    said = last_boxed(record.answer or "") or ""
    is_form = set(words_of(said)) & set(words_of(answer))
    return "in the last memory, another form" if is_form else "in the last memory, another answer"


def report(records: Sequence[ItemRecord]) -> str:
    """Figures of one task and length."""
    scores = {
        name: fmean(grade(name, one.answer or "", one.answers).value for one in records)
        for name in GRADERS
    }
    asked = [losses(one) for one in records if one.answers[0].lower() not in ("yes", "no")]
    fates = Counter(fate(one) for one in records if one.score < 1)
    return ", ".join(
        [
            *(f"{name} {100 * score:.1f} %" for name, score in scores.items()),
            f"lost {sum(lost for lost, _ in asked)} of {sum(had for _, had in asked)}",
            *(f"{name}: {count}" for name, count in sorted(fates.items())),
        ]
    )


def main() -> None:
    for (task, length), records in read(Path(sys.argv[1])).items():
        if not task.startswith("ruler/"):
            sys.stdout.write(f"{task} {length}: {report(records)}\n")


if __name__ == "__main__":
    main()
