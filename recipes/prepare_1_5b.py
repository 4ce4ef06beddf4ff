"""Examples and warm-start conversations for the reader, from files of questions with their paragraphs.

    python -m recipes.prepare_1_5b --qa QA --hotpotqa HOTPOTQA --essays ESSAYS --tokenizer MODEL --out data/reader

QA and HOTPOTQA are the folders that `questions.py` describes, ESSAYS is a folder of texts for needles to hide in.
Written are

    OUT/lessons_short.jsonl    conversations over short texts in short sections: many questions for few tokens
    OUT/lessons_long.jsonl     conversations over sections of full length
    OUT/lessons_answers.jsonl  answers alone, from memories that hold other sentences or whole paragraphs besides
    OUT/lessons_facts.jsonl    the same with the facts that tell the answer before it, for `facts.toml`
    OUT/lessons_tasks.jsonl    conversations over generated tasks: needles, variables, corrections and others
    OUT/lessons_items.jsonl    the same where the question counts, lists or adds up: items are listed and code counts them, for `items.toml`
    OUT/dev_ruler_8k.jsonl     examples for validation: the ten tasks of RULER in DEV_ESSAYS, other texts
    OUT/train_titled.jsonl     examples for reinforcement learning on other questions, whole paragraphs with titles
    OUT/train_short.jsonl      the same questions over texts of two sections: many questions for few tokens
    OUT/train_longer.jsonl     the same over longer texts
    OUT/train_spread.jsonl     the same with all misleading paragraphs, far from each other: as in a very long text
    OUT/train_plain.jsonl      questions with one to three sentences of a paragraph and no titles
    OUT/train_natural.jsonl    questions of Natural Questions
    OUT/train_tasks.jsonl      generated tasks that are in no lesson, so that training on questions unlearns none

HotpotQA questions are split by their wording: a share of them (`--rl-share`) is for reinforcement learning alone,
so that its rewards are for questions the model has not been trained on; a question on both sides, or one of the
development files, is refused.

Questions whose paragraphs are known only by their supporting sentences get no titles and short distractors:
otherwise their length would give the gold paragraphs away. Paragraphs that support development questions
are in no text. The same files and seed give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.files import write_examples
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import open_task
from memagent.data.tasks.ruler.needles import NEEDLES
from recipes.memories import answer_lessons, fact_lessons
from recipes.questions import (
    Question,
    Shape,
    Sources,
    Writer,
    check_apart,
    is_sound,
    lessons,
    source_options,
    with_shapes,
    wording,
    write_lines,
)

RL_SHARE = 0.5
MAX_PLAIN = 1500
NUM_LONG_PLAIN = 900
NUM_NATURAL, NUM_LINKED = 1200, 400
"""Questions of Natural Questions in the warm start (the others are for reinforcement learning), and of IIRC."""
SHORT = (
    Shape(tokens=480, chunk_tokens=512),
    Shape(tokens=800, chunk_tokens=512),
    Shape(tokens=1150, chunk_tokens=640),
)
FACTS = Shape(tokens=2400, chunk_tokens=2048, is_spread=True)
LONG = (Shape(tokens=6000, chunk_tokens=2048), Shape(tokens=4000, chunk_tokens=2048))
FULL = {
    "titled": Shape(tokens=10200, chunk_tokens=2048),
    "short": Shape(tokens=4050, chunk_tokens=2048),
    "longer": Shape(tokens=16400, chunk_tokens=2048),
    "spread": Shape(tokens=16400, chunk_tokens=2048, is_spread=True),
    "plain": Shape(tokens=4050, chunk_tokens=2048),
    "natural": Shape(tokens=4050, chunk_tokens=2048),
}
"""What reinforcement learning reads."""
TASK_SHAPES = (
    Shape(tokens=900, chunk_tokens=512),
    Shape(tokens=1800, chunk_tokens=512),
    Shape(tokens=1800, chunk_tokens=1024),
    Shape(tokens=4000, chunk_tokens=2048),
    Shape(tokens=4000, chunk_tokens=512),
)
GENERATED = {
    "ruler/niah_single_1": 40, "ruler/niah_single_2": 40, "ruler/niah_single_3": 60,
    "ruler/niah_multikey_1": 60, "ruler/niah_multikey_2": 80, "ruler/niah_multikey_3": 80,
    "ruler/niah_multivalue": 120, "ruler/niah_multiquery": 120, "ruler/vt": 120, "ruler/fwe": 140,
    "beyond/two_hop": 60, "beyond/corrections": 60, "beyond/unanswerable": 80,
    "beyond/injection": 40, "beyond/counting": 40,
}  # fmt: skip
"""Examples of generated tasks for the warm start."""
COUNTED: dict[str, dict[str, int]] = {
    "beyond/counting": {"max_events": 30},
    "beyond/aggregation": {"max_sales": 30, "max_sellers": 12},
    "beyond/corrections": {"num_things": 12, "max_corrections": 3},
    "beyond/coreference": {"max_similar": 12},
}
"""Tasks whose items are listed, with their settings."""
NUM_COUNTED = 100
ITEM_SHAPES = (
    Shape(tokens=1800, chunk_tokens=512),
    Shape(tokens=4000, chunk_tokens=1024),
    Shape(tokens=6000, chunk_tokens=2048),
    Shape(tokens=9000, chunk_tokens=2048),
)
LISTING = {
    "items": True,
    "window": 8192,
    "answer_tokens": 256,
    "quote_tokens": 1024,
    "ledger_tokens": 2048,
}
"""How items are listed; as in `items.toml`."""
TASK_SEED = 1000
"""Added to the seed of generated tasks for reinforcement learning."""


RULER_TOKENS, RULER_NUM, RULER_SEED = 8192, 12, 4242
"""Validation on RULER: length, items of each task, and a seed that no lesson has."""


def split(
    questions: Iterable[Question], share: float, *, seed: int
) -> tuple[list[Question], list[Question]]:
    """Questions for reinforcement learning, and for the warm start; the wording decides."""
    for_rl, for_lessons = [], []
    for question in questions:
        is_for_rl = random.Random(f"{seed}/split/{wording(question.text)}").random() < share
        (for_rl if is_for_rl else for_lessons).append(question)
    return for_rl, for_lessons


def settings_of(name: str, tokens: int, essays: Path, tokenizer: str, seed: int) -> dict[str, Any]:
    """Settings of a generated task."""
    settings: dict[str, Any] = {"tokens": tokens, "tokenizer": tokenizer, "seed": seed}
    if NEEDLES.get(name, {}).get("haystack") == "essay":
        settings |= {"essays": str(essays), "shift": True}
    return settings


def generated(
    num_of: dict[str, int], essays: Path, tokenizer: str, seed: int
) -> Iterator[tuple[Example, Shape]]:
    """Examples of generated tasks, of each of the shapes in turn."""
    for name, num in num_of.items():
        for place, shape in enumerate(TASK_SHAPES):
            task = open_task(name, settings_of(name, shape.tokens, essays, tokenizer, seed + place))
            for index in range(place, num, len(TASK_SHAPES)):
                yield task.example(index), shape


def counted(num: int, tokenizer: str, seed: int) -> Iterator[tuple[Example, Shape]]:
    """Examples of tasks that count, of each of the shapes in turn."""
    for name, settings in COUNTED.items():
        for place, shape in enumerate(ITEM_SHAPES):
            values = {"tokens": shape.tokens, "tokenizer": tokenizer, "seed": seed + place}
            task = open_task(name, {**values, **settings})
            for index in range(place, num, len(ITEM_SHAPES)):
                yield task.example(index), shape


def ruler(tokens: int, num: int, essays: Path, tokenizer: str) -> Iterator[Example]:
    """Validation: RULER's ten tasks of the paper."""
    for name in GENERATED:
        if name.startswith("ruler/"):
            task = open_task(name, settings_of(name, tokens, essays, tokenizer, RULER_SEED))
            yield from map(task.example, range(num))


