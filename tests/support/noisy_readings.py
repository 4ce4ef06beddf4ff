"""Readings by a model whose every reply is different, and what today's code makes of them.

`tests/reference/readings/MODE` holds a run of each; `python -m tests.support.noisy_readings` makes those that are missing.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace
from memagent.documents.document import Document
from memagent.engines.scripted import ScriptedEngine
from memagent.types import Message, Sampling

FOLDER = Path(__file__).parents[1] / "reference" / "readings"
TEXT = "".join(
    f"On day {day} Ada Holm sold {day % 7 + 3} crates of pears at the gate. "
    f"The {'miller' if day % 3 else 'harbour master'} paid {day * 11} crowns. Rain fell.\n"
    + ("\n" if day % 4 == 0 else "")
    for day in range(1, 13)
)
TEXT += "On day 13 the storm took the lantern, and Ada Holm sold 2 crates.\n"
QUESTIONS = (
    "How many crates were sold when the storm took the lantern?",
    "Who paid?",
    "When did it rain?",
    "When did it rain?",
)
SMALL: dict[str, Any] = {
    "window": 4000,
    "chunk_tokens": 300,
    "memory_tokens": 160,
    "answer_tokens": 80,
}
MODES: dict[str, dict[str, Any]] = {
    "in_order": {},
    "paper": {"prompts": "paper", "seed": 7},
    "keep": {"prompts": "keep"},
    "add": {"prompts": "add"},
    "evidence": {"evidence": True},
    "copied": {"prompts": "add", "evidence": True, "quotes": "copied"},
    "items": {"items": True},
    "relevance": {"order": "relevance", "stop_early": True},
    "stop_early": {"stop_early": True},
    "parallel": {"mode": "parallel"},
    "parallel_evidence": {"mode": "parallel", "evidence": True},
    "parallel_memories": {"mode": "parallel", "notes": "memories", "prompts": "keep"},
}

_day = re.compile(r"On day (\d+)")


class NoisyModel:
    """Never replies the same twice, not even to equal prompts."""

    def __init__(self) -> None:
        self._num_same: Counter[str] = Counter()

    def __call__(self, messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        self._num_same[prompt] += 1
        digest = hashlib.sha256(
            f"{self._num_same[prompt]} {sampling} {prompt}".encode()
        ).hexdigest()
        number = int(digest, 16)
        days = _day.findall(prompt)
        if "<note" not in prompt and "<section" not in prompt:
            return f"Answer {digest[:8]}.\nSources: 1, {number % 5 + 1}"
        if "<note" in prompt:
            missing = f"day {number % 9}" if number % 3 else "nothing"
            return f"Merged {digest[:8]}, days {', '.join(days[:3])}.\nMissing: {missing}"
        if number % 11 == 0:
            return ""
        if number % 7 == 0:
            return "No change." if "No change." in prompt else "Nothing."
        day = days[number % len(days)]
        said = [f"Day {day}: {digest[:8]}.", f"<think>{digest[8:12]}</think>"]
        sentence = next(
            (line for line in prompt.splitlines() if line.startswith(f"On day {day} ")), ""
        )
        if "<quote>" in prompt:
            said.append(f"<quote>{sentence.partition('. ')[0]}.</quote>")
            said.append("<quote>Nobody said this.</quote>" if number % 5 == 0 else "")
        elif "<item>" in prompt:
            said.append(
                f"<item>Ada Holm | {int(day) % 7 + 3} | {sentence.partition('. ')[0]}.</item>"
            )
        else:
            said.append(sentence)
        said.append("<enough/>" if "<enough/>" in prompt and number % 6 == 0 else "")
        return "\n".join(said)


def noisy_reader(mode: str, script: Any = None) -> Reader:
    """A reader in a mode; `script` replies in place of a new noisy model."""
    engine = ScriptedEngine(script or NoisyModel())
    return Reader(engine, tokenizer="bytes", **{**SMALL, **MODES[mode]})


def document() -> Document:
    """The text that is read."""
    return Document.from_text(TEXT, source="pears.txt")


def without_clock(step: Step) -> dict[str, Any]:
    """A step without what depends on the clock."""
    values = json.loads(step.to_json())
    return {name: value for name, value in values.items() if name not in ("started", "seconds")}


def comparable(trace: Trace) -> list[dict[str, Any]]:
    """The steps of a trace; those of calls that were in flight at once in an order of their own."""
    steps = [without_clock(step) for step in trace.steps]
    if not any(step.round for step in trace.steps):
        return steps
    memories = [step["memory"] for step in steps]
    for step in steps:
        del step["index"]
        step["inputs"] = [memories[index] for index in step.get("inputs", ())]
    return sorted(steps, key=json.dumps)


def kept_traces(mode: str) -> list[Trace]:
    """The kept run of a mode, by question."""
    return Trace.load(FOLDER / mode)


def main() -> None:
    for mode in MODES:
        if not (FOLDER / mode).exists():
            noisy_reader(mode).ask_many(QUESTIONS, document(), run_dir=FOLDER / mode)
            (FOLDER / mode / ".lock").unlink()


if __name__ == "__main__":
    main()
