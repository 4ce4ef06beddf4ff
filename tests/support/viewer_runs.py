"""Run directories for the viewer, made without a model: a reading, an evaluation, a training run.

make_reading(folder / "reading", num_sections=40)
make_evaluation(folder / "evaluation", num=20)
make_training(folder / "training", num_steps=30)
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from memagent.agent.journal import identity
from memagent.agent.prompts import open_prompts
from memagent.agent.reader import Reader
from memagent.agent.trace import Section, Step, Trace, journal_line
from memagent.config import AgentConfig
from memagent.documents.document import Document
from memagent.engines.scripted import Script, ScriptedEngine, keyword_reply
from memagent.eval.records import ItemRecord
from memagent.runs import Run
from memagent.types import Message, Sampling, Usage
from tests.support.eval_runs import lifelike, make_run

QUESTION = "Who cast the bell of the new school, and who paid for it?"
ANSWER = "Amara Whitlock cast it in her foundry at Eastholm; the ferrymen's guild paid for it."
FACTS = (
    "The school of Tarn Valley was opened in the spring of 1871.",
    "Its first bell cracked in the frost of the second winter.",
    "A new bell was ordered from the foundry at Eastholm.",
    "The foundry belonged to Amara Whitlock, who cast bells for nine parishes.",
    "The council refused to pay for the bell.",
    "The ferrymen's guild collected the money at the crossing.",
    "Amara Whitlock cast the bell herself, in one night.",
    "The ferrymen's guild paid for the bell in silver.",
)
SIZES = {"window": 8000, "chunk_tokens": 500, "memory_tokens": 600, "answer_tokens": 300}
"""Reading settings for which `story` has several sections, counted in bytes."""
FILLER = (
    "Snow lay on the passes until May, and the mail came once a fortnight. The miller kept a record of the "
    "weather, of the price of rye, and of who owed what to whom.\n\n"
)


def story(num_sections: int) -> str:
    """A text in which each of FACTS stands once, spread over its sections."""
    parts = []
    for number in range(num_sections):
        fact = number * len(FACTS) / num_sections
        told = FACTS[int(fact)] if fact == int(fact) or num_sections <= len(FACTS) else ""
        parts.append(f"Chapter {number + 1}\n\n{FILLER}{told}\n\n{FILLER}")
    return "".join(parts)


class StoryRead(NamedTuple):
    """A reading of `story` by a script, with the file it read."""

    run: Path
    text: Path
    trace: Trace
    sent: list[str]
    """The prompts, in the order in which they were sent."""


def read_story(
    folder: Path, *, question: str = QUESTION, script: Script = keyword_reply, **settings: Any
) -> StoryRead:
    """Read eight chapters as `settings` say; the run and the text are in `folder`."""
    text = folder / "valley.txt"
    text.write_text(story(8))
    engine = ScriptedEngine(script)
    sizes: Any = {**SIZES, **settings}
    trace = Reader(engine, tokenizer="bytes", **sizes).ask(
        question, Document.load(text), run_dir=folder / "run"
    )
    sent = [messages[-1]["content"] for messages in engine.prompts]
    return StoryRead(folder / "run", text, trace, sent)


def wondering_reply(messages: Sequence[Message], sampling: Sampling) -> str:
    """As `keyword_reply`; merges of a first round say that something is missing."""
    reply = keyword_reply(messages, sampling)
    prompt = messages[-1]["content"]
    is_first = "<note " in prompt and "<memory>\n(empty)" in prompt
    return f"{reply}\nMissing: who paid for the bell" if is_first else reply


def memories(num_sections: int) -> list[str]:
    """The memory after each section: it grows by a fact, and sometimes drops one that does not matter."""
    found = []
    for number in range(num_sections):
        known = FACTS[: 1 + number * len(FACTS) // num_sections]
        kept = [fact for fact in known if "frost" not in fact or len(known) < 4]
        found.append(" ".join(kept))
    return found


def make_reading(
    folder: Path,
    *,
    num_sections: int = 24,
    questions: Sequence[str] = (QUESTION,),
    is_complete: bool = True,
    text: str | None = None,
) -> Path:
    """A reading of `story` with its steps, finished or in progress."""
    document = Document.from_text(text or story(num_sections), source="valley.txt")
    config = AgentConfig()
    manifest = identity(
        questions=questions,
        document=document,
        model="lab/tiny-7B",
        tokenizer="bytes",
        config=config,
        prompts=open_prompts("default"),
    )
    with Run.create(folder, manifest) as run:
        for number in range(len(questions)):
            for step in steps(document, num_sections)[: None if is_complete else -1]:
                run.append(journal_line(number, step))
    return folder


def steps(document: Document, num_sections: int, answer: str = ANSWER) -> list[Step]:
    """The steps of a reading of a document."""
    rng = random.Random(num_sections)
    size = math.ceil(len(document.text) / num_sections)
    found, before = [], ""
    for number, memory in enumerate(memories(num_sections)):
        start, end = number * size, min((number + 1) * size, len(document.text))
        found.append(
            Step(
                kind="read",
                index=number,
                reply=memory,
                memory=memory,
                section=Section(
                    start=start, end=end, num_tokens=4900, places=document.places(start, end)
                ),
                flags=("memory_kept",) if memory == before else (),
                usage=Usage(calls=1, prompt_tokens=5300, completion_tokens=len(memory) // 4),
                started=1772353800.0 + 2 * number,
                seconds=round(1.2 + rng.random(), 2),
            )
        )
        before = memory
    last = Step(
        kind="answer",
        index=num_sections,
        reply=answer,
        memory=before,
        usage=Usage(calls=1, prompt_tokens=420, completion_tokens=24),
        started=1772353800.0 + 2 * num_sections,
        seconds=0.9,
    )
    return [*found, last]


def trace_of(num_sections: int, answer: str = ANSWER, **values: Any) -> dict[str, Any]:
    """A trace as evaluations and rollouts store it."""
    document = Document.from_text(story(num_sections), source="valley.txt")
    made = Trace(
        question=QUESTION,
        steps=tuple(steps(document, num_sections, answer)),
        model="lab/tiny-7B",
        prompts="default",
        source="valley.txt",
        document_sha256=document.sha256,
    )
    return {**made.to_dict(), **values}


def make_evaluation(
    folder: Path, *, num: int = 12, seed: int = 0, num_planned: int | None = None, **manifest: Any
) -> Path:
    """An evaluation of two tasks with two methods, each item with a trace."""
    items = lifelike(["hotpotqa", "ruler/niah_multikey_1"], num=num, seed=seed)
    return make_run(folder, list(map(_with_trace, items)), num_planned=num_planned, **manifest)


def _with_trace(item: ItemRecord) -> ItemRecord:
    right = item.score >= 1
    answer = ANSWER if right else "" if item.status == "failed" else "The text does not tell."
    sections = min(item.num_calls, 8)
    trace = trace_of(sections, answer) if item.method == "reader" and item.status == "ok" else {}
    return replace(item, answer=answer, answers=("Amara Whitlock",), match="any", trace=trace)


def make_training(folder: Path, *, num_steps: int = 40, planned: int | None = None) -> Path:
    """A training run with curves, saved groups of rollouts and validations."""
    config = {
        "about": "A reader of 135M parameters, trained to keep what the question needs",
        "steps": planned or num_steps,
        "model": {"source": "smollm2-135m"},
        "agent": {"name": "memory", "settings": {"memory_tokens": 256, "answer_tokens": 64}},
    }
    with Run.create(folder, {"kind": "train", "config": config}):
        pass
    rng = random.Random(7)
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(num_steps + 1):
            for line in metrics_at(step, rng):
                lines.write(json.dumps(line) + "\n")
    for name in ("samples", "validation"):
        (folder / name).mkdir()
    for step in range(5, num_steps + 1, 5):
        _write_lines(folder / "samples" / f"step-{step:06}.jsonl", rollouts_at(step))
    for step in range(0, num_steps + 1, 20):
        items = [_with_trace(each) for each in lifelike(["hotpotqa"], methods=("agent",), num=6)]
        _write_lines(
            folder / "validation" / f"step-{step:06}.jsonl", [each.to_dict() for each in items]
        )
    return folder


def metrics_at(step: int, rng: random.Random) -> list[dict[str, Any]]:
    """The lines of metrics of a step."""
    progress = 1 - math.exp(-step / 15)
    lines: list[dict[str, Any]] = []
    if step % 10 == 0:
        reward = 0.3 + 0.45 * progress
        bounds = {"reward_low": reward - 0.06, "reward_high": reward + 0.06}
        lines.append({"step": step, "kind": "validation", "reward": reward, **bounds})
    if step:
        lines.append(
            {
                "step": step,
                "kind": "train",
                "reward": 0.3 + 0.45 * progress + rng.uniform(-0.05, 0.05),
                "best_reward": min(1.0, 0.55 + 0.4 * progress + rng.uniform(-0.03, 0.03)),
                "kl": 0.02 * progress + rng.uniform(0, 0.002),
                "mismatch_kl": rng.uniform(1e-4, 3e-4),
                "entropy": 0.8 - 0.3 * progress + rng.uniform(-0.02, 0.02),
                "grad_norm": 0.4 + rng.uniform(0, 0.2),
                "signal": 0.5 + 0.2 * progress + rng.uniform(-0.05, 0.05),
                "agent/sampled_tokens": 210 - 60 * progress + rng.uniform(-8, 8),
                "agent/memory_tokens": 90 - 30 * progress + rng.uniform(-4, 4),
                "speed/rollout_tokens": 52_000 + rng.uniform(-2000, 2000),
                "speed/update_tokens": 171_000 + rng.uniform(-4000, 4000),
                "time/rollouts": 7.5 + rng.uniform(-0.4, 0.4),
                "time/update": 4.1 + rng.uniform(-0.2, 0.2),
                "time/left": 12.0 * max(0, 60 - step),
            }
        )
    return lines


def rollouts_at(step: int, num: int = 4) -> list[dict[str, Any]]:
    """The saved rollouts of two groups."""
    lines = []
    for group in range(2):
        rewards = [float((step + group + index) % 3 > 0) for index in range(num)]
        mean = sum(rewards) / num
        for index, reward in enumerate(rewards):
            answer = ANSWER if reward else "The council of Tarn Valley."
            lines.append(
                {
                    "task_id": f"questions/train/{step}-{group}",
                    "question": QUESTION,
                    "answers": ["Amara Whitlock"],
                    "index": index,
                    "reward": reward,
                    "advantage": reward - mean,
                    "group_rewards": rewards,
                    "status": "ok",
                    "error": None,
                    "metrics": {"sections": 4.0, "sampled_tokens": 150.0},
                    "trace": trace_of(4, answer),
                    "record": {},
                }
            )
    return lines


def _write_lines(path: Path, values: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
