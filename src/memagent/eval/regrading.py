"""Grade the answers of an evaluation again, by other graders, without asking again.

    records = regrade(Path("runs/first"), ["f1", "exact"])
    records[0].scores["f1"]

    RUN/grades/f1.jsonl    one line per record: its item, its score, what of the answer was graded

The run itself is not changed. Grading again replaces a grader's file, so that a run that was resumed can be
graded as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from memagent.errors import ConfigError, RunError
from memagent.eval.records import GRADES, ItemRecord, read_items
from memagent.rewards.verifiers import NEEDS_NO_ANSWERS, Score, grade, open_grader
from memagent.run_files import write_file


def regrade(path: Path, graders: Sequence[str]) -> list[ItemRecord]:
    """The records of a run without traces, graded by each of `graders` too; their scores are stored in the run.

    Failed items are not graded: they count as 0 for every grader. Questions without an accepted answer are
    left to graders that need none.
    """
    if not graders:
        raise ConfigError("name at least one `grader`")
    for name in graders:
        open_grader(name)
    records = list(read_items(path, with_traces=False))
    if not records:
        raise RunError(f"{path} holds no finished items yet; there is nothing to grade")
    for name in dict.fromkeys(graders):
        lines = []
        for number, record in enumerate(records):
            score = _score(record, name, path)
            if score is not None:
                records[number] = replace(record, scores={**record.scores, name: score.value})
                lines.append(_line(record, score))
        write_file(path, f"{GRADES}/{name}.jsonl", b"".join(lines))
    return records


def _score(record: ItemRecord, grader: str, path: Path) -> Score | None:
    if record.status == "failed" or not (record.answers or grader in NEEDS_NO_ANSWERS):
        return None
    if record.match is None:
        raise RunError(
            f"{path} was written by an earlier version, which did not record whether one or all of the "
            "accepted answers are required; evaluate again"
        )
    return grade(
        grader,
        record.answer,
        record.answers,
        record.match,
        max_tokens=record.graded_tokens,
    )


def _line(record: ItemRecord, score: Score) -> bytes:
    values = {
        "item": asdict(record.key),
        "score": score.value,
        "extracted": score.extracted,
        "reason": score.reason,
    }
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
