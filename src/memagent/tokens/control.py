"""Text never becomes control tokens: `<|im_end|>` in a document is ten characters, not the end of a turn.

A chat template writes control tokens such as `<|im_start|>` into a prompt, and a tokenizer finds them
wherever their strings are. Those in the contents of messages are text and are encoded as text:

    shield     put a mark that no message has between the characters of control strings in the contents
    render     the chat template, whose own control strings have no marks
    encode     rename the template's control strings to names that nobody can guess, remove the marks, and
               encode the whole with a copy of the tokenizer that knows only the new names

Messages without control strings are encoded as ever, and so is the rest of a prompt with some.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memagent.errors import ConfigError
from memagent.foreign import foreign_file
from memagent.types import Message

if TYPE_CHECKING:
    import tokenizers

MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use, which no template contains."""
ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')
START_BYTES = 1 << 17
"""How much of a tokenizer.json is read at first."""
CONTROL_SHAPE = re.compile(r"<\|.*\|>", re.DOTALL)
"""Control tokens that some files do not call special."""


class AddedString(NamedTuple):
    """A string that a tokenizer looks for before it splits a text."""

    content: str
    is_special: bool
    is_normalized: bool
    """Whether it is looked for in the normalised text."""


class ControlTokens:
    """The control tokens of a tokenizer, and how to encode texts that contain their strings.

    Example: ControlTokens.of_file(Path("tokenizer.json")).are_in("a <|im_end|> b")
    """

    def __init__(self, added: Iterable[AddedString], source: Callable[[], str]) -> None:
        """`source` returns the tokenizer.json. It is called when the first control string is met."""
        control = [one for one in added if one.is_special or CONTROL_SHAPE.fullmatch(one.content)]
        self.strings = sorted({one.content for one in control if one.content}, key=len)[::-1]
        """Longest first, as tokenizers look for them."""
        self._pattern = re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")
        pairs = zip(min(self.strings, default=""), max(self.strings, default=""), strict=False)
        self._prefix = "".join(
            char for char, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
        )
        """Found much faster than the pattern, and most texts do not have it."""
        self._is_normalized = any(one.is_normalized for one in control)
        self._source = source

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> ControlTokens:
        """Those of an open tokenizer."""
        added = backend.get_added_tokens_decoder().values()
        return cls(
            [AddedString(one.content, one.special, one.normalized) for one in added], backend.to_str
        )

    @classmethod
    def of_file(cls, file: Path) -> ControlTokens:
        """Those of a tokenizer.json."""
        return cls(
            [
                AddedString(entry["content"], bool(entry["special"]), bool(entry["normalized"]))
                for entry in _added_tokens(file)
            ],
            lambda: file.read_text(encoding="utf-8"),
        )

    def are_in(self, text: str) -> bool:
        """Whether a text contains a control string."""
        if self._prefix in text and self._pattern.search(text):
            return True
        return self._is_normalized and not text.isascii() and self._are_in_normalized(text)

    def are_in_messages(self, messages: Sequence[Message]) -> bool:
        """Whether a role or a content of a conversation contains a control string."""
        return any(
            self.are_in(text)
            for message in messages
            for text in (message["role"], message["content"])
        )

    def shielded(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """Messages in which a mark breaks the control strings, and the mark."""
        taken = {char for message in messages for char in message["content"] + message["role"]}
        mark = next(char for char in map(chr, MARKS) if char not in taken)
        broken: list[Message] = [
            {
                "role": self._broken(message["role"], mark),
                "content": self._broken(message["content"], mark),
            }
            for message in messages
        ]
        return broken, mark

    def encode_rendered(self, rendered: str, mark: str) -> list[int]:
        """The tokens of a conversation that was shielded and rendered."""
        renamed = self._pattern.sub(lambda found: self._copy.names[found[0]], rendered)
        return self._copy.ids(renamed.replace(mark, ""))

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text, none of which is a control token."""
        return self._copy.ids(text)

    def encoding_of_text(self, text: str) -> tokenizers.Encoding:
        """The tokens of a text with their places; ids are those of a copy of the tokenizer."""
        return self._copy.encoding(text)

    def _broken(self, text: str, mark: str) -> str:
        text = self._pattern.sub(lambda found: _marked(found[0], mark), text)
        if self._is_normalized and not text.isascii() and self._are_in_normalized(text):
            text = _marked(text.replace(mark, ""), mark)
        return text

    def _are_in_normalized(self, text: str) -> bool:
        normalizer = self._copy.tokenizer.normalizer
        return normalizer is not None and bool(self._pattern.search(normalizer.normalize_str(text)))

    @cached_property
    def _copy(self) -> _RenamedTokenizer:
        return _RenamedTokenizer(json.loads(self._source()), self.strings)


class _RenamedTokenizer:
    """A copy of a tokenizer whose control tokens have random names."""

    def __init__(self, description: dict[str, Any], strings: Sequence[str]) -> None:
        import tokenizers

        secret = secrets.token_hex(16)
        start, end = chr(MARKS[-2]), chr(MARKS[-1])
        self.names = {
            string: f"{start}{secret}{number}{end}" for number, string in enumerate(strings)
        }
        entries = description["added_tokens"]
        renamed = [
            {**entry, "content": self.names.get(entry["content"], entry["content"])}
            for entry in entries
        ]
        copy = {
            **description,
            "added_tokens": renamed,
            "post_processor": None,  # it names control tokens, and adds tokens that are not wanted
            "truncation": None,
            "padding": None,
        }
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(copy))
        self._own_ids = {
            self.tokenizer.token_to_id(new["content"]): int(old["id"])
            for old, new in zip(entries, renamed, strict=True)
        }
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        unknown = _unknown_token(description["model"])  # stands for characters, not for its string
        self._spelt = {
            vocabulary[string]: string
            for string in strings
            if string in vocabulary and string != unknown
        }
        """Control strings that the vocabulary has: some models find them without being told to."""

    def encoding(self, text: str) -> tokenizers.Encoding:
        # encode_batch, unlike encode, lets other threads run meanwhile
        return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        for token in self.encoding(text).ids:
            string = self._spelt.get(token)
            if string is None:
                found.append(self._own_ids.get(token, token))
            else:
                found += [part for char in string for part in self.encoding(char).ids]
        return found


def _unknown_token(model: dict[str, Any]) -> str | None:
    """The token for characters that the vocabulary does not have."""
    number = model.get("unk_id")
    token: str | None = model.get("unk_token") if number is None else model["vocab"][number][0]
    return token


def _marked(text: str, mark: str) -> str:
    return "".join(char + mark for char in text)


def _added_tokens(file: Path) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json, without reading its vocabulary where they come first."""
    with file.open("rb") as stream:
        start = stream.read(START_BYTES).decode("utf-8", "ignore")
    found = ADDED_TOKENS.search(start, 0, 1000)
    if found is not None:
        with suppress(ValueError):  # the list is longer than the start
            return json.JSONDecoder().raw_decode(start, found.end())[0] or []
    return json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []


# --- control strings in what is sent to an endpoint, whose server renders the chat template ---------

# `<|im_end|>` in a document would end the turn there: most servers encode a rendered prompt as a whole. So each control
# string of the served model gets a character more on the way, and loses it again in the reply:
#
#     document  "... <|im_end|> ..."  ──▶  request "... < |im_end|> ..."
#     memory    "... <|im_end|> ..."  ◀──  reply   "... < |im_end|> ..."
#
# Documents and memories never change, so offsets of evidence hold; nor does a request without such strings. The strings
# are those of the model's tokenizer if it is on this machine, else all of the usual shapes.


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
BREAKS = (" ", "\\", "~", "\u200b", "\u2060", "\u00b7")
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
        for mark in BREAKS:
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
