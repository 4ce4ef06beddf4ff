"""Prompt sets: TOML files in `prompt_sets/`, and files of the user's own.

A prompt set has two templates: `read` for each section, `answer` for the end; `note` and `merge` are for sections that are
read apart from each other. Slots are names in braces; every other brace is left alone, so `\\boxed{}` is written as it is.
`{{question}}` stands for a literal `{question}`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memagent.agent.evidence.replies import ReplyFormat
from memagent.config import AgentConfig
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.types import Message

SETS = Path(__file__).parent / "prompt_sets"
_DEFAULT = tomllib.loads((SETS / "default.toml").read_text(encoding="utf-8"))
BOX = "\\boxed{}"
"""How templates ask for an answer in a box."""
READ_SLOTS = ("question", "section", "memory", "section_number", "memory_tokens", "memory_words")
ANSWER_SLOTS = ("question", "memory", "num_sections", "answer_tokens")
NOTE_SLOTS = ("question", "section", "memory", "memory_tokens", "memory_words")
MERGE_SLOTS = ("question", "notes", "memory", "memory_tokens", "memory_words")
SLOTS = {"read": READ_SLOTS, "answer": ANSWER_SLOTS, "note": NOTE_SLOTS, "merge": MERGE_SLOTS}
REQUIRED_SLOTS = {
    "read": ("question", "section", "memory"),
    "answer": ("question", "memory"),
    "note": ("question", "section", "memory"),
    "merge": ("question", "notes", "memory"),
}

MAX_LABEL_CHARS = 24
"""A last line such as `New memory:` is not longer."""
NOTHING = "Nothing."
"""The reply to a section that holds nothing for the question."""

_mark = re.compile(r"<(?=/?(?:note|memory|question)\b)", re.IGNORECASE)
_slot = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


class MemoryChange(NamedTuple):
    """What a reply does to the memory."""

    kind: Literal["keep", "add", "replace"]
    text: str
    """What is added, or the new memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The wording of one way to read."""

    name: str
    read: str
    """User message for a section. Slots: see READ_SLOTS."""
    answer: str
    """User message for the answer. Slots: see ANSWER_SLOTS."""
    system: str | None = None
    """System message of every call; None sends none."""
    empty_memory: str = "(empty)"
    """What stands in the memory's place before the first section."""
    no_change: str = ""
    """The reply that keeps the memory as it is, besides an empty one; "" if the prompt offers none."""
    replace: str = ""
    """How a reply begins that replaces the memory, all others being added to it; "" if every reply replaces it."""
    note: str = _DEFAULT["note"]
    """User message for a section that is read apart from the others. Slots: see NOTE_SLOTS."""
    merge: str = _DEFAULT["merge"]
    """User message that merges notes. Slots: see MERGE_SLOTS."""
    nothing: str = NOTHING
    """The reply to a section that holds nothing for the question, besides an empty one."""

    def section_messages(
        self,
        *,
        question: str,
        section: str,
        memory: str,
        section_number: int,
        memory_tokens: int,
        is_parallel: bool = False,
    ) -> list[Message]:
        """The conversation for one section: with notes on it alone in parallel mode, else with the memory."""
        more = {"section": section, "section_number": str(section_number)}
        template = self.note if is_parallel else self.read
        return self._messages(template, question, memory, memory_tokens, more)

    def merge_messages(
        self, *, question: str, notes: Sequence[tuple[str, str]], memory: str, memory_tokens: int
    ) -> list[Message]:
        """The conversation that merges notes, each with the sections it is on, into one memory."""
        blocks = "\n\n".join(note_block(place, text) for place, text in notes)
        return self._messages(self.merge, question, memory, memory_tokens, {"notes": blocks})

    def answer_messages(
        self, *, question: str, memory: str, num_sections: int, answer_tokens: int
    ) -> list[Message]:
        """The conversation that answers from the last memory."""
        more = {"num_sections": str(num_sections), "answer_tokens": str(answer_tokens)}
        return self._messages(self.answer, question, memory, 0, more)

    @property
    def sha256(self) -> str:
        """Fingerprint of the wording; the name does not count."""
        wording = [self.system, self.read, self.answer, self.empty_memory]
        wording += [mark for mark in (self.no_change, self.replace) if mark]
        return hashlib.sha256(json.dumps(wording).encode()).hexdigest()

    def says_nothing(self, reply: str) -> bool:
        """Whether a reply to a section that is read on its own says that it holds nothing."""
        return says_nothing(reply, self.nothing)

    @property
    def merging_sha256(self) -> str:
        """Fingerprint of the wording of notes and merges."""
        wording = [self.note, self.merge, self.nothing]
        return hashlib.sha256(json.dumps(wording).encode()).hexdigest()

    def change_of(self, reply: str, memory: str = "") -> MemoryChange:
        """What a reply does to the memory, and with which text.

        A replacement that only leaves lines of the memory out keeps it: lines make room where they have to, and
        a model that repeats one of the facts it knows has not learned that the others are wrong.
        """
        if self.no_change and bare(reply) == bare(self.no_change):
            return MemoryChange("keep", "")
        if not self.replace:
            return MemoryChange("replace", reply)
        if reply[: len(self.replace)].casefold() == self.replace.casefold():
            new = reply[len(self.replace) :].strip()
            is_part = bool(new) and set(new.split("\n")) <= set(memory.split("\n"))
            return MemoryChange("keep", "") if is_part else MemoryChange("replace", new)
        return MemoryChange("add", reply)

    def reply_for(self, old: str, new: str) -> str:
        """The shortest reply that turns one memory into another."""
        if old == new and self.no_change:
            return self.no_change
        if not self.replace:
            return new
        lines, kept = new.split("\n"), old.split("\n") if old else []
        if lines[: len(kept)] == kept:
            return "\n".join(lines[len(kept) :])
        return f"{self.replace}\n{new}"

    def _messages(
        self, template: str, question: str, memory: str, memory_tokens: int, more: dict[str, str]
    ) -> list[Message]:
        values = {
            "question": question,
            "memory": memory or self.empty_memory,
            "memory_tokens": str(memory_tokens),
            "memory_words": str(memory_tokens * 3 // 4),
            **more,
        }
        user: Message = {"role": "user", "content": fill(template, values)}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]