def main() -> None:
    parser = source_options(__doc__)
    parser.add_argument("--essays", type=Path, help="without them there are no generated tasks")
    parser.add_argument("--dev-essays", type=Path, help="other texts, for validation on RULER")
    parser.add_argument("--memory-tokens", type=int, default=512)
    parser.add_argument(
        "--counted", type=int, default=NUM_COUNTED, help="examples of each task that counts"
    )
    parser.add_argument(
        "--rl-share",
        type=float,
        default=RL_SHARE,
        help="share of the HotpotQA questions for reinforcement learning alone",
    )
    parser.add_argument(
        "--max-plain",
        type=int,
        default=MAX_PLAIN,
        help="questions without titles for reinforcement learning; the others are for the warm start",
    )
    arguments = parser.parse_args()
    tokenizer = length_tokenizer(arguments.tokenizer)
    agent = AgentConfig(
        window=4096,
        chunk_tokens=2048,
        memory_tokens=arguments.memory_tokens,
        answer_tokens=64,
        prompts="add",
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    sources = Sources(arguments.qa, arguments.hotpotqa)
    generator = random.Random(arguments.seed)

    def taken(questions: Iterable[Question], num: int | None = None) -> list[Question]:
        found = [question for question in questions if is_sound(question)]
        generator.shuffle(found)
        limits = [limit for limit in (num, arguments.limit) if limit is not None]
        return found[: min(limits)] if limits else found

    official, cut = taken(sources.official()), taken(sources.cut())
    wiki, natural = taken(sources.wiki()), taken(sources.natural())
    natural, rl_natural = natural[:NUM_NATURAL], natural[NUM_NATURAL:]
    linked = taken(sources.linked(), NUM_LINKED)
    parts = {"seed": arguments.seed, "share": arguments.rl_share}
    titled, warm_titled = split([*official, *(one for one in cut if one.is_titled)], **parts)
    plain, warm_plain = split((one for one in cut if not one.is_titled), **parts)
    plain, unused = plain[: arguments.max_plain], plain[arguments.max_plain :]
    warm_plain += unused
    long_ones = [*warm_titled, *warm_plain[:NUM_LONG_PLAIN]]
    short_ones = [*warm_plain[NUM_LONG_PLAIN:], *wiki, *natural, *linked]
    check_apart(
        development=sources.dev,
        **{
            "the warm start": [*long_ones, *short_ones],
            "reinforcement learning": [*titled, *plain, *rl_natural],
        },
    )
    writer = Writer(sources.pool, tokenizer, arguments.seed)

    long = with_shapes(long_ones, LONG, writer, "long")
    short = with_shapes(short_ones, SHORT, writer, "short")
    out = arguments.out
    num_long = write_lines(out / "lessons_long.jsonl", lessons(long, agent, tokenizer))
    num_short = write_lines(out / "lessons_short.jsonl", lessons(short, agent, tokenizer))
    alone = with_shapes([*short_ones, *long_ones], SHORT[-1:], writer, "answers")
    num_answers = write_lines(
        out / "lessons_answers.jsonl", answer_lessons(alone, agent, arguments.seed)
    )
    telling = with_shapes([*short_ones, *long_ones], [FACTS], writer, "facts")
    num_facts = write_lines(
        out / "lessons_facts.jsonl", fact_lessons(telling, agent, tokenizer, arguments.seed)
    )
    num_counted = min(arguments.counted, arguments.limit or arguments.counted)
    some_counted = counted(num_counted, arguments.tokenizer, arguments.seed)
    listing = AgentConfig.model_validate({**agent.model_dump(), **LISTING})
    num_items = write_lines(out / "lessons_items.jsonl", lessons(some_counted, listing, tokenizer))
    num_tasks = 0
    if arguments.essays is not None:
        num_of = {name: min(num, arguments.limit or num) for name, num in GENERATED.items()}
        made_up = generated(num_of, arguments.essays, arguments.tokenizer, arguments.seed)
        num_tasks = write_lines(out / "lessons_tasks.jsonl", lessons(made_up, agent, tokenizer))
        others = generated(
            num_of, arguments.essays, arguments.tokenizer, arguments.seed + TASK_SEED
        )
        num = write_examples(out / "train_tasks.jsonl", (example for example, _ in others))
        print(f"train_tasks.jsonl: {num} examples")
    if arguments.dev_essays is not None:
        found = ruler(RULER_TOKENS, RULER_NUM, arguments.dev_essays, arguments.tokenizer)
        print(f"dev_ruler_8k.jsonl: {write_examples(out / 'dev_ruler_8k.jsonl', found)} examples")
    for_rl = {
        "titled": titled,
        "short": titled,
        "longer": titled,
        "spread": titled,
        "plain": plain,
        "natural": rl_natural,
    }
    for name, some in for_rl.items():
        purpose = "train" if name in ("titled", "plain") else f"train_{name}"
        made = (example for example, _ in with_shapes(some, [FULL[name]], writer, purpose))
        num = write_examples(out / f"train_{name}.jsonl", made)
        print(f"train_{name}.jsonl: {num} examples")
    print(
        f"lessons_long.jsonl: {num_long}, lessons_short.jsonl: {num_short}, "
        f"lessons_answers.jsonl: {num_answers}, lessons_facts.jsonl: {num_facts}, lessons_items.jsonl: {num_items}, "
        f"lessons_tasks.jsonl: {num_tasks} conversations"
    )


if __name__ == "__main__":
    main()
