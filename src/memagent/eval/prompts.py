"""The prompts of the methods that evaluation compares the reader with: the texts of `prompts.toml`."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

from memagent.agent.prompts import fill
from memagent.types import Message

TEXTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
DIRECT, RETRIEVED, REFINE = TEXTS["direct"], TEXTS["retrieved"], TEXTS["refine"]
MAP, COLLAPSE, REDUCE = TEXTS["map"], TEXTS["collapse"], TEXTS["reduce"]
CLOSED_BOOK = TEXTS["closed_book"]
NOTHING = "NONE"
"""The reply to a section without anything to note."""
NO_DRAFT = "(none yet)"


def messages(template: str, **values: str) -> list[Message]:
    """The conversation of one call."""
    return [{"role": "user", "content": fill(template, values)}]


def fingerprint() -> str:
    """SHA-256 of the prompts that compare methods: a run with other prompts is another run."""
    wording = [DIRECT, RETRIEVED, REFINE, MAP, COLLAPSE, REDUCE, NOTHING, NO_DRAFT]
    return hashlib.sha256(json.dumps(wording).encode()).hexdigest()