def says_nothing(reply: str, nothing: str = NOTHING) -> bool:
    """Whether a reply is empty, or says that a section holds nothing; case and outer punctuation do not count.

    The whole reply must say so: a note may begin with such a word, copied from the text.
    """
    return bare(reply) in ("", bare(nothing))


def note_block(place: str, text: str) -> str:
    """A note as it stands in a merge. Marks of ours inside it are broken: a note cannot add another one."""
    return f'<note sections="{place}">\n{_mark.sub("(", text)}\n</note>'


def bare(reply: str) -> str:
    """A reply without case and outer punctuation, to compare it."""
    return reply.strip(" \t\r\n.\"'*`").casefold()


def fill(template: str, values: dict[str, str]) -> str:
    """The template with its slots filled, in one pass: braces inside the values stay as they are."""
    return _slot.sub(
        lambda match: values[match[2]] if match[1] is None else "{" + match[1] + "}", template
    )


NO_CHANGE = "No change."
"""The reply that keeps the memory, where a setting offers it."""
_OFFER_NO_CHANGE = "If this section adds nothing to the memory, write only: No change."
_ASK_QUOTES = (
    "Before the memory, copy every sentence of this section that helps to answer the question, word for word, "
    "each as <quote>sentence</quote>."
)
_ASK_ITEMS = (
    "The question asks to count, list, add up or pick items. Before the memory, list every item of this section "
    "that counts, each as <item>name | value | its sentence, word for word</item>; leave the value empty where "
    "there is none. Items of one kind have the same name. A value that is changed is listed again, under the same "
    "name, with the new value. Items are counted for you: do not count in the memory."
)
_OFFER_STOP = "If memory and quotes now hold all that the question needs, end with <enough/>"
_ASK_SOURCES = "After the answer, name the numbers of the quotes that it rests on in a last line, such as: Sources: 1, 3"


