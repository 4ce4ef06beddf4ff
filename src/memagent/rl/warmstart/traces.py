"""Warm-start demonstrations of the memory reader: for each section, the memory a good reader would write.

    Example ── rule of its task ──▶ moments     from this place on, this is the memory
       │                               │
       └─ Reader on a scripted engine ─┴──▶ Conversation per section: prompt, memory
                                            Conversation for the answer: prompt, answer

Reinforcement learning needs a model that finds the answer from time to time; these demonstrations get it
there. `Reader` itself builds the prompts, so they are exactly those of a rollout:

    tokenizer = open_tokenizer("bytes")
    for conversation in conversations(example, config=AgentConfig(), tokenizer=tokenizer): ...

    memagent data traces train.jsonl --out traces.jsonl

A memory contains only what the text up to the section's end says; evidence counts in the section where it
ends. A section without news repeats the memory byte for byte, or says so where the prompts allow it. A memory that exceeds the limit is refused,
never shortened. Where the evidence is, is known, so quotes, the moment to stop and the sources of the answer are known
too. Items of tasks that count are what code needs to count them: name, value and sentence; their memory stays empty.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter
from typing import Any, NamedTuple

from memagent import blocking
from memagent.agent.evidence.replies import SEPARATOR, ReplyFormat, shielded
from memagent.agent.prompts import PromptSet, prompts_for
from memagent.agent.reader import Reader
from memagent.agent.trace import StepKind
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.tasks.registry import rebuild
from memagent.documents.chunking import Chunks
from memagent.documents.document import Chunk, Document
from memagent.engines.scripted import Script, ScriptedEngine
from memagent.errors import DataError
from memagent.rl.warmstart.conversations import Conversation
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Message, Sampling

NOTHING_YET = "Nothing in the text so far helps to answer the question."
"""The memory before the first evidence, where a reply cannot say that nothing changes."""


NUM_SPARE_WORDS = 2
"""Frequent words that a memory holds beside those of the answer."""
WORDS_PER_MOMENT = 20
"""Frequent words are compared after each so many words."""

NEXT_FACT = "what the memory leads to"
"""What is missing after the first round of parallel reading, where one fact leads to another."""
NOTE_START = "<note sections="
"""How a note begins in the prompt of a merge."""
MEMORY_MARK = "\x00memory\x00"
"""Stands for the memory where its place in a prompt is looked for."""

_section_block = re.compile(r"<section[^>]*>\n(.*)\n</section>", re.DOTALL)
_word = re.compile(r"[^\W\d_][\w-]*")
"""A word of a list or of a text in code; numbers of lines and dots are none."""


class TraceRefused(DataError):
    """There is no rule for this example, or its memory or answer exceeds the settings."""


class Moment(NamedTuple):
    """From a place in the text on, what the memory holds."""

    end: int
    """Character offset into the text: the memory is due when the text up to here has been read."""
    memory: str


Rule = Callable[[Example], list[Moment]]
"""The moments of an example, in the order of the text."""


def conversations(
    example: Example,
    *,
    config: AgentConfig,
    tokenizer: Tokenizer,
    rules: Mapping[str, Rule] | None = None,
) -> list[Conversation]:
    """The steps of a good reading. Raises TraceRefused if there is none. `rules` as for `RightReplies`."""
    example = rebuild(example)
    text = example.text()
    if not text:
        raise TraceRefused(f"{example.id} has an empty text")
    config = config.model_copy(update={"order": "text"})  # a prompt does not depend on the order
    right = RightReplies(example, config=config, tokenizer=tokenizer, rules=rules)
    sections = Chunks(
        Document.from_text(text), tokenizer, config.chunk_tokens, ends=config.section_ends
    )
    right.check_fit(sections)
    engine = ScriptedEngine(right.script(sections))
    reader = Reader(engine, tokenizer=tokenizer, config=config)
    steps = list(blocking.iterate(reader.steps(example.question, sections)))
    if not config.merges and [step.memory for step in steps[:-1]] != right.memories:
        raise TraceRefused(
            f"{example.id}: the reader changes its memories; remove tags of reasoning from its evidence"
        )
    return [
        Conversation(
            id=example.id,
            messages=(*prompt, {"role": "assistant", "content": said.reply}),
            task=example.task,
            step=number,
            kind=said.kind,
        )
        for number, (prompt, said) in enumerate(zip(engine.prompts, right.said, strict=True))
    ]


class Said(NamedTuple):
    """A reply, and the kind of step that it is for."""

    kind: StepKind
    reply: str


class RightReplies:
    """What a good reader replies to the prompts of one example."""

    def __init__(
        self,
        example: Example,
        *,
        config: AgentConfig,
        tokenizer: Tokenizer,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        """`rules` take precedence over those of this module, by task."""
        self._example = example
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts_for(config)
        self._marks = marks_of(example, config)
        counts = counts_items(example, config)
        self._moments = [] if counts else _moments(example, rules or {})
        self._lines: list[Moment] = []
        """Each piece of evidence as a line of its own, for sections that are read apart from each other."""
        if not counts and (config.merges or config.order != "text"):
            self._lines = [Moment(end, " ".join(memory.split())) for end, memory in noted(example)]
        is_linked = example.task in LINKED and config.asks_notes and config.rounds > 1
        self._link = self._lines[-1].memory if is_linked and len(self._lines) > 1 else None
        """The line that makes the others relevant: they are noted in the second round of parallel reading."""
        self._nothing = "" if self._prompts.no_change or counts else NOTHING_YET
        last = self._moments[-1].memory if self._moments else self._nothing
        self._answer = answer_of(example, last, self._prompts)
        self._is_in_order = not config.merges and config.order == "text"
        self._knows_enough = False
        self._read_ends: set[int] = set()
        self._quoted: list[Mark] = []
        self.memories: list[str] = []
        """Memories after each section, where sections are read in order."""
        self.said: list[Said] = []
        """All replies so far."""

    def check_fit(self, sections: Chunks) -> None:
        """Raise TraceRefused where a memory, an answer or the quotes of a section exceed the settings."""
        memories = [self._nothing, *(moment.memory for moment in self._moments)]
        self._check_length("its memory has", memories, "memory_tokens")
        self._check_length("its answer has", [self._answer], "answer_tokens")
        if self._config.asks_quotes:
            quotes = [self._marks.quotes(each) for each in sections]
            self._check_length("the quotes of a section have", quotes, "quote_tokens")

    def _check_length(self, what: str, texts: list[str], setting: str) -> None:
        longest, limit = max(map(self._tokenizer.count, texts)), getattr(self._config, setting)
        if longest > limit:
            raise TraceRefused(
                f"{self._example.id}: {what} {longest} tokens, more than `{setting}={limit}`; raise `{setting}`"
            )

    def script(self, sections: Chunks) -> Script:
        """The replies as a script of an engine that reads these sections."""
        find = self._next(sections) if self._is_in_order else self._found(sections)

        def script(messages: Sequence[Message], sampling: Sampling) -> str:
            prompt = messages[-1]["content"]
            if NOTE_START in prompt:
                return self._say("merge", self._merged(prompt))
            section = find(prompt)
            if section is None:
                sources = sources_of(self._quoted, prompt) if self._config.asks_quotes else ""
                return self._say("answer", _joined(self._answer, sources))
            return self._say("read", self._read(section, prompt))

        return script

    def _say(self, kind: StepKind, reply: str) -> str:
        self.said.append(Said(kind, reply))
        return reply

    def _next(self, sections: Chunks) -> Callable[[str], Chunk | None]:
        """Finds the next section in the order of the text; None when the reader has stopped."""
        numbers = counter()

        def find(prompt: str) -> Chunk | None:
            is_over = self._config.stop_early and self._knows_enough
            return None if is_over else sections.get(next(numbers))

        return find

    def _found(self, sections: Chunks) -> Callable[[str], Chunk | None]:
        """Finds the section that a prompt shows, where sections are read in another order or at once."""
        has_marks = ReplyFormat.of(self._config).has_marks
        shown = {(shielded(each.text) if has_marks else each.text): each for each in sections}

        def find(prompt: str) -> Chunk | None:
            block = _section_block.search(prompt)
            if block and block.group(1) in shown:
                return shown[block.group(1)]
            return next((each for text, each in shown.items() if text in prompt), None)

        return find

    def _read(self, section: Chunk, prompt: str) -> str:
        notes = self._notes_on(section, prompt) if self._config.asks_notes else []
        if self._config.asks_notes and self._lines and not notes:
            return self._prompts.nothing
        self._quoted += self._marks.inside(section)
        if self._config.asks_notes:
            return _joined(self._marks.quotes(section), *notes) or self._prompts.nothing
        old, new = self._memories(section, prompt)
        quotes = self._marks.quotes(section)
        body = "" if quotes and new == old else self._prompts.reply_for(old, new)
        self._knows_enough = self._is_enough(section)
        self.memories.append(new)
        return _joined(quotes, body, "<enough/>" if self._knows_enough else "")

    def _is_enough(self, section: Chunk) -> bool:
        """Whether all evidence has been read with this section."""
        needed = self._marks.needed
        if needed is None:
            return False
        self._read_ends |= {end for end in needed if section.start < end <= section.end}
        return needed <= self._read_ends

    def _memories(self, section: Chunk, prompt: str) -> tuple[str, str]:
        """The memory before and after a section; where sections are not read in order, that in the prompt."""
        if self._is_in_order:
            old = self.memories[-1] if self.memories else ""
            num_due = bisect_right(self._moments, section.end, key=lambda moment: moment.end)
            return old, self._moments[num_due - 1].memory if num_due else self._nothing
        known = self._shown_memory(section, prompt).strip()
        old = "" if known in (self._prompts.empty_memory, self._nothing) else known
        lines = dict.fromkeys([*old.splitlines(), *self._lines_in(section)])
        return old, "\n".join(lines) or self._nothing

    def _shown_memory(self, section: Chunk, prompt: str) -> str:
        """The memory in the prompt of a section, wherever its template has it."""
        has_marks = ReplyFormat.of(self._config).has_marks
        message = self._prompts.section_messages(
            question=self._example.question.strip(),
            section=shielded(section.text) if has_marks else section.text,
            memory=MEMORY_MARK,
            section_number=section.index + 1,
            memory_tokens=self._config.memory_tokens,
        )[-1]["content"]
        before, *others = message.split(MEMORY_MARK)
        length = (len(prompt) - len(message)) // len(others) + len(MEMORY_MARK)
        return prompt[len(before) : len(before) + length]

    def _lines_in(self, section: Chunk) -> list[str]:
        return [
            moment.memory for moment in self._lines if section.start < moment.end <= section.end
        ]

    def _merged(self, prompt: str) -> str:
        lines = dict.fromkeys(line.memory for line in self._lines if line.memory in prompt)
        is_open = self._link is not None and len(lines) < len(self._lines)
        return "\n".join([*lines, f"Missing: {NEXT_FACT if is_open else 'nothing'}"])

    def _notes_on(self, section: Chunk, prompt: str) -> list[str]:
        """What a section that is read on its own adds to what is known, as far as it is known to matter."""
        known = prompt.rpartition("</section>")[2]
        is_linked = self._link is None or self._link in known
        lines = [line for line in self._lines_in(section) if line not in known]
        return [line for line in lines if is_linked or line == self._link]


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def answer_of(example: Example, memory: str, prompts: PromptSet) -> str:
    """The answer in the form the prompt set asks for: the first accepted one, or all of them.

    If all are required and the memory contains them, they come in the order of the memory.
    """
    if not example.answers:
        raise TraceRefused(f"{example.id} has no accepted answer to demonstrate")
    answer = example.answers[0]
    if example.match == "all":
        places = {answer: memory.find(answer) for answer in example.answers}
        is_held = all(place >= 0 for place in places.values())
        in_order = sorted(example.answers, key=places.__getitem__) if is_held else example.answers
        answer = ", ".join(in_order)
    return f"\\boxed{{{answer}}}" if "\\boxed" in prompts.answer else answer


def _moments(example: Example, special: Mapping[str, Rule]) -> list[Moment]:
    rules = {**RULES, **special}
    moments = rules.get(example.task, collect)(example)
    # the reader strips replies
    return [Moment(moment.end, moment.memory.strip()) for moment in moments]


# --- rules ----------------------------------------------------------------------------------------


def collect(example: Example) -> list[Moment]:
    """Keep the evidence, one line each, in the order of the text."""
    if not example.evidence:
        raise TraceRefused(f"{example.id} has no evidence, so there is no memory to demonstrate")
    return collected(noted(example))


def collect_if_any(example: Example) -> list[Moment]:
    """As `collect`, for tasks whose text may hold no evidence."""
    return collected(noted(example))


def latest(example: Example) -> list[Moment]:
    """Keep the last valid state: each note replaces the one before."""
    return noted(example)


def latest_of_each(example: Example) -> list[Moment]:
    """Keep the last valid state of each thing: a note replaces the one before on the same thing."""
    states: dict[str, str] = {}
    moments: list[Moment] = []
    for moment in noted(example):
        states[state_of(moment.memory)[0]] = moment.memory
        moments.append(Moment(moment.end, "\n".join(states.values())))
    return moments


def count(example: Example) -> list[Moment]:
    """Keep the count so far."""
    label = required(example, "counted")
    return [
        Moment(moment.end, f"{label}: {number}.")
        for number, moment in enumerate(noted(example), start=1)
    ]


def tally(example: Example) -> list[Moment]:
    """Keep a running sum, the largest so far, or a sum per name."""
    label, measure = required(example, "counted"), required(example, "measure")
    moments: list[Moment] = []
    sums: dict[str, int] = {}
    largest = 0
    for moment, (name, num) in zip(noted(example), required(example, "entries"), strict=True):
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
    """Count similar items up to the requested one, then keep its wording."""
    kind, topic, number = (required(example, key) for key in ("kind", "topic", "number"))
    before = sorted(_spans(example, "similar"))[: number - 1]
    moments = [
        Moment(end, f"{kind.capitalize()}s about {topic} so far: {seen}. Wanted: number {number}.")
        for seen, (_, end, _) in enumerate(before, start=1)
    ]
    [(_, end)] = example.evidence_offsets()
    wording = example.evidence[0].text
    return [*moments, Moment(end, f"{kind.capitalize()} number {number} about {topic}:\n{wording}")]


def resolve(example: Example) -> list[Moment]:
    """Keep all candidates for the second hop until the first one identifies it."""
    *_, link = notes = noted(example)
    second = notes[0]
    candidates = [Moment(end, note) for _, end, note in _spans(example, "candidate")]
    open_hops = sorted(moment for moment in (second, *candidates) if moment.end < link.end)
    return [*collected(open_hops), Moment(link.end, f"{link.memory}\n{second.memory}")]


def frequent(example: Example) -> list[Moment]:
    """Keep the words that have occurred most often, in that order, and a few more than are asked for.

    Their counts are not kept: the order within a section is what a model can see.
    """
    counts: Counter[str] = Counter()
    moments: list[Moment] = []
    num_kept = len(example.answers) + NUM_SPARE_WORDS
    for number, word in enumerate(_word.finditer(example.text()), start=1):
        counts[word.group()] += 1
        if number % WORDS_PER_MOMENT == 0:
            moments.append(_frequent(counts, num_kept, word.end()))
    return [*moments, _frequent(counts, num_kept, len(example.text()))]


def _frequent(counts: Counter[str], num_kept: int, end: int) -> Moment:
    words = ", ".join(word for word, _ in counts.most_common(num_kept))
    return Moment(end, f"Most frequent so far: {words}." if words else NOTHING_YET)


RULES: dict[str, Rule] = {
    "beyond/coreference": nth,
    "beyond/counting": count,
    "beyond/aggregation": tally,
    "beyond/two_hop": resolve,
    "beyond/corrections": latest_of_each,
    "beyond/unanswerable": collect_if_any,
    "ruler/cwe": frequent,
    "ruler/fwe": frequent,
    "ruler/vt": latest,
}
"""Rules by task; `collect` for every other task."""


LINKED = frozenset({"beyond/two_hop"})
"""Tasks whose last piece of evidence in the text tells what the others are about."""


def noted(example: Example) -> list[Moment]:
    """The memory of each evidence alone, and where it ends, in the order of the text."""
    found: list[Moment] = []
    for item, (_, end) in zip(example.evidence, example.evidence_offsets(), strict=True):
        title = example.passages[item.document].title
        # sentences of an encyclopedia often say "he" or "the film": the title names who or what
        text = f"{title}: {item.text}" if title and title not in item.text else item.text
        found.append(Moment(end, item.note or text))
    return sorted(found, key=lambda moment: moment.end)


def collected(moments: list[Moment]) -> list[Moment]:
    lines: dict[str, None] = {}
    collected = []
    for moment in moments:
        lines[" ".join(moment.memory.split())] = None
        collected.append(Moment(moment.end, "\n".join(lines)))
    return collected


def _spans(example: Example, role: str) -> list[tuple[int, int, str]]:
    return [(start, end, note) for start, end, note in required(example, "spans").get(role, [])]


def required(example: Example, key: str) -> Any:
    """What the rule needs of the example's metadata."""
    try:
        return example.metadata[key]
    except KeyError:
        raise TraceRefused(
            f"{example.id} of {example.task} lacks {key!r} in its metadata; rebuild it"
        ) from None


