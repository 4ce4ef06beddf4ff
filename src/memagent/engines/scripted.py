"""An engine without a model: replies come from a list or a function. For tests, docs and demos.

`scripted` alone replies by `keyword_reply`, a rule that reads our default prompts and keeps the
sentences, or lines of logs and tables, that share most words with the question: enough to see the loop
at work, and no more.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, EngineError
from memagent.types import Completion, Message, Sampling, Usage

Script = Callable[[Sequence[Message], Sampling], str]

_block = re.compile(r"<(question|section|memory|note)(?: [^>]*)?>\n?(.*?)\n?</\1>", re.DOTALL)
_quoted = re.compile(r"\[(\d+)\] ")
"""How the line of a quote begins in the prompt of an answer."""
_blank_line = re.compile(r"\n[ \t]*\n")
_record = re.compile(
    r"""\s*(?:[\d\[{<|*#\u2022"-] | [A-Z]{3,}\b | [A-Z][a-z]{2}\s+\d | [\w.-]+\s?[=:] | \w+,)""",
    re.VERBOSE,
)
"""How lines of logs, lists and tables begin: a date, a level, a bracket, a key."""
MIN_RECORDS = 0.75
"""The share of lines that must begin so; others are stack traces, or cut by the end of a section."""
_end = re.compile(r"""[.!?]+["'\u201d\u2019)\]]*(?=\s|$)|[\u3002\uff01\uff1f]+""")
_last_word = re.compile(r"""[^\s("']*$""")
_ABBREVIATIONS = """
    al. approx. art. bros. ca. cap. capt. cf. ch. col. cpl. dept. dr. ed. eds. eq. esp. est. ex. fig. figs. fr.
    gen. gov. hon. lt. maj. messrs. misc. mr. mrs. ms. mt. nr. op. orig. pp. pres. prof. pvt. rep. rev.
    sec. sen. sgt. sr. st. vol. vols. vs. e.g. i.e. viz.
"""
_abbreviations = frozenset(_ABBREVIATIONS.split())
"""Never the end of a sentence."""
_ENDINGS = "a.m. p.m. etc. co. corp. inc. ltd. jr. u.s. u.k. u.n. b.c. a.d. ph.d. jan. feb. mar. apr. jun. jul. aug. sep. sept. oct. nov. dec. no."
_may_end = frozenset(_ENDINGS.split())
"""The end of a sentence only where a capital letter follows."""
_initials = re.compile(r"(?:[^\W\d_]\.)+")
MAX_UNIT_CHARS = 500
"""A longer sentence or line is cut at a space, so that a memory can hold a part of it."""
_word = re.compile(r"\w+")
_COMMON = """
    a an and are as at be by did do does for from had has have he her his how i in is it its of on or
    she that the their them they this to was were what when where which who whom whose why will with
    you your
"""
_common_words = frozenset(_COMMON.split())


class ScriptedEngine(BaseEngine):
    """Replies from a script: a list of replies in order, or a function of the prompt."""

    runs_here = True

    def __init__(
        self, script: Script | Sequence[str], *, model: str = "scripted", keeps_prompts: bool = True
    ) -> None:
        self.model = model
        self.tokenizer = "estimate"
        self.prompts: list[list[Message]] = []
        """Every prompt it was given, in order, if it keeps them."""
        self._keeps_prompts = keeps_prompts
        self._script = script if callable(script) else _from_list(script)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The script's reply to these messages."""
        if self._keeps_prompts:
            self.prompts.append(list(messages))
        text = self._script(messages, sampling)
        usage = Usage(
            calls=1,
            prompt_tokens=sum(_count(message["content"]) for message in messages),
            completion_tokens=_count(text),
        )
        return Completion(text=text, finish_reason="stop", usage=usage)

    async def aclose(self) -> None:
        """Nothing to free."""


def open_scripted(model: str) -> ScriptedEngine:
    """`scripted` for the keyword rule, `scripted:FILE` for a JSON list of replies. It keeps no prompts: a server
    may run for long."""
    if not model:
        return ScriptedEngine(keyword_reply, keeps_prompts=False)
    try:
        replies = json.loads(Path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the scripted replies in {model}: {error}") from None
    if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
        raise ConfigError(f"{model} must hold a JSON list of strings")
    return ScriptedEngine(replies, model=f"scripted:{model}", keeps_prompts=False)


def keyword_reply(messages: Sequence[Message], sampling: Sampling) -> str:
    """Keep the sentences that share most words with the question; answer with the best of them."""
    prompt = messages[-1]["content"]
    found_blocks = _block.findall(prompt)
    blocks = {name: text.strip() for name, text in found_blocks}
    notes = [line for name, text in found_blocks if name == "note" for line in text.splitlines()]
    wanted = _words(blocks.get("question", ""))
    remembered = [line for line in blocks.get("memory", "").splitlines() if line != "(empty)"]
    if "section" not in blocks and not notes:
        if not remembered:
            return "The text does not tell."
        answer = remembered[0]
        quotes = (
            match[1] for line in remembered if answer in line and (match := _quoted.match(line))
        )
        number = next(quotes, None)
        return f"{answer}\nSources: {number}" if number else answer
    units = [*notes, *text_units(blocks.get("section", ""))]
    found = [unit for unit in units if _words(unit) & wanted]
    ranked = sorted(dict.fromkeys(remembered + found), key=lambda unit: -len(_words(unit) & wanted))
    sizes = accumulate(len(unit) + 1 for unit in ranked)
    most = min(sampling.max_tokens * 3, 1000) + 1
    memory = "\n".join(unit for unit, size in zip(ranked, sizes, strict=True) if size <= most)
    if "<quote>" not in prompt:
        return memory
    kept = [unit for unit in found if unit in memory.splitlines()]
    return "\n".join([*(f"<quote>{unit}</quote>" for unit in kept), memory])


def text_units(text: str) -> Iterator[str]:
    """The sentences of prose, and the lines of logs, lists and tables.

    >>> list(text_units("Dr. Lund paid 3.50 crowns. She left."))
    ['Dr. Lund paid 3.50 crowns.', 'She left.']
    >>> list(text_units("02:14 ERROR disk full\\n02:15 INFO retry"))
    ['02:14 ERROR disk full', '02:15 INFO retry']
    """
    for block in _blank_line.split(text):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        num_records = sum(_record.match(line) is not None for line in lines)
        is_list = len(lines) > 1 and num_records >= MIN_RECORDS * len(lines)
        units = lines if is_list else _sentences(" ".join(" ".join(lines).split()))
        for unit in units:
            yield from textwrap.wrap(unit, MAX_UNIT_CHARS) if len(unit) > MAX_UNIT_CHARS else [unit]


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in _end.finditer(text):
        if not _is_abbreviated(text, start, end):
            yield text[start : end.end()].strip()
            start = end.end()
    if rest := text[start:].strip():
        yield rest


def _is_abbreviated(text: str, start: int, end: re.Match[str]) -> bool:
    """Whether a full stop belongs to the word before it and ends no sentence."""
    if end[0] != ".":
        return False
    last = _last_word.search(text, max(start, end.start() - 20), end.start())
    word = f"{last[0] if last else ''}.".casefold()
    follows = text[end.end() : end.end() + 2].strip()
    if not follows:
        return False
    if word in _may_end:
        return not follows[0].isupper()
    return word in _abbreviations or _initials.fullmatch(word) is not None


def _words(text: str) -> set[str]:
    return set(_word.findall(text.lower())) - _common_words


def _count(text: str) -> int:
    return len(_word.findall(text))


def _from_list(replies: Sequence[str]) -> Script:
    remaining: Iterator[str] = iter(replies)

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        reply = next(remaining, None)
        if reply is None:
            raise EngineError(f"the script has only {len(replies)} replies; add more")
        return reply

    return script
