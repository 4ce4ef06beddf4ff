"""HotpotQA-long: a question whose two paragraphs are spread over a text of any length.

    question ── two gold paragraphs ─────────┐
             └─ its own distractors ─────────┼─▶ each at a random place, for every example
    pool ────── other paragraphs, sampled ───┘
                         ▲
                         └─ up to `docs` documents, or `tokens` tokens

    task = open_task("hotpotqa", {"split": "dev", "docs": 200, "seed": 7, "dev": "dev.jsonl.gz"})
    task.example(0)

The question of an index depends on seed and index alone, or on a file that names the questions, so datasets of
several lengths ask the same questions. The places of gold paragraphs are drawn uniformly over the whole text. A paragraph of the
question's own, by title or by text, is never used as filler. A question whose own paragraphs are longer than
the text takes fewer of its distractors; its metadata and the manifest say so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from memagent.config import MOST
from memagent.data.choices import source_setting
from memagent.data.example import Evidence, Example, Origin, Passage, fingerprint, join
from memagent.data.sources.cache import open_source, sha256_of
from memagent.data.tasks.hotpotqa_store import (
    YES_NO,
    Gold,
    HotpotFiles,
    Overlap,
    SelectedItems,
    Split,
    Store,
    StoredQuestion,
    open_store,
    select_items,
)
from memagent.data.tasks.lengths import LEAST_SHARE, length_tokenizer
from memagent.data.tasks.registry import LEFT_OUT, TaskSettings, rng
from memagent.errors import DataError
from memagent.tokens.tokenizers import Tokenizer

NAME = "hotpotqa"
NEXT_HEADING = "\n\nDocument 1:\n"
"""What follows a paragraph: a line end may form one token with the text before it."""
SEPARATOR_TOKENS = 4
"""At most so many tokens separate paragraphs; they are counted after the last one too."""
MAX_TRIES = 8
PARAGRAPHS = source_setting("hotpotqa-paragraphs")


QuestionOrder = Literal["seed", "file"]


class HotpotSettings(TaskSettings):
    """Which questions, how long a text, and from which files."""

    stored_if_set: ClassVar[frozenset[str]] = frozenset({"order", "selection"})

    split: Split = "dev"
    """Questions to train on (train) or to evaluate with (dev)."""
    docs: int | None = Field(default=None, ge=2, le=MOST)
    """Length of the text in documents; give this or tokens."""
    distractors: int = Field(default=8, ge=0, le=MOST)
    """How many of a question's own distractors are included, at most."""
    overlap: Overlap = "refuse"
    """What to do with training questions that are development questions too: refuse or drop."""
    train: str | None = None
    """File of training questions, in place of the published one."""
    dev: str | None = None
    """File of development questions, in place of the published one."""
    paragraphs: str | None = None
    """File of paragraphs to fill texts with; by default those of the split's own questions."""
    order: QuestionOrder = "seed"
    """Order of the questions: shuffled by the seed (seed), or that of the file (file)."""
    selection: str | None = None
    """Dataset whose questions are used, in its order: one that was filtered, or a file of the original project."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.docs is None) == (self.tokens is None):
            raise ValueError(
                "give the length of the text as docs=200 or as tokens=28000, one of them"
            )
        return self


def open_hotpotqa(name: str, settings: dict[str, Any]) -> HotpotTask:
    """The task; its sources are fetched if they are not given."""
    parsed = HotpotSettings.parse(settings)
    dev = open_source("hotpotqa-dev", parsed.dev)
    is_train = parsed.split == "train"
    pool = parsed.paragraphs
    files = HotpotFiles(
        split=parsed.split,
        items=open_source("hotpotqa-train", parsed.train) if is_train else dev,
        dev=dev if is_train else None,
        paragraphs=None if pool is None else open_source("hotpotqa-paragraphs", pool),
        overlap=parsed.overlap,
    )
    return HotpotTask(name, parsed, open_store(files))


class _TooLongError(DataError):
    """The question's own paragraphs do not fit the length; fewer of them may."""


