"""Answers from composed memories as a table: each adapter over each kind of memory, and differences on the same questions.

    python tools/grade_replies.py docs/experiments/reader_1.5b_answers/replies.jsonl

A line of the file has the `id` of a memory (`memory/KIND/QUESTION`), its accepted `answers`, and a reply by adapter.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from memagent.eval.stats import compare, mean_interval
from memagent.rewards.verifiers import grade
from memagent.run_files import read_lines

GRADERS = ("strict", "original_sub_em_boxed")


def main() -> None:
    scores: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for values, _ in read_lines(Path(sys.argv[1])):
        _, kind, question = values["id"].split("/")
        for adapter, reply in values["replies"].items():
            for grader in GRADERS:
                score = grade(grader, reply, values["answers"]).value
                scores[grader, adapter, kind][question] = score
    print("| grader | adapter | memory | right | to the first adapter | to its own gold memories |")
    print("| --- | --- | --- | --- | --- | --- |")
    first = next(adapter for _, adapter, _ in scores)
    for (grader, adapter, kind), found in scores.items():
        right = mean_interval([*found.values()])
        others = (scores[grader, first, kind], scores[grader, adapter, "gold"])
        cells = [_difference(other, found) if other is not found else "" for other in others]
        share = f"{right.value:.1%} ({right.low:.1%} to {right.high:.1%})"
        print("|", " | ".join((grader, adapter, kind, share, *cells)), "|")


def _difference(before: dict[str, float], after: dict[str, float]) -> str:
    pairs = sorted(before.keys() & after.keys())
    found = compare([after[one] for one in pairs], [before[one] for one in pairs]).difference
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


if __name__ == "__main__":
    main()