def prompts_for(config: AgentConfig) -> PromptSet:
    """The prompt set of settings, worded for what replies may hold."""
    prompts = open_prompts(config.prompts)
    reply_format = ReplyFormat.of(config)
    offers_no_change = reply_format.no_change and not prompts.no_change
    asked = [
        (offers_no_change, _OFFER_NO_CHANGE),
        (reply_format.quotes, _ASK_QUOTES),
        (reply_format.items, _ASK_ITEMS),
        (reply_format.stop, _OFFER_STOP),
    ]
    read = [wording for is_asked, wording in asked if is_asked]
    # notes have a word of their own for a section that adds nothing
    noted = [line.replace("the memory", "the note") for line in read if line != _OFFER_NO_CHANGE]
    cites = [_ASK_SOURCES] if reply_format.quotes or reply_format.items else []
    if not read and not cites:
        return prompts
    return replace(
        prompts,
        read=_with_lines(prompts.read, read),
        note=_with_lines(prompts.note, noted),
        answer=_with_lines(prompts.answer, cites),
        no_change=NO_CHANGE if offers_no_change else prompts.no_change,
    )


def _with_lines(template: str, lines: list[str]) -> str:
    """A template with further lines at its end; a label such as `Answer:` stays the last one."""
    if not lines:
        return template
    body = template.rstrip()
    above, _, last = body.rpartition("\n")
    if last.endswith(":") and len(last) <= MAX_LABEL_CHARS:
        return "\n".join([above.rstrip(), "", *lines, "", last, ""])
    return "\n".join([body, *lines, ""])


def asks_box(name: str) -> bool:
    r"""Whether answers to the prompt set of this name stand in `\boxed{}`; those to templates of one's own may."""
    return name not in PROMPT_SETS or BOX in PROMPT_SETS[name].answer


def open_prompts(name: str) -> PromptSet:
    """A prompt set by name, or from a TOML file with the same fields as `PromptSet`."""
    if name in PROMPT_SETS:
        return PROMPT_SETS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"there is no prompt set or template file {name!r}; {hint(name, PROMPT_SETS)}"
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}") from None
    return parse_prompts(values, source=str(path))


def parse_prompts(values: dict[str, Any], *, source: str) -> PromptSet:
    """A prompt set from a table of strings, checked."""
    known = PromptSet.__dataclass_fields__
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}; {hint(key, known)}")
        if not isinstance(value, str):
            raise ConfigError(f"{source}: {key} must be a string")
    for key in ("read", "answer"):
        if key not in values:
            raise ConfigError(f"{source}: the template {key!r} is missing")
    for key, slots in SLOTS.items():
        if key in values:
            found = {name for _, name in _slot.findall(values[key]) if name}
            for name in sorted(found - set(slots)):
                raise ConfigError(
                    f"{source}: {key} has an unknown slot {{{name}}}; {hint(name, slots)}; "
                    f"write {{{{{name}}}}} for literal braces"
                )
            for name in REQUIRED_SLOTS[key]:
                if name not in found:
                    raise ConfigError(f"{source}: {key} lacks the slot {{{name}}}")
    return PromptSet(**{"name": Path(source).stem, **values})


PROMPT_SETS: dict[str, PromptSet] = {
    path.stem: parse_prompts(tomllib.loads(path.read_text(encoding="utf-8")), source=path.name)
    for path in sorted(SETS.glob("*.toml"))
}
"""The sets that come with memagent; each file says what it is for."""
