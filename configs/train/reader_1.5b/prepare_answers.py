"""Memories to answer from, as texts of any length leave them, for `answers.toml`.

    python configs/train/reader_1.5b/prepare_answers.py --qa QA --hotpotqa HOTPOTQA --tokenizer MODEL --out data/answers

A reading of millions of tokens differs from a short one by what stands in the memory, so nothing has to be read: gold
sentences, sentences of the question's own misleading paragraphs, and sentences of paragraphs with words of the question.
QA and HOTPOTQA are the folders that `prepare.py` describes. Written are

    OUT/train_answers.jsonl    memories of training questions, each question with two, for reinforcement learning
    OUT/lessons_hotpotqa.jsonl conversations that answer from two further memories of each question of HotpotQA
    OUT/dev_gold.jsonl         development questions over their gold sentences alone
    OUT/dev_near.jsonl         the same with the two nearest sentences of their own other paragraphs
    OUT/dev_far.jsonl          the same with five sentences of other texts too

The three development files have the same questions, so that they can be compared in pairs. Paragraphs that support
development questions are in no training memory. The same files and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import write_examples
from memagent.data.tasks.lengths import length_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from memories import Composer, answer_line
from questions import (
    Paragraph,
    Pool,
    Question,
    cut_questions,
    hotpot_questions,
    is_sound,
    other_questions,
    read_lines,
    sentences_of,
    write_lines,
)

NUM_MEMORIES, NUM_LINKED = 2, 1500
"""Memories of each question in each file, and questions of IIRC: its passages often are one sentence."""
DEV = {"gold": (0, 0), "near": (2, 0), "far": (2, 5)}
"""Development memories: how many sentences of the question's own other paragraphs, and of other texts."""


def training_questions(qa: Path, hotpotqa: Path, pool: Pool) -> Iterator[Question]:
    """The questions of HotpotQA that may be trained on."""
    yield from hotpot_questions(hotpotqa / "train.jsonl.gz")
    yield from cut_questions(qa / "hotpotqa_train_halueval.jsonl.gz", pool)


def other_training_questions(qa: Path, pool: Pool) -> Iterator[Question]:
    """Those of other datasets."""
    yield from other_questions(qa / "2wiki_train.jsonl.gz", pool, is_titled=True)
    yield from other_questions(qa / "nq_open_gold.jsonl.gz", pool, is_titled=True)
    linked = [*other_questions(qa / "iirc.jsonl.gz", pool, is_titled=False)]
    yield from random.Random(0).sample(linked, min(len(linked), NUM_LINKED))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--qa", type=Path, required=True)
    parser.add_argument("--hotpotqa", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--limit", type=int, help="questions, to try it out")
    parser.add_argument("--num-dev", type=int, default=500)
    arguments = parser.parse_args()
    agent = AgentConfig(window=4096, chunk_tokens=2048, memory_tokens=512, prompts="add")
    dev = [*filter(is_sound, hotpot_questions(arguments.hotpotqa / "dev.jsonl.gz"))]
    paragraphs = [
        Paragraph(title=record["title"], sentences=sentences_of(record))
        for record in read_lines(arguments.qa / "paragraphs.jsonl.gz")
    ]
    pool = Pool(paragraphs, banned={one.title for question in dev for one in question.gold})
    composer = Composer(pool, length_tokenizer(arguments.tokenizer), agent.memory_tokens)
    dev_wordings = {question.text for question in dev}
    generator = random.Random(arguments.seed)

    def taken(questions: Iterable[Question]) -> list[Question]:
        found = [one for one in questions if is_sound(one) and one.text not in dev_wordings]
        generator.shuffle(found)
        return found[: arguments.limit]

    def memories(questions: Iterable[Question], purpose: str) -> Iterator[Example]:
        for number, question in product(range(NUM_MEMORIES), questions):
            drawing = random.Random(f"{arguments.seed}/{purpose}/{number}/{question.id}")
            if (found := composer.task(question, f"{purpose}_{number}", drawing)) is not None:
                yield found

    hotpotqa = taken(training_questions(arguments.qa, arguments.hotpotqa, pool))
    others = taken(other_training_questions(arguments.qa, pool))
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    num = write_examples(out / "train_answers.jsonl", memories([*hotpotqa, *others], "answers"))
    lessons = (answer_line(example, agent) for example in memories(hotpotqa, "lessons"))
    num_lessons = write_lines(out / "lessons_hotpotqa.jsonl", lessons)
    print(
        f"train_answers.jsonl: {num} memories, lessons_hotpotqa.jsonl: {num_lessons} conversations"
    )
    for name, (num_near, num_far) in DEV.items():
        found = (
            composer.dev_task(question, name, num_near=num_near, num_far=num_far)
            for question in dev[: arguments.num_dev]
        )
        print(f"dev_{name}.jsonl: {write_examples(out / f'dev_{name}.jsonl', found)} memories")


if __name__ == "__main__":
    main()
