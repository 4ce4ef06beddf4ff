"""An engine without a model: replies come from a list or a function. For tests, docs and demos.

`scripted` alone replies by `keyword_reply`, a rule that reads our default prompts and keeps the
sentences that share most words with the question: enough to see the loop at work, and no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, EngineError
from memagent.types import Completion, Message, Sampling, Usage

Script = Callable[[Sequence[Message], Sampling], str]

_block = re.compile(r"<(question|section|memory)(?: [^>]*)?>\n?(.*?)\n?</\1>", re.DOTALL)
_sentence = re.compile(r"[^.!?\n]+[.!?]*")
_word = re.compile(r"\w+")
_COMMON = """
    a an and are as at be by did do does for from had has have he her his how i in is it its of on or
    she that the their them they this to was were what when where which who whom whose why will with
    you your
"""
_common_words = frozenset(_COMMON.split())


class ScriptedEngine(BaseEngine):
    """Replies from a script: a list of replies in order, or a function of the prompt."""

    def __init__(self, script: Script | Sequence[str], *, model: str = "scripted") -> None:
        self.model = model
        self.tokenizer = "estimate"
        self.prompts: list[list[Message]] = []
        """Every prompt it was given, in order."""
        self._script = script if callable(script) else _from_list(script)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The script's reply to these messages."""
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
    """`scripted` for the keyword rule, `scripted:FILE` for a JSON list of replies."""
    if not model:
        return ScriptedEngine(keyword_reply)
    try:
        replies = json.loads(Path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the scripted replies in {model}: {error}") from None
    if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
        raise ConfigError(f"{model} must hold a JSON list of strings")
    return ScriptedEngine(replies, model=f"scripted:{model}")


def keyword_reply(messages: Sequence[Message], sampling: Sampling) -> str:
    """Keep the sentences that share most words with the question; answer with the best of them."""
    blocks = {name: text.strip() for name, text in _block.findall(messages[-1]["content"])}
    wanted = _words(blocks.get("question", ""))
    remembered = [line for line in blocks.get("memory", "").splitlines() if line != "(empty)"]
    if "section" not in blocks:
        return remembered[0] if remembered else "The text does not tell."
    text = " ".join(blocks["section"].split())
    sentences = [match.strip() for match in _sentence.findall(text)]
    ranked = sorted(
        dict.fromkeys(
            remembered + [sentence for sentence in sentences if _words(sentence) & wanted]
        ),
        key=lambda sentence: -len(_words(sentence) & wanted),
    )
    return _first_that_fit(ranked, max_chars=min(sampling.max_tokens * 3, 1000))


def _first_that_fit(lines: list[str], *, max_chars: int) -> str:
    kept: list[str] = []
    for line in lines:
        if sum(len(other) + 1 for other in kept) + len(line) > max_chars:
            break
        kept.append(line)
    return "\n".join(kept)


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
