"""Counting tokens as the model does: Hugging Face and tiktoken tokenizers, bytes, or an estimate.

    open_tokenizer("Qwen/Qwen2.5-7B-Instruct")   from the hub (or its cache)
    open_tokenizer("./my-model")                 a folder or a tokenizer.json
    open_tokenizer("tiktoken:o200k_base")        a tiktoken encoding, or a model tiktoken knows
    open_tokenizer("bytes")                      one token per UTF-8 byte
    open_tokenizer("estimate")                   no tokenizer: a cautious estimate, marked as such

`open_tokenizer` fails with a clear error; `tokenizer_for_model` never does: where the model's own
tokenizer is not available it gives the estimate, with the reason.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memagent.errors import ConfigError, EngineRefused, one_line
from memagent.foreign import check_tokenizer, foreign_file
from memagent.tokens.control import ControlTokens
from memagent.tokens.templates import ChatTemplate
from memagent.types import Message

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

UNKNOWN_TEMPLATE_TOKENS = 64
"""Allowance for a chat template we cannot see: role marks and a short default system prompt."""
NOT_NAMED = "the endpoint chose the model, and what it names is not on this machine; name one with `tokenizer`"
OPENAI_TOKENS_PER_MESSAGE = 4
OPENAI_TOKENS_PER_REPLY = 3


class Measured(Protocol):
    """A text with its tokens located."""

    num_tokens: int

    def end_of(self, num_tokens: int) -> int:
        """Length in characters of the longest prefix that has at most so many tokens."""
        ...

    def tokens_before(self, position: int) -> int:
        """Tokens that begin before a character position."""
        ...


class Tokenizer(Protocol):
    """What reading needs of a tokenizer."""

    name: str
    """What was opened; part of a run's identity, because it decides where sections end."""
    is_exact: bool
    """False for the estimate, whose counts carry a safety margin."""
    knows_template: bool
    """True when `count_messages` counts the model's own chat template, not an allowance."""

    def count(self, text: str) -> int:
        """Tokens in a text."""
        ...

    def measure(self, text: str) -> Measured:
        """The text with its tokens located."""
        ...

    def count_messages(self, messages: Sequence[Message]) -> int:
        """Tokens of a whole prompt, chat template and reply header included."""
        ...


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` means. Raises ConfigError when it is not available."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "estimate":
        return EstimatingTokenizer()
    if name.startswith("tiktoken:"):
        return TiktokenTokenizer(name.removeprefix("tiktoken:"))
    path = Path(name).expanduser()
    if path.exists():
        return HuggingFaceTokenizer.from_path(path, name)
    if _is_known_to_tiktoken(name):
        return TiktokenTokenizer(name)
    return HuggingFaceTokenizer.from_hub(name)


def tokenizer_for_model(model: str) -> tuple[Tokenizer, str | None]:
    """The model's own tokenizer, else the estimate and why it has to do."""
    if not model:
        return EstimatingTokenizer(), NOT_NAMED
    try:
        return open_tokenizer(model), None
    except ConfigError as error:
        return EstimatingTokenizer(), str(error)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, with the chat template that lies beside it."""

    is_exact = True

    def __init__(self, file: Path, name: str) -> None:
        self.name = name
        self._file = file
        check_tokenizer(file)
        self._template = _template_of(file.parent, name)
        self.knows_template = self._template is not None
        import tokenizers

        with foreign_file(file, "is not a tokenizer"):
            self._backend = tokenizers.Tokenizer.from_file(str(file))
        self._backend.no_truncation()  # some published files truncate or pad, and a count must not
        self._backend.no_padding()

    @classmethod
    def from_path(cls, path: Path, name: str) -> HuggingFaceTokenizer:
        """From a folder, or from a tokenizer.json itself."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{path} holds no tokenizer.json; name a folder that does")
        return cls(file, name)

    @classmethod
    def from_hub(cls, repository: str) -> HuggingFaceTokenizer:
        """From the Hugging Face hub, or from its cache on this machine."""
        from huggingface_hub import (
            get_hf_file_metadata,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError

        try:
            if not isinstance(try_to_load_from_cache(repository, "tokenizer.json"), str):
                # fails at once where the download would try again for 23 s
                get_hf_file_metadata(hf_hub_url(repository, "tokenizer.json"), timeout=5)
            file = hf_hub_download(repository, "tokenizer.json", etag_timeout=5)
        except HFValidationError:
            raise ConfigError(
                f"no tokenizer is known for {repository!r}; name one with `tokenizer` "
                "(a folder, a hub id, tiktoken:NAME or estimate)"
            ) from None
        except EntryNotFoundError:
            raise ConfigError(f"{repository} on the hub has no tokenizer.json") from None
        except Exception as error:  # network, proxy, certificate, access: many types
            raise ConfigError(
                f"the tokenizer of {repository!r} cannot be fetched from the hub ({type(error).__name__})"
            ) from None
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            _download_if_present(repository, name)
        folder = Path(file).parent
        return cls.from_path(folder, repository)

    def count(self, text: str) -> int:
        try:
            if self.control.are_in(text):
                return len(self.control.encode_text(text))
            return len(self._ids(text))
        except BaseException:
            with self._guard():  # only now: it takes as long as counting a short text
                raise

    def measure(self, text: str) -> Measured:
        with self._guard():
            has_control = self.control.are_in(text)
            encode = self.control.encoding_of_text if has_control else self._encode
            return _HuggingFaceMeasured(encode(text), len(text))

    def count_messages(self, messages: Sequence[Message]) -> int:
        if self._template is None:
            return _allowance(messages, self.count)
        return len(self.prompt_ids(messages))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the chat template. Control strings in the messages are text."""
        if not self.control.are_in_messages(messages):
            return self.encode(self.rendered(messages))
        shielded, mark = self.control.shielded(messages)
        rendered = self.rendered(shielded)
        with self._guard():
            return self.control.encode_rendered(rendered, mark)

    def rendered(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        """A conversation in the chat template; with `is_open`, ready for a reply."""
        assert self._template is not None, "only a tokenizer with a template knows conversations"
        return self._template.render(messages, is_open=is_open)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it; control strings are control tokens."""
        with self._guard():
            return self._ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, without special tokens."""
        with self._guard():
            return self._backend.decode(list(ids), skip_special_tokens=True)

    def _guard(self) -> AbstractContextManager[None]:
        return foreign_file(self._file, "cannot encode this text")

    @cached_property
    def control(self) -> ControlTokens:
        """Its control tokens."""
        return ControlTokens.of_file(self._file)

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode(self, text: str) -> tokenizers.Encoding:
        # encode_batch, unlike encode, lets other threads run meanwhile
        return self._backend.encode_batch([text], add_special_tokens=False)[0]


class ModelTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model on this machine. What it cannot do is the fault of a request, and no path is named."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / "tokenizer.json", name)

    def rendered(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        try:
            return super().rendered(messages, is_open=is_open)
        except ConfigError as error:
            raise EngineRefused(str(error)) from None

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a plain text, including those that the tokenizer adds."""
        with self._guard():
            return self._backend.encode_batch([text])[0].ids

    def token_text(self, token_id: int) -> str:
        """The text of one token, special tokens included; U+FFFD for parts of a character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token."""
        return max(map(len, self._backend.get_vocab()))

    def _guard(self) -> AbstractContextManager[None]:
        return foreign_file(self.name, "has a tokenizer that fails", error=EngineRefused)


class _HuggingFaceMeasured:
    def __init__(self, encoding: tokenizers.Encoding, num_chars: int) -> None:
        self.num_tokens = len(encoding)
        self._encoding = encoding
        self._num_chars = num_chars

    def end_of(self, num_tokens: int) -> int:
        # a character of several tokens gives them all the same start, so starts never split one
        return self._num_chars if num_tokens >= self.num_tokens else self._start(num_tokens)

    def tokens_before(self, position: int) -> int:
        return bisect_left(range(self.num_tokens), position, key=self._start)

    def _start(self, token: int) -> int:
        span = self._encoding.token_to_chars(token)
        assert span is not None, "only special tokens have no place in the text, and none are added"
        return span[0]


class TiktokenTokenizer:
    """A tiktoken encoding, by its own name or by a model's."""

    is_exact = True
    knows_template = True

    def __init__(self, name: str) -> None:
        self.name = f"tiktoken:{name}"
        self._encoding = _open_tiktoken(name)

    def count(self, text: str) -> int:
        return len(self._encoding.encode_ordinary(text))

    def measure(self, text: str) -> Measured:
        return _TiktokenMeasured(self._encoding, text)

    def count_messages(self, messages: Sequence[Message]) -> int:
        counts = (
            OPENAI_TOKENS_PER_MESSAGE + self.count(message["content"]) for message in messages
        )
        return sum(counts) + OPENAI_TOKENS_PER_REPLY


class _TiktokenMeasured:
    def __init__(self, encoding: tiktoken.Encoding, text: str) -> None:
        self._encoding = encoding
        self._text = text
        self._ids = encoding.encode_ordinary(text)
        self.num_tokens = len(self._ids)

    def end_of(self, num_tokens: int) -> int:
        prefix = self._encoding.decode_bytes(self._ids[:num_tokens])
        return len(prefix.decode("utf-8", "ignore"))  # drops a character that the limit splits

    def tokens_before(self, position: int) -> int:
        return len(self._encoding.encode_ordinary(self._text[:position]))


class ByteTokenizer:
    """One token per UTF-8 byte: for byte-level models, and for tests that count by hand."""

    name = "bytes"
    is_exact = True
    knows_template = False

    def count(self, text: str) -> int:
        return len(text.encode())

    def measure(self, text: str) -> Measured:
        costs = [1] * len(text) if text.isascii() else [len(char.encode()) for char in text]
        return _CostsMeasured(range(1, len(text) + 1), costs)

    def count_messages(self, messages: Sequence[Message]) -> int:
        return _allowance(messages, self.count)


class EstimatingTokenizer:
    """A cautious estimate for models whose tokenizer is not available.

    Words, digits, marks and scripts are priced a little above what common tokenizers need, then a
    margin is added: sections come out somewhat short, never too long.
    """

    name = "estimate"
    is_exact = False
    knows_template = False

    MARGIN = 1.15
    COMMON_WORD_CHARS = 6
    """Words up to this length, space included, are taken for one token; longer ones are rarer."""
    # A word with its space, a digit, a run of spaces, a newline, any other single character.
    _piece = re.compile(r"[ ]?[A-Za-z]+|[0-9]|[ \t]+|.", re.DOTALL)

    def count(self, text: str) -> int:
        return self.measure(text).num_tokens

    def measure(self, text: str) -> Measured:
        ends: list[int] = []
        costs: list[float] = []
        for match in self._piece.finditer(text):
            ends.append(match.end())
            costs.append(self._cost(match.group()) * self.MARGIN)
        return _CostsMeasured(ends, costs)

    def count_messages(self, messages: Sequence[Message]) -> int:
        return _allowance(messages, self.count)

    def _cost(self, piece: str) -> float:
        if not piece.isascii():
            return max(1.0, len(piece.encode()) * 0.6)
        if piece[-1].isalpha():
            return 1 + max(len(piece) - self.COMMON_WORD_CHARS, 0) / 3
        if piece.isspace():
            return 1 + (len(piece) - 1) / 8
        return 1.0


class _CostsMeasured:
    """Pieces of text that end at `ends` and cost `costs` tokens each."""

    def __init__(self, ends: Sequence[int], costs: Sequence[float]) -> None:
        self._ends = ends
        self._totals = list(accumulate(costs))
        self.num_tokens = math.ceil(self._totals[-1]) if costs else 0

    def end_of(self, num_tokens: int) -> int:
        count = bisect_right(self._totals, num_tokens)
        return self._ends[count - 1] if count else 0

    def tokens_before(self, position: int) -> int:
        count = bisect_right(self._ends, position)
        return math.ceil(self._totals[count - 1]) if count else 0


def _template_of(folder: Path, name: str) -> ChatTemplate | None:
    """The chat template in a tokenizer's folder; None when it has none."""
    file = folder / "chat_template.jinja"
    with foreign_file(folder, "has a broken chat template"):
        settings = _read_json(folder / "tokenizer_config.json")
        source = (
            file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        )
        if isinstance(source, list):  # several named templates: the default one is for chat
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            return None
        special = {
            name: text
            for name, value in settings.items()
            if name.endswith("_token") and (text := _token_text(value)) is not None
        }
        return ChatTemplate(source, special, name=name)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}") from None
    return contents if isinstance(contents, dict) else {}


def _download_if_present(repository: str, name: str) -> None:
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(repository, name, etag_timeout=5)
    except Exception:  # optional file: without it the template is an allowance, and we say so
        return


def _is_known_to_tiktoken(model: str) -> bool:
    import tiktoken

    try:
        tiktoken.encoding_name_for_model(model)
    except KeyError:
        return False
    return True


def _open_tiktoken(name: str) -> tiktoken.Encoding:
    import tiktoken

    try:
        if name in tiktoken.list_encoding_names():
            return tiktoken.get_encoding(name)
        return tiktoken.encoding_for_model(name)
    except KeyError:
        known = ", ".join(tiktoken.list_encoding_names())
        raise ConfigError(
            f"tiktoken knows no encoding or model {name!r}; encodings: {known}"
        ) from None
    except Exception as error:  # its download raises whatever its HTTP library raises
        raise ConfigError(
            f"the tiktoken encoding of {name!r} cannot be fetched ({type(error).__name__})"
        ) from None


def _allowance(messages: Sequence[Message], count: Callable[[str], int]) -> int:
    return sum(count(message["content"]) for message in messages) + UNKNOWN_TEMPLATE_TOKENS