class _MixedText(NamedTuple):
    """A text, before it is labelled."""

    passages: tuple[Passage, ...]
    text: str
    num_tokens: int
    places: list[int]
    """Positions of the question's own paragraphs, gold first."""


class HotpotTask:
    """Generates examples from a store."""

    def __init__(self, name: str, settings: HotpotSettings, store: Store) -> None:
        self.name = name
        self.settings = settings
        self.store = store
        self._order, num_unknown = _questions(store, settings)
        self.num_available: int | None = len(self._order)
        unknown = {"questions of the selection that are not in the split": num_unknown}
        left_out = store.left_out | (unknown if num_unknown else {})
        self.about = {"left_out": left_out, "pool": store.num_pool}
        """For the manifest."""
        self._tokenizer: Tokenizer = length_tokenizer(settings.tokenizer)
        self._sources = store.fingerprints
        if settings.selection is not None:
            selection = Path(settings.selection).expanduser()
            self._sources = {**self._sources, "selection": sha256_of(selection)}

    def example(self, index: int) -> Example:
        """The example of an index, with its documents."""
        if not 0 <= index < len(self._order):
            where = self.settings.selection or self.settings.split
            raise DataError(
                f"there is no question {index}: {where} has {len(self._order)}; lower `num`"
            )
        item = self.store.item(self._order[index])
        own = [*(gold.paragraph for gold in item.gold), *item.distractors]
        own = own[: len(item.gold) + self.settings.distractors]
        mixed, num_left_out = self._fitting_text(index, item, own)
        settings = self.settings
        length = f"{settings.docs}-docs" if settings.docs else f"{settings.tokens}-tokens"
        return Example(
            id=f"{self.name}/{settings.split}/{length}/{settings.seed}/{item.id}",
            task=self.name,
            question=item.question,
            answers=(item.answer,),
            documents=mixed.passages,
            evidence=_evidence(item.gold, mixed.places, mixed.passages),
            origin=Origin(
                task=self.name, settings=settings.stored(), index=index, sources=self._sources
            ),
            target_tokens=settings.tokens,
            num_tokens=mixed.num_tokens,
            seed=settings.seed,
            text_sha256=fingerprint(mixed.text),
            metadata={
                "hotpotqa_id": item.id,
                "type": item.type,
                "level": item.level,
                "is_yes_no": item.answer in YES_NO,
                "is_gold_in_dev": item.is_gold_in_dev,
                "num_documents": len(mixed.passages),
                **({LEFT_OUT: num_left_out} if num_left_out else {}),
            },
        )

    def _fitting_text(
        self, index: int, item: StoredQuestion, own: list[int]
    ) -> tuple[_MixedText, int]:
        """The text, with as many of the question's own distractors as fit; how many were left out."""
        for num_left_out in range(len(own) - len(item.gold)):
            with suppress(_TooLongError):
                return self._text(index, item, own[: len(own) - num_left_out]), num_left_out
        return self._text(index, item, own[: len(item.gold)]), len(own) - len(item.gold)

    def _text(self, index: int, item: StoredQuestion, own: list[int]) -> _MixedText:
        if self.settings.docs is not None:
            return self._mixed(index, own, self._fillers_by_number(index, item, len(own)))
        target = self.settings.tokens
        assert target is not None, "settings have one of docs and tokens"
        aim, slack = target, target * (1 - LEAST_SHARE) - SEPARATOR_TOKENS
        for _ in range(MAX_TRIES):
            fillers = self._fillers_by_tokens(index, item, own, aim, int(slack))
            expected = self._cost_of(own) + self._cost_of(fillers, first=len(own) + 1)
            mixed = self._mixed(index, own, fillers)
            if target * LEAST_SHARE <= mixed.num_tokens <= target:
                return mixed
            # tokens of parts do not add up here: compensate, and aim closer
            aim, slack = int(target * expected / mixed.num_tokens) - 1, slack * 0.8
        raise self._out_of_reach(item)

    def _mixed(self, index: int, own: list[int], fillers: list[int]) -> _MixedText:
        """The paragraphs in random order."""
        num_documents = len(own) + len(fillers)
        places = self._rng(index, "places").sample(range(num_documents), len(own))
        order = fillers
        for place, paragraph in sorted(zip(places, own, strict=True)):
            order.insert(place, paragraph)
        passages = tuple(map(self.store.passage, order))
        text = join(passages)
        return _MixedText(passages, text, self._tokenizer.count(text), places)

    # --- fillers ----------------------------------------------------------------------------------

    def _fillers_by_number(self, index: int, item: StoredQuestion, num_own: int) -> list[int]:
        num_documents = self.settings.docs or 0
        if num_documents < num_own:
            raise _TooLongError(
                f"docs={num_documents} is below the {num_own} gold paragraphs of question {item.id}; "
                "raise `docs`"
            )
        fillers = self._drawn(index, item, num_documents - num_own)
        if len(fillers) < num_documents - num_own:
            raise DataError(
                f"docs={num_documents} needs {num_documents - num_own} paragraphs beside those of "
                f"question {item.id}, and the pool has {len(fillers)}; lower `docs`, or name a larger "
                f"file: {PARAGRAPHS}"
            )
        return fillers

    def _fillers_by_tokens(
        self, index: int, item: StoredQuestion, own: list[int], aim: int, slack: int
    ) -> list[int]:
        """Fillers that bring the text to at most `aim` tokens and leave at most `slack` of them."""
        target = self.settings.tokens
        left = aim - self._cost_of(own)
        if left < 0:
            raise _TooLongError(
                f"tokens={target} is below the {aim - left} tokens of question {item.id}'s gold "
                "paragraphs; raise `tokens`"
            )
        num_requested = int(left / self._mean_cost * 1.1) + 64
        while True:
            drawn = self._drawn(index, item, num_requested)
            fillers, left_now = self._taken_while_they_fit(drawn, left, first=len(own) + 1)
            if len(fillers) < len(drawn):
                break
            if left_now <= slack:
                return fillers
            if len(drawn) < num_requested:
                raise DataError(
                    f"the pool has too few paragraphs for tokens={target}: all {len(drawn)} leave "
                    f"{left_now} tokens free; lower `tokens`, or name a larger file: {PARAGRAPHS}"
                )
            num_requested *= 2
        return self._closed(index, item, own, fillers, left_now, slack)

    def _taken_while_they_fit(
        self, drawn: list[int], left: int, *, first: int
    ) -> tuple[list[int], int]:
        costs = self._costs
        self._heading_costs(first + len(drawn))
        headings = self._headings
        for position, number in enumerate(drawn):
            document = first + position
            cost = costs[number] + headings[document] - headings[document - 1]
            if cost > left:
                return drawn[:position], left
            left -= cost
        return drawn, left

    def _closed(
        self,
        index: int,
        item: StoredQuestion,
        own: list[int],
        fillers: list[int],
        left: int,
        slack: int,
    ) -> list[int]:
        """The fillers, and others that fit the tokens that are left; some are replaced."""
        generator = self._rng(index, "last")
        for _ in range(MAX_TRIES * 8):
            if left <= slack:
                return fillers
            used = item.taken.union(fillers)
            heading = self._heading_cost(len(own) + len(fillers) + 1)
            fitting = self._of_cost(left - slack - heading, left - heading, used)
            if not fitting:
                fitting = self._of_cost(1, (left - heading) // 2, used)
            if fitting:
                chosen = generator.choice(fitting)
                fillers = [*fillers, chosen]
                left -= self._costs[chosen] + heading
            elif fillers:
                gone = fillers[-1]
                fillers = fillers[:-1]
                left += self._costs[gone] + self._heading_cost(len(own) + len(fillers) + 1)
            else:
                break
        raise self._out_of_reach(item)

    def _of_cost(self, least: int, most: int, used: frozenset[int]) -> list[int]:
        """Paragraphs of the pool that cost so many tokens."""
        costs, ordered = self._costs, self._pool_by_cost
        start = bisect_left(ordered, max(least, 1), key=costs.__getitem__)
        end = bisect_right(ordered, most, key=costs.__getitem__)
        return [number for number in ordered[start:end] if number not in used]

    def _out_of_reach(self, item: StoredQuestion) -> DataError:
        return _TooLongError(
            f"tokens={self.settings.tokens} cannot be met within 2 % for question {item.id}; raise "
            f"`tokens`, or name a larger file: {PARAGRAPHS}"
        )

    def _drawn(self, index: int, item: StoredQuestion, num_requested: int) -> list[int]:
        """So many paragraphs of the pool in random order, or all of them; none of the question's own."""
        num_pool = self.store.num_pool
        num_drawn = min(num_requested + len(item.taken), num_pool)
        drawn = self._rng(index, "fillers").sample(range(num_pool), num_drawn)
        taken = item.taken
        return [number for number in drawn if number not in taken][:num_requested]

    def _rng(self, index: int, purpose: str) -> Any:
        return rng(self.settings.seed, self.name, index, purpose)

    # --- what paragraphs cost ---------------------------------------------------------------------

    @cached_property
    def _costs(self) -> Sequence[int]:
        """Tokens of each paragraph with its title and what separates it from the next heading."""
        count = self._tokenizer.count
        after = count(NEXT_HEADING.lstrip())
        return self.store.counts(
            self._tokenizer.name, lambda body: count(body + NEXT_HEADING) - after
        )

    def _cost_of(self, numbers: list[int], *, first: int = 1) -> int:
        """Tokens of paragraphs with their headings, the first of which has this number."""
        costs, last = self._costs, first + len(numbers) - 1
        headings = self._heading_costs(last) - self._heading_costs(first - 1)
        return sum(costs[number] for number in numbers) + headings

    @cached_property
    def _mean_cost(self) -> float:
        pool = self._costs[: self.store.num_pool]
        return sum(pool) / max(len(pool), 1) + self._heading_cost(1)

    @cached_property
    def _pool_by_cost(self) -> list[int]:
        return sorted(range(self.store.num_pool), key=self._costs.__getitem__)

    @cached_property
    def _headings(self) -> list[int]:
        """Tokens of the first n headings, titles aside; grown as needed."""
        return [0]

    def _heading_costs(self, num_documents: int) -> int:
        headings, count = self._headings, self._tokenizer.count
        for number in range(len(headings), num_documents + 1):
            headings.append(headings[-1] + count(f"Document {number}:\n"))
        return headings[num_documents]

    def _heading_cost(self, number: int) -> int:
        return self._heading_costs(number) - self._headings[number - 1]


def _questions(store: Store, settings: HotpotSettings) -> SelectedItems:
    """Numbers of the questions, in the order in which they are used."""
    if settings.selection is not None:
        return select_items(store, Path(settings.selection).expanduser())
    if settings.order == "file":
        return SelectedItems(list(range(store.num_items)), 0)
    return SelectedItems(_shuffled(store.num_items, settings.seed), 0)


@lru_cache(maxsize=4)
def _shuffled(num_items: int, seed: int) -> list[int]:
    """Questions in an order that depends on the seed alone."""
    order = list(range(num_items))
    rng(seed, NAME, 0, "questions").shuffle(order)
    return order


def _evidence(
    gold: tuple[Gold, ...], places: list[int], passages: tuple[Passage, ...]
) -> tuple[Evidence, ...]:
    """The marked sentences, in reading order."""
    found = [
        Evidence(document=place, start=start, end=end, text=passages[place].text[start:end])
        for one, place in zip(gold, places, strict=False)
        for start, end in one.spans
    ]
    return tuple(sorted(found, key=lambda item: (item.document, item.start)))
