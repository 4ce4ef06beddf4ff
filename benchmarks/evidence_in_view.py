"""How often all evidence reaches the model: the reader, BM25, and one prompt, over texts of growing length.

    python -m benchmarks.evidence_in_view --source HOTPOTQA --out docs/experiments/evidence_in_view
    python -m benchmarks.evidence_in_view --task ruler/niah_single_1 --num 2 --lengths 8k,16k

No model answers. The methods of `memagent eval` run as they are, and what they put into their prompts is
compared with the evidence of each question. A question counts if every piece of its evidence is in a
prompt, whole. That is what a method can know at best; what a model makes of it is another matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from memagent.agent.model_call import Limits
from memagent.data.choices import named_sources, source_settings
from memagent.data.example import Example
from memagent.data.tasks.lengths import parse_length
from memagent.data.tasks.registry import open_task
from memagent.documents.document import Document
from memagent.eval.methods import METHODS, Context, MethodSettings
from memagent.eval.stats import wilson
from memagent.tokens.tokenizers import open_tokenizer
from memagent.types import Completion, Message, Sampling

TASKS = {
    "ruler/niah_single_1": "one fact, which the question names",
    "hotpotqa": "two facts of different articles",
}
"""Task to the title of its plot."""
VIEWS: dict[str, tuple[str, int]] = {
    "reader, window 8K": ("reader", 8192),
    "BM25, window 8K": ("bm25", 8192),
    "one prompt, window 8K": ("direct", 8192),
    "one prompt, window 128K": ("direct", 131072),
}
"""Label to method and window."""
LENGTHS = "8k,32k,128k,512k"
NUM = 32
SEED = 7
TOKENIZER = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class InView:
    """One method on one task at one length."""

    task: str
    view: str
    tokens: int
    num: int
    num_in_view: int
    """Questions whose evidence was in the prompts, all of it."""
    calls: float
    """Calls per question."""
    prompt_tokens: float
    """Tokens of all prompts of a question, estimated."""


class Listener:
    """An engine that answers nothing of use, and keeps what it is asked."""

    model = "listener"
    tokenizer = TOKENIZER

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self.prompts.append("\n".join(message["content"] for message in messages))
        return Completion(text="nothing")


async def ask(example: Example, view: str) -> tuple[bool, int, int]:
    """Whether all evidence was in view, the calls, and the tokens of the prompts."""
    method, window = VIEWS[view]
    engine = Listener()
    text = example.text()
    tokenizer = open_tokenizer(TOKENIZER)
    context = Context(
        engine=engine,
        tokenizer=tokenizer,
        settings=MethodSettings(window=window),
        limits=Limits(),
        method=method,
        document=Document.from_text(text, "text"),
        question=example.question,
    )
    trace = await METHODS[method](example, context)
    pieces = [text[start:end] for start, end in example.evidence_offsets()]
    is_in_view = all(any(piece in prompt for prompt in engine.prompts) for piece in pieces)
    return is_in_view, len(engine.prompts), trace.usage.prompt_tokens


def measure(task: str, tokens: int, num: int, *, source: str | None = None) -> list[InView]:
    """All methods on the same questions."""
    settings = {"tokens": tokens, "tokenizer": TOKENIZER, "seed": SEED}
    if task == "hotpotqa":
        settings |= {
            "split": "dev",
            **source_settings(task, named_sources([source] if source else [])),
        }
    opened = open_task(task, settings)
    examples = [opened.example(index) for index in range(num)]
    found = []
    for view in VIEWS:
        results = [asyncio.run(ask(example, view)) for example in examples]
        in_view, calls, prompt_tokens = (list(column) for column in zip(*results, strict=True))
        found.append(
            InView(
                task=task,
                view=view,
                tokens=tokens,
                num=num,
                num_in_view=sum(in_view),
                calls=sum(calls) / num,
                prompt_tokens=sum(prompt_tokens) / num,
            )
        )
    return found


def draw(rows: Sequence[InView], out: Path) -> None:
    """A plot for each task: the share of questions with all evidence in view, by length."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "memagent"  # the same figures give the same bytes
    styles = {
        "reader, window 8K": ("#1b6ca8", "-", "o"),
        "BM25, window 8K": ("#c8553d", "-", "s"),
        "one prompt, window 8K": ("#9a9a9a", ":", "v"),
        "one prompt, window 128K": ("#444444", "-.", "D"),
    }
    tasks = list(dict.fromkeys(row.task for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.4 * len(tasks), 3.3), sharey=True)
    for axis, task in zip(list(axes) if len(tasks) > 1 else [axes], tasks, strict=True):
        for number, (view, (colour, line, marker)) in enumerate(styles.items()):
            own = [row for row in rows if row.task == task and row.view == view]
            lengths = [
                row.tokens * (1 + 0.03 * (number - 1.5)) for row in own
            ]  # markers side by side
            shares = [100 * row.num_in_view / row.num for row in own]
            intervals = [wilson(row.num_in_view, row.num) for row in own]
            errors = [
                [
                    share - 100 * interval.low
                    for share, interval in zip(shares, intervals, strict=True)
                ],
                [
                    100 * interval.high - share
                    for share, interval in zip(shares, intervals, strict=True)
                ],
            ]
            axis.errorbar(
                lengths, shares, yerr=errors, color=colour, linestyle=line, marker=marker,
                markersize=5, capsize=2, label=view,
            )  # fmt: skip
        targets = sorted({row.tokens for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(targets, [f"{target // 1024}K" for target in targets])
        axis.set_xlabel("tokens of the text")
        axis.set_title(f"{TASKS[task]}\n({task})", fontsize=9)
        axis.set_ylim(-3, 103)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("% of questions with\nall evidence in view")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, help="only this task")
    parser.add_argument("--source", help="folder with HotpotQA; downloaded when not given")
    parser.add_argument("--num", type=int, default=NUM, help="questions for each task and length")
    parser.add_argument("--lengths", default=LENGTHS, help="tokens of the texts")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and in_view.svg")
    arguments = parser.parse_args()
    rows = []
    for task in [arguments.task] if arguments.task else TASKS:
        for length in arguments.lengths.split(","):
            for row in measure(task, parse_length(length), arguments.num, source=arguments.source):
                rows.append(row)
                print(
                    f"{row.task:20} {length:>5}  {row.view:24} {row.num_in_view:3}/{row.num} in view, "
                    f"{row.calls:6.1f} calls, {row.prompt_tokens:10,.0f} prompt tokens",
                    flush=True,
                )
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        (arguments.out / "results.jsonl").write_text(lines, encoding="utf-8")
        draw(rows, arguments.out / "in_view.svg")


if __name__ == "__main__":
    main()