# --- quotes and items -----------------------------------------------------------------------------

MAX_SOURCES = 12
"""Quotes that an answer names, at most."""
WHOLE_TEXT = frozenset(
    {
        *("beyond/counting", "beyond/aggregation", "beyond/corrections", "beyond/unanswerable"),
        *("ruler/cwe", "ruler/fwe", "ruler/vt"),
    }
)
"""Tasks that are answered only when the whole text has been read: demonstrations of them never stop early."""

_shown = re.compile(r"^\[(\d+)\] ", re.MULTILINE)


class Mark(NamedTuple):
    """A span of the text that a reply quotes, with the item it is."""

    start: int
    end: int
    text: str
    item: str = ""
    value: str = ""
    is_source: bool = True
    """Whether the answer rests on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The marks of an example's right replies."""

    spans: tuple[Mark, ...]
    """In the order of the text."""
    items: bool
    needed: frozenset[int] | None
    """Ends of the evidence that must have been read before a reply says that enough is known; None where none
    says so."""

    def inside(self, section: Chunk) -> list[Mark]:
        """The marks of a section; what two sections share is in neither."""
        return [
            mark for mark in self.spans if section.start <= mark.start and mark.end <= section.end
        ]

    def quotes(self, section: Chunk) -> str:
        """The quotes of a section, one a line."""
        marks = [mark._replace(text=shielded(mark.text)) for mark in self.inside(section)]
        if not self.items:
            return "\n".join(f"<quote>{mark.text}</quote>" for mark in marks)
        items = [f" {SEPARATOR} ".join((mark.item, mark.value, mark.text)) for mark in marks]
        return "\n".join(f"<item>{item}</item>" for item in items)


