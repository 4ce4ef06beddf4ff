"""Examples of every task, byte for byte: a changed text would make results of other days incomparable."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from memagent.data.tasks.registry import TASKS, open_task
from tests.support.hotpot import write_hotpot
from tests.support.ruler_sources import ruler_settings

EXPECTED = {
    "hotpotqa": "d0587cfa3afb53fe",
    "beyond/coreference": "84436bde7bd8740f",
    "beyond/counting": "1cc952e957602dcd",
    "beyond/aggregation": "9ecf02b423688c18",
    "beyond/two_hop": "da3cdbaeb107001b",
    "beyond/corrections": "cbfc3882ab86c212",
    "beyond/unanswerable": "7bd908e86e02ba69",
    "beyond/injection": "3f03c575ec741c4b",
    "ruler/niah_single_1": "9d1e4fa965c37ed6",
    "ruler/niah_single_2": "8ae361548b11bb12",
    "ruler/niah_single_3": "6bcf5f457d4d2351",
    "ruler/niah_multikey_1": "24cfa3580ce31e17",
    "ruler/niah_multikey_2": "b4c1c8946c8b18d3",
    "ruler/niah_multikey_3": "c5f0c453a6886aed",
    "ruler/niah_multivalue": "3abb0aeb9bfe7c98",
    "ruler/niah_multiquery": "0325b2dee95d0884",
    "ruler/vt": "31556dd0d370bbd6",
    "ruler/cwe": "767053e5c3c98b00",
    "ruler/fwe": "c0c0f75ba4a886a0",
    "ruler/qa_1": "e29c979985ae0bc4",
    "ruler/qa_2": "d93b8b164f479b32",
    "small/colours": "34694125a43bd297",
}


def fingerprint(task: str, folder: Path) -> str:
    """Of two examples: question, answers, text, evidence and metadata."""
    settings: dict[str, Any] = {"seed": 5}
    if task == "small/colours":
        settings["sentences"] = 20
    elif task == "hotpotqa":
        settings |= {"tokens": 3000, "tokenizer": "bytes", **write_hotpot(folder).settings}
    elif task.startswith("ruler/"):
        settings |= ruler_settings(folder / "ruler", task, tokens=3000, tokenizer="bytes")
    else:
        settings |= {"tokens": 3000, "tokenizer": "bytes"}
    opened = open_task(task, settings)
    hashed = hashlib.sha256()
    for index in range(2):
        record = asdict(opened.example(index)) | {"origin": None}
        hashed.update(json.dumps(record, sort_keys=True).encode())
    return hashed.hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_the_same_bytes_as_ever(task: str, tmp_path: Path) -> None:
    assert fingerprint(task, tmp_path) == EXPECTED[task]
