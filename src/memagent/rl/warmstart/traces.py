"""Warm-start traces: for each section, the memory that a good reader would write, made by rule.

    Example ── rule of its task ──▶ moments     from here on, this is the memory
       │                               │
       └─ sections as the reader cuts ─┴──▶ conversations    prompt of the reader, target memory
                                            ... and the last one: prompt for the answer, the answer

Reinforcement learning starts only where a model finds the answer now and then. These traces bring it
there. They hold the reader's own prompts, byte for byte, because the same chunking and the same
prompt set make them:

    tokenizer = open_tokenizer("bytes")
    for conversation in conversations(example, config=AgentConfig(), tokenizer=tokenizer): ...

    memagent data traces train.jsonl --out traces.jsonl

A memory says only what the text up to the section's end tells; evidence counts in the section where
it ends. A section that adds nothing repeats the memory byte for byte. What does not fit the memory is
refused, never shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memagent.agent.prompts import PromptSet, open_prompts
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.tasks.registry import rebuild
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer
from memagent.errors import DataError
from memagent.types import Message

NOTHING_YET = "Nothing in the text so far helps to answer the question."
"""The memory until something matters."""


class TraceRefused(DataError):
    """There is no trace by rule for this example, or it does not fit the settings."""


class Moment(NamedTuple):
    """From a place in the text on, what the memory holds."""

    end: int
    """Character offset into the text: what has to be read before."""
    memory: str


Rule = Callable[[Example], list[Moment]]
"""The moments of an example, in the order of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One step of a trace: what the reader sends, and what the model should reply."""

    id: str
    """Of the example."""
    task: str
    step: int
    """Counted from 0; the answer comes last."""
    kind: Literal["read", "answer"]
    messages: tuple[Message, ...]
    """The reader's prompt, then the reply as the assistant's message."""

    def record(self) -> dict[str, Any]:
        """As one line of a file holds it."""
        return {
            "id": self.id,
            "task": self.task,
            "step": self.step,
            "kind": self.kind,
            "messages": list(self.messages),
        }


def conversations(
    example: Example, *, config: AgentConfig, tokenizer: Tokenizer
) -> Iterator[Conversation]:
    """The steps that read an example. Refuses before the first one if anything does not fit."""
    prompts = open_prompts(config.prompts)
    example = rebuild(example)
    question = example.question.strip()  # as the reader does
    text = example.text()
    if not text:
        raise TraceRefused(f"{example.id} has an empty text; there is nothing to read")
    moments = _moments(example)
    answer = answer_of(example, moments[-1].memory if moments else NOTHING_YET, prompts)
    _check_fit(example, [moment.memory for moment in moments], answer, config, tokenizer)
    memory, upcoming, step = "", 0, 0
    for chunk in Chunks(Document.from_text(text), tokenizer, config.chunk_tokens):
        prompt = prompts.read_messages(
            question=question,
            section=chunk.text,
            memory=memory,
            section_number=chunk.index + 1,
            memory_tokens=config.memory_tokens,
        )
        while upcoming < len(moments) and moments[upcoming].end <= chunk.end:
            upcoming += 1
        memory = moments[upcoming - 1].memory if upcoming else NOTHING_YET
        yield _conversation(example, step, "read", prompt, memory)
        step += 1
    prompt = prompts.answer_messages(
        question=question,
        memory=memory,
        num_sections=step,
        answer_tokens=config.answer_tokens,
    )
    yield _conversation(example, step, "answer", prompt, answer)


def answer_of(example: Example, memory: str, prompts: PromptSet) -> str:
    """The answer as the prompt set asks for it: the first accepted one, or all of them.

    Where all are asked for and the memory holds them, they come in its order.
    """
    if not example.answers:
        raise TraceRefused(f"{example.id} has no accepted answer to end its trace with")
    answer = example.answers[0]
    if example.match == "all":
        places = {answer: memory.find(answer) for answer in example.answers}
        is_held = all(place >= 0 for place in places.values())
        in_order = sorted(example.answers, key=places.__getitem__) if is_held else example.answers
        answer = ", ".join(in_order)
    return f"\\boxed{{{answer}}}" if "\\boxed" in prompts.answer else answer


def _conversation(
    example: Example,
    step: int,
    kind: Literal["read", "answer"],
    prompt: list[Message],
    reply: str,
) -> Conversation:
    target: Message = {"role": "assistant", "content": reply}
    return Conversation(
        id=example.id, task=example.task, step=step, kind=kind, messages=(*prompt, target)
    )


def _moments(example: Example) -> list[Moment]:
    if reason := NO_RULE.get(example.task):
        raise TraceRefused(f"{example.id}: {reason}")
    moments = RULES.get(example.task, collect)(example)
    # as the reader takes a reply over: without white space around it
    return [Moment(moment.end, moment.memory.strip()) for moment in moments]


def _check_fit(
    example: Example,
    memories: list[str],
    answer: str,
    config: AgentConfig,
    tokenizer: Tokenizer,
) -> None:
    longest = max(tokenizer.count(memory) for memory in (NOTHING_YET, *memories))
    if longest > config.memory_tokens:
        raise TraceRefused(
            f"{example.id}: its memory takes {longest} tokens, more than "
            f"memory_tokens={config.memory_tokens}; raise memory_tokens"
        )
    num_tokens = tokenizer.count(answer)
    if num_tokens > config.answer_tokens:
        raise TraceRefused(
            f"{example.id}: its answer takes {num_tokens} tokens, more than "
            f"answer_tokens={config.answer_tokens}; raise answer_tokens"
        )


# --- rules ----------------------------------------------------------------------------------------


def collect(example: Example) -> list[Moment]:
    """Keep what matters, one line each, in the order of the text."""
    if not example.evidence:
        raise TraceRefused(f"{example.id} says nothing about its evidence; no memory can be made")
    return _collected(_noted(example))


def collect_if_any(example: Example) -> list[Moment]:
    """As `collect`, for tasks whose text may hold nothing that matters."""
    return _collected(_noted(example))


def latest(example: Example) -> list[Moment]:
    """Keep the last valid state: each note replaces the one before."""
    return _noted(example)


def count(example: Example) -> list[Moment]:
    """Keep how many there were."""
    label = _told(example, "counted")
    return [
        Moment(moment.end, f"{label}: {number}.")
        for number, moment in enumerate(_noted(example), start=1)
    ]


def tally(example: Example) -> list[Moment]:
    """Keep a running sum, the largest so far, or a sum for each name."""
    label, measure = _told(example, "counted"), _told(example, "measure")
    moments: list[Moment] = []
    sums: dict[str, int] = {}
    largest = 0
    for moment, (name, num) in zip(_noted(example), _told(example, "entries"), strict=True):
        sums[name] = sums.get(name, 0) + num
        largest = max(largest, num)
        state = {
            "sum": str(sum(sums.values())),
            "largest": str(largest),
            "leader": ", ".join(f"{name} {total}" for name, total in sums.items()),
        }
        moments.append(Moment(moment.end, f"{label}: {state[measure]}."))
    return moments


def nth(example: Example) -> list[Moment]:
    """Count the items that are alike until the one that is asked for, then keep its wording."""
    kind, topic, number = (_told(example, key) for key in ("kind", "topic", "number"))
    before = sorted(_spans(example, "similar"))[: number - 1]
    moments = [
        Moment(end, f"{kind.capitalize()}s about {topic} so far: {seen}. Wanted: number {number}.")
        for seen, (_, end, _) in enumerate(before, start=1)
    ]
    [(_, end)] = example.evidence_offsets()
    wording = example.evidence[0].text
    return [*moments, Moment(end, f"{kind.capitalize()} number {number} about {topic}:\n{wording}")]


def resolve(example: Example) -> list[Moment]:
    """Keep all that may be the second hop until the first one tells which of them it is."""
    *_, link = notes = _noted(example)
    second = notes[0]
    candidates = [Moment(end, note) for _, end, note in _spans(example, "candidate")]
    open_hops = sorted(moment for moment in (second, *candidates) if moment.end < link.end)
    return [*_collected(open_hops), Moment(link.end, f"{link.memory}\n{second.memory}")]


RULES: dict[str, Rule] = {
    "beyond/coreference": nth,
    "beyond/counting": count,
    "beyond/aggregation": tally,
    "beyond/two_hop": resolve,
    "beyond/corrections": latest,
    "beyond/unanswerable": collect_if_any,
    "ruler/vt": latest,
}
"""Rules by task; `collect` for every other task."""

_WORDS = "its answer rests on the counts of all words of the text, which no memory holds"
NO_RULE: dict[str, str] = {"ruler/cwe": _WORDS, "ruler/fwe": _WORDS}
"""Tasks without a rule, and why."""


def _noted(example: Example) -> list[Moment]:
    """What to remember of each evidence, and where it ends, in the order of the text."""
    found: list[Moment] = []
    for item, (_, end) in zip(example.evidence, example.evidence_offsets(), strict=True):
        title = example.passages[item.document].title
        # in an encyclopedia's paragraph, a sentence often says "he" or "the film": its title tells who
        text = f"{title}: {item.text}" if title and title not in item.text else item.text
        found.append(Moment(end, item.note or text))
    return sorted(found, key=lambda moment: moment.end)


def _collected(moments: list[Moment]) -> list[Moment]:
    lines: dict[str, None] = {}
    collected = []
    for moment in moments:
        lines[" ".join(moment.memory.split())] = None
        collected.append(Moment(moment.end, "\n".join(lines)))
    return collected


def _spans(example: Example, role: str) -> list[tuple[int, int, str]]:
    return [(start, end, note) for start, end, note in _told(example, "spans").get(role, [])]


def _told(example: Example, key: str) -> Any:
    """What the example's task left in its metadata for its rule."""
    try:
        return example.metadata[key]
    except KeyError:
        raise TraceRefused(
            f"{example.id} of {example.task} lacks {key!r} in its metadata; build it again"
        ) from None
