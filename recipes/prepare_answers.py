"""Memories to answer from, as texts of any length leave them, for `answers.toml`.

    python -m recipes.prepare_answers --qa QA --hotpotqa HOTPOTQA --tokenizer MODEL --out data/answers

A reading of millions of tokens differs from a short one by what stands in the memory, so nothing has to be read: gold
sentences, sentences of the question's own misleading paragraphs, and sentences of paragraphs with words of the question.
QA and HOTPOTQA are the folders that `questions.py` describes. Written are

    OUT/train_answers.jsonl    memories of training questions, each question with two, for reinforcement learning
    OUT/lessons_hotpotqa.jsonl conversations that answer from two further memories of each question of HotpotQA
    OUT/lessons_generated.jsonl  the same of questions that a model made up (`generate_questions.py`), one memory each
    OUT/train_generated.jsonl  texts of two sections for those that the reader answers fully, for reinforcement learning (`rl.toml`)
    OUT/dev_gold.jsonl         development questions over their gold sentences alone
    OUT/dev_near.jsonl         the same with the two nearest sentences of their own other paragraphs
    OUT/dev_far.jsonl          the same with five sentences of other texts too

The three development files have the same questions, so that they can be compared in pairs. Paragraphs that support
development questions are in no training memory. The same files and seed give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import write_examples
from memagent.data.tasks.lengths import length_tokenizer
from recipes.memories import Composer, answer_line
from recipes.questions import (
    Question,
    Sources,
    Writer,
    is_sound,
    question_of,
    read_lines,
    source_options,
    write_lines,
)

Item = TypeVar("Item")
Done = TypeVar("Done")

NUM_MEMORIES, NUM_LINKED = 2, 1500
"""Memories of each question in each file, and questions of IIRC: its passages often are one sentence."""
NUM_TEXTS, TEXT_TOKENS = 4000, 4050
"""Texts for generated questions."""
DEV = {"gold": (0, 0), "near": (2, 0), "far": (2, 5)}
"""Development memories: how many sentences of the question's own other paragraphs, and of other texts."""


def over_cores(work: Callable[[Item], Done], items: Sequence[Item]) -> Iterator[Done]:
    """What `work` makes of each item, in order. Processes are forked, so that only results are sent."""
    with ProcessPoolExecutor(
        mp_context=get_context("fork"), initializer=_take, initargs=(work, items)
    ) as workers:
        yield from workers.map(_work, range(len(items)), chunksize=100)


def _take(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _taken
    _taken = work, items


def _work(number: int) -> Any:
    work, items = _taken
    return work(items[number])


_taken: tuple[Callable[[Any], Any], Sequence[Any]]
"""Of a process."""


def main() -> None:
    parser = source_options(__doc__)
    parser.add_argument("--num-dev", type=int, default=500)
    parser.add_argument(
        "--generated",
        type=Path,
        help="write lessons of these questions alone, a file of `generate_questions.py check`",
    )
    arguments = parser.parse_args()
    agent = AgentConfig(window=4096, chunk_tokens=2048, memory_tokens=512, prompts="add")
    sources = Sources(arguments.qa, arguments.hotpotqa)
    dev = [*filter(is_sound, sources.dev)]
    composer = Composer(sources.pool, length_tokenizer(arguments.tokenizer), agent.memory_tokens)
    writer = Writer(sources.pool, length_tokenizer(arguments.tokenizer), arguments.seed)
    dev_wordings = {question.text for question in dev}
    generator = random.Random(arguments.seed)

    def taken(questions: Iterable[Question]) -> list[Question]:
        found = [one for one in questions if is_sound(one) and one.text not in dev_wordings]
        generator.shuffle(found)
        return found[: arguments.limit]

    def memories(questions: Iterable[Question], purpose: str) -> Iterator[Example]:
        def memory(job: tuple[int, Question]) -> Example | None:
            number, question = job
            drawing = random.Random(f"{arguments.seed}/{purpose}/{number}/{question.id}")
            return composer.task(question, f"{purpose}_{number}", drawing)

        return filter(None, over_cores(memory, [*product(range(NUM_MEMORIES), questions)]))

    def generated(record: dict[str, Any]) -> str | None:
        question = question_of(record, sources.pool, is_titled=True)
        found = composer.task(question, "generated", random.Random(question.id))
        return None if found is None else answer_line(found, agent)

    def text(record: dict[str, Any]) -> Example | None:
        question = question_of(record, sources.pool, is_titled=True)
        return writer.example(question, TEXT_TOKENS, "generated")

    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.generated is not None:
        records = [*read_lines(arguments.generated)][: arguments.limit]
        num = write_lines(
            out / "lessons_generated.jsonl", filter(None, over_cores(generated, records))
        )
        answered = [record for record in records if record["agreement"] == 1]
        some = random.Random(arguments.seed).sample(answered, min(len(answered), NUM_TEXTS))
        texts = filter(None, over_cores(text, some))
        num_texts = write_examples(out / "train_generated.jsonl", texts)
        print(f"lessons_generated.jsonl: {num} conversations, train_generated.jsonl: {num_texts}")
        return
    hotpotqa = taken(chain(sources.official(), sources.cut()))
    linked = [*sources.linked()]
    linked = random.Random(0).sample(linked, min(len(linked), NUM_LINKED))
    others = taken(chain(sources.wiki(), sources.natural(), linked))
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
