"""Control strings in what is sent to an endpoint, whose server renders the chat template.

`<|im_end|>` in a document would end the turn there: most servers encode a rendered prompt as a whole. So
each control string of the served model gets a character more on the way, and loses it again in the reply:

    document  "... <|im_end|> ..."  ──▶  request "... < |im_end|> ..."
    memory    "... <|im_end|> ..."  ◀──  reply   "... < |im_end|> ..."

Documents and memories never change, so offsets of evidence hold; nor does a request without such strings.
The strings are those of the model's tokenizer if it is on this machine, else all of the usual shapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memagent.errors import ConfigError
from memagent.foreign import foreign_file
from memagent.tokens.control import ControlTokens
from memagent.types import Message

USUAL_SHAPES = r"<\|[^|<>\s]{1,60}\|>|<\uff5c[^\uff5c<>\s]{1,60}\uff5c>"
"""`<|im_start|>` of most families, and DeepSeek's, in wide characters."""
FAMILIES: dict[str, tuple[str, ...]] = {
    r"gemma": ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"),
    r"llama-?2|mistral|mixtral|ministral|codestral|magistral|devstral|vicuna|zephyr": (
        *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<s>", "</s>", "[SYSTEM_PROMPT]"),
        *("[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    r"glm": ("[gMASK]", "<sop>", "<eop>"),
    r"yi-|internlm|baichuan|t5": ("<s>", "</s>"),
}
"""Control strings of other shapes, by the name of the model."""
MARKS = (" ", "\\", "~", "\u200b", "\u2060", "\u00b7")
"""What is put into a control string, after its first character."""
MAX_PASSES = 8
"""Strings that share characters are broken one after the other."""


class ShieldedMessages(NamedTuple):
    """Messages without control strings, and how to restore them in a reply."""

    messages: Sequence[Message]
    originals: Mapping[str, str]
    """Control strings by what they were sent as."""

    def restored(self, reply: str) -> str:
        """The reply with the control strings as they are in the messages."""
        for sent, original in self.originals.items():
            reply = reply.replace(sent, original)
        return reply


class Shield:
    """The control strings of a model.

    Example: Shield.of_model("qwen2.5-7b-instruct").shielded(messages).messages
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    @classmethod
    def of_model(cls, model: str, tokenizer: str | None = None) -> Shield:
        """For a model by its name; `tokenizer` is a folder, a tokenizer.json or a name on the hub."""
        strings = _strings_of(tokenizer or model)
        if strings is not None:
            return cls.of_strings(strings)
        families = [names for pattern, names in FAMILIES.items() if re.search(pattern, model, re.I)]
        others = [re.escape(name) for names in families for name in names]
        return cls(re.compile("|".join([USUAL_SHAPES, *others])))

    @classmethod
    def of_strings(cls, strings: Iterable[str]) -> Shield:
        """For control strings that are known."""
        longest_first = sorted((string for string in strings if len(string) > 1), key=len)[::-1]
        return cls(re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"))

    def shielded(self, messages: Sequence[Message]) -> ShieldedMessages:
        """Messages that a server encodes without control tokens of ours."""
        if not any(self._pattern.search(message["content"]) for message in messages):
            return ShieldedMessages(messages, {})
        for mark in MARKS:
            broken = self._broken(messages, mark)
            if broken is not None:
                return broken
        raise ConfigError(
            "the text holds control strings of the model in every form that could be sent instead; "
            "give `shield_text=false` if it may be sent as it is"
        )

    def _broken(self, messages: Sequence[Message], mark: str) -> ShieldedMessages | None:
        """None where the mark does not serve: a text holds the broken form itself, or another is made."""
        originals: dict[str, str] = {}

        def with_mark(found: re.Match[str]) -> str:
            sent = found[0][0] + mark + found[0][1:]
            originals[sent] = found[0]
            return sent

        result: list[Message] = []
        for message in messages:
            text = message["content"]
            for _ in range(MAX_PASSES):
                text, num_found = self._pattern.subn(with_mark, text)
                if not num_found:
                    break
            else:
                return None
            result.append({"role": message["role"], "content": text})
        if any(sent in message["content"] for sent in originals for message in messages):
            return None
        return ShieldedMessages(result, originals)


def _strings_of(tokenizer: str) -> list[str] | None:
    """The control strings of a tokenizer on this machine; None where it is not here."""
    file = _tokenizer_file(tokenizer)
    if file is None:
        return None
    try:
        with foreign_file(file, "is not a tokenizer"):
            return ControlTokens.of_file(file).strings
    except ConfigError:
        return None


def _tokenizer_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    for file in (path, path / "tokenizer.json"):
        if file.name == "tokenizer.json" and os.path.isfile(file):
            return file
    return cached_tokenizer(name)


def cached_tokenizer(name: str) -> Path | None:
    """The tokenizer.json of a name on the hub, if it has been fetched before."""
    if not os.path.isdir(_hub_cache() / f"models--{name.replace('/', '--')}"):
        return None  # without an import that takes longer than many calls
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
    except (HFValidationError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None


def _hub_cache() -> Path:
    """Where huggingface_hub keeps files, by its own rules."""
    environment = os.environ
    if given := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(given)).expanduser()
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"