def sources_of(quoted: Iterable[Mark], prompt: str) -> str:
    """The line that names the sources, of the quotes that a prompt shows by their numbers."""
    shown = {int(number) for number in _shown.findall(prompt)}
    numbers = [
        str(number)
        for number, mark in enumerate(sorted(set(quoted)), start=1)
        if mark.is_source and number in shown
    ]
    return f"Sources: {', '.join(numbers[:MAX_SOURCES]) or 'none'}"


def marks_of(example: Example, config: AgentConfig) -> Marks:
    """The marks that replies of these settings hold; none where the settings ask for none."""
    rule = ITEM_RULES.get(example.task, _evidence) if config.items else _evidence
    spans = sorted(rule(example)) if config.asks_quotes else []
    if spans and config.mode == "in_order":
        spans = sorted([*spans, *_candidates(example)])
    needed = frozenset(end for _, end in example.evidence_offsets())
    can_stop = config.stop_early and needed and example.task not in WHOLE_TEXT
    return Marks(spans=tuple(spans), items=config.items, needed=needed if can_stop else None)


def counts_items(example: Example, config: AgentConfig) -> bool:
    """Whether items of an example are counted by code, so that its memory stays empty."""
    return config.items and example.task in ITEM_RULES


# --- spans ----------------------------------------------------------------------------------------


def _evidence(example: Example) -> list[Mark]:
    """Each piece of evidence, named by the passage it is in."""
    return [
        Mark(start, end, item.text, item=example.passages[item.document].title or "fact")
        for item, (start, end) in zip(example.evidence, example.evidence_offsets(), strict=True)
    ]


def _candidates(example: Example) -> list[Mark]:
    """What may matter as long as the fact that tells has not been read; no answer rests on it."""
    text = example.text()
    last = max((end for _, end in example.evidence_offsets()), default=0)
    return [
        Mark(start, end, text[start:end], item="fact", is_source=False)
        for start, end, _ in example.metadata.get("spans", {}).get("candidate", [])
        if end < last
    ]


def _counted(example: Example) -> list[Mark]:
    """What counts: its name is what is counted."""
    name = str(example.metadata.get("counted", "item")).removesuffix(" so far")
    return [mark._replace(item=name) for mark in _evidence(example)]


def _entries(example: Example) -> list[Mark]:
    """Names with numbers."""
    entries = example.metadata["entries"]
    pairs = zip(sorted(_evidence(example)), entries, strict=True)
    return [mark._replace(item=str(name), value=str(num)) for mark, (name, num) in pairs]


def _states(example: Example) -> list[Mark]:
    """States of things, one after the other: the last value of each is the valid one, and a source."""
    pairs = zip(example.evidence, sorted(_evidence(example)), strict=True)
    found = [(mark, *state_of(item.note or item.text)) for item, mark in pairs]
    last = {name: mark.start for mark, name, _ in found}
    return [
        mark._replace(item=name, value=value, is_source=last[name] == mark.start)
        for mark, name, value in found
    ]


def state_of(note: str) -> tuple[str, str]:
    """The thing that a note tells the state of, and the state.

    >>> state_of("The boat race of Farnley is set for 4 March.")
    ('boat race of Farnley', '4 March')
    """
    name, mark, value = note.partition(" is set for ")
    return (name.removeprefix("The "), value.rstrip(".")) if mark else ("state", note)


def _similar(example: Example) -> list[Mark]:
    """All items of the kind that is asked for; the answer rests on one of them."""
    text = example.text()
    name = f"{example.metadata['kind']} about {example.metadata['topic']}"
    similar = [
        Mark(start, end, text[start:end], item=name, is_source=False)
        for start, end, _ in example.metadata["spans"].get("similar", [])
    ]
    return [*similar, *(mark._replace(item=name) for mark in _evidence(example))]


ITEM_RULES: dict[str, Callable[[Example], list[Mark]]] = {
    "beyond/counting": _counted,
    "beyond/aggregation": _entries,
    "beyond/corrections": _states,
    "beyond/coreference": _similar,
}
"""Tasks whose items are counted by code."""
