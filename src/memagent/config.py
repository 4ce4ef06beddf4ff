"""Settings: strict, frozen, documented under each field, with errors a user can act on.

Every settings class derives from `Settings`. The string under a field is also its help text on the
command line, so a setting is described in one place only. Configs that come with the package have names: a wheel has
them in memagent/configs, a clone in its folder configs.

    find_config("train", "tiny_cpu")      .../configs/train/tiny_cpu.toml
    find_config("train", "mine.toml")     mine.toml
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from memagent.errors import ConfigError
from memagent.names import hint, nearest
from memagent.types import Prices, Sampling

SectionEnds = Literal["natural", "exact"]
EmptyReplies = Literal["keep", "overwrite"]
ReadingOrder = Literal["text", "relevance"]
QuoteSource = Literal["asked", "copied"]
NoteSource = Literal["asked", "memories"]


ReadingMode = Literal["in_order", "parallel"]
LocalRuntime = Literal["llama.cpp", "torch"]
USUAL_WINDOW = 8192


MAX_REAL, MAX_WHOLE = 1e9, (1 << 63) - 1
"""Largest numbers that somebody can mean: a timeout of 31 years, and what fits 64 bits."""


def sensible_number(value: Any) -> Any:
    """A setting or an option as it is. Raises ValueError for NaN, infinity and larger numbers than are meant, also in lists."""
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            sensible_number(one)
    limit = MAX_WHOLE if isinstance(value, int) else MAX_REAL
    if isinstance(value, int | float) and not abs(value) <= limit:
        raise ValueError(f"must be a finite number of at most {limit:,.0f}")
    return value


def check_numbers(**values: float | None) -> None:
    """Raise ConfigError for arguments that must be sensible numbers from 0 on, where they are given."""
    for name, value in values.items():
        if value is not None and not 0 <= value <= MAX_REAL:
            raise ConfigError(f"`{name}={value}` must be a finite number, at least 0")


LONGEST = 1_000_000_000
"""Tokens of a text that is made or planned, and examples of a dataset, at most."""
MOST = 1_000_000
"""The highest count of things that are held in memory one by one."""


class FileRecord(BaseModel):
    """A record as a file has it: unknown keys are errors, values never change after creation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_sensible(cls, value: Any) -> Any:
        return sensible_number(value)

    @classmethod
    def parse(cls, values: dict[str, Any], *, changes: Sequence[str] = ()) -> Self:
        """Check values, with `changes` such as `optim.lr=2e-6` applied.

        Raises a one-line ConfigError that names the setting and the remedy.
        """
        for change in changes:
            values = with_override(values, change)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error, cls)) from None

    @classmethod
    def read(cls, path: Path, what: str, *, changes: Sequence[str] = ()) -> Self:
        """The settings in a TOML file, with `changes` applied; errors call the file `what`."""
        values = read_toml(path, what)
        try:
            return cls.parse(values, changes=changes)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


class Settings(FileRecord):
    """Base of all settings; each is documented under its field."""

    @classmethod
    def help(cls, name: str) -> str:
        """The help text of a field: its docstring, on one line."""
        description = cls.model_fields[name].description
        assert description is not None, f"{cls.__name__}.{name} has no docstring"
        return " ".join(description.split())


class AgentConfig(Settings):
    """How the text is read: the mode, the window and its parts, the prompts, the sampling."""

    mode: ReadingMode = "in_order"
    """How sections are read: in_order, one after the other with a memory that is rewritten, or parallel, all
    at once, with notes on them merged into a memory."""
    rounds: int = Field(default=3, ge=1)
    """Maximum number of rounds in parallel mode. Another round runs only if the memory says what is missing."""
    notes: NoteSource = "asked"
    """In parallel mode: prompts of their own ask for notes and merge them (asked); or
    sections are read with the prompts of reading in order, and the lines of their memories are put together
    without a call (memories), for models that were trained to read in order only."""
    window: int = Field(default=USUAL_WINDOW, ge=64)
    """Tokens the model can see at once: question, section, memory, reply and template together."""
    chunk_tokens: int = Field(default=5000, ge=16)
    """Tokens of text per section; fewer where a window below 8192 is set, as for the two sizes below."""
    section_ends: SectionEnds = "natural"
    """Where sections end: at a paragraph, sentence or word near the limit (natural), or after exactly
    chunk_tokens tokens of the whole text, wherever that falls (exact)."""
    memory_tokens: int = Field(default=1024, ge=8)
    """Tokens of memory carried from section to section; also the limit of each memory reply."""
    empty_replies: EmptyReplies = "keep"
    """What an empty reply to a section does: keep the memory as it is, or overwrite it with nothing."""
    answer_tokens: int = Field(default=1024, ge=1)
    """Upper limit of tokens in the answer."""
    reasoning_tokens: int = Field(default=0, ge=0)
    """Tokens added to the limit of every reply, for models that reason before they answer."""
    prompts: str = "default"
    """Prompt set: default, boxed, paper, keep, add, shared, small, compact, compact_add, or the path of a TOML file with your own templates."""
    no_change: bool = False
    """Let the model reply that a section adds nothing, whatever the prompt set: the memory then stays byte
    for byte, for a few tokens."""
    evidence: bool = False
    """Have the model quote the text word for word with each section. Quotes that are found in the text are
    kept with their place, outside the memory, and the answer cites them."""
    quotes: QuoteSource = "asked"
    """With evidence, where quotes come from: prompts ask for them, and show them with the answer (asked); or prompts stay as they
    are, and what a memory has word for word from its section is a quote (copied), for models that were
    trained to copy sentences into their memory."""
    items: bool = False
    """For questions that count, list, add up or ask for the i-th: have the model list items, each with a
    value and its quote, which are then counted and added up by code, not by the model."""
    quote_tokens: int = Field(default=256, ge=16)
    """Tokens added to the limit of each reply to a section for its quotes or items, where prompts ask for them."""
    ledger_tokens: int = Field(default=1024, ge=16)
    """Tokens of quotes or items that are shown to the model when it answers, at most, where prompts ask for them; of
    more quotes, those that fit the question best."""
    stop_early: bool = False
    """Let the model say that its memory holds all that the question needs, and read no further then. Leave it
    off for questions about the whole text. Not with items or mode=parallel."""
    order: ReadingOrder = "text"
    """Order in which sections are read: that of the text, or those first that share most words with the
    question (relevance; needs bm25s). Not with mode=parallel."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; left to the engine when not given."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; left to the engine when not given."""
    seed: int | None = None
    """Sampling seed; none when not given."""

    def sampling(self, max_tokens: int) -> Sampling:
        """How replies of so many tokens are sampled."""
        return Sampling(
            max_tokens=max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )

    @property
    def merges(self) -> bool:
        """Whether notes or memories are merged."""
        return self.mode == "parallel"

    @property
    def asks_notes(self) -> bool:
        """Whether prompts of their own ask for notes on sections."""
        return self.merges and self.notes == "asked"

    @property
    def joins_memories(self) -> bool:
        """Whether memories are put together line by line, without a call."""
        return self.merges and self.notes == "memories"

    @property
    def asks_quotes(self) -> bool:
        """Whether prompts ask for quotes or items."""
        return self.items or (self.evidence and self.quotes == "asked")

    @property
    def keeps_quotes(self) -> bool:
        """Whether quotes or items are kept, and answers cite them."""
        return self.evidence or self.items

    @property
    def finds_copies(self) -> bool:
        """Whether what a memory has from its section is searched there, where a reply marks no quote."""
        return self.evidence and not self.items

    def check_used(self, names: Iterable[str]) -> None:
        """Raise ConfigError where one of these settings, which somebody gave, has no effect with the others."""
        needs = {
            "rounds": (self.mode == "parallel", "`mode=parallel`"),
            "notes": (self.merges, "`mode=parallel`"),
            "quotes": (self.evidence, "`evidence`"),
            "quote_tokens": (self.asks_quotes, "`evidence` with `quotes=asked`, or `items`"),
            "ledger_tokens": (self.asks_quotes, "`evidence` with `quotes=asked`, or `items`"),
        }
        for name in names:
            is_used, needed = needs.get(name, (True, ""))
            if not is_used:
                raise ConfigError(
                    f"`{name}` has no effect without {needed}; give that, or leave it out"
                )

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        if self.items and self.stop_early:
            raise ValueError(
                "items are counted over the whole text; leave out `stop_early` or `items`"
            )
        if self.merges and (self.stop_early or self.order != "text"):
            raise ValueError(
                "`stop_early` and `order` are for sections that are read one after the other; leave them "
                "out with `mode=parallel`"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _sizes_follow_the_window(cls, values: Any) -> Any:
        """Sizes that are not given, for a window below the usual one: the same shares, with room for the template."""
        window = values.get("window") if isinstance(values, dict) else None
        if not isinstance(window, int) or not 64 <= window < USUAL_WINDOW:
            return values
        part = window // 8
        sizes = {"memory_tokens": part, "answer_tokens": part}
        room = window - 2 * part - min(1144, window // 4 + 256)
        return {**sizes, "chunk_tokens": max(16, room), **values}

    @model_validator(mode="after")
    def _memory_fits(self) -> Self:
        if self.memory_tokens >= self.window:
            raise ValueError(
                f"`memory_tokens={self.memory_tokens}` does not fit a window of {self.window} tokens; "
                "lower `memory_tokens` or raise `window`"
            )
        if self.chunk_tokens >= self.window:
            raise ValueError(
                f"`chunk_tokens={self.chunk_tokens}` does not fit a window of {self.window} tokens; "
                "lower `chunk_tokens` or raise `window`"
            )
        return self


class ReadingSettings(TypedDict, total=False):
    """The fields of `AgentConfig`, for functions that take them one by one: a misspelt one is a type error."""

    mode: ReadingMode
    rounds: int
    notes: NoteSource
    window: int
    chunk_tokens: int
    section_ends: SectionEnds
    memory_tokens: int
    empty_replies: EmptyReplies
    answer_tokens: int
    reasoning_tokens: int
    prompts: str
    no_change: bool
    evidence: bool
    quotes: QuoteSource
    items: bool
    quote_tokens: int
    ledger_tokens: int
    stop_early: bool
    order: ReadingOrder
    temperature: float | None
    top_p: float | None
    seed: int | None


class EngineConfig(Settings):
    """How an OpenAI-compatible endpoint is called."""

    model: str = ""
    """Name of the model, as the endpoint knows it; may be left out if it serves only one."""
    base_url: str | None = None
    """Address of the endpoint, such as http://localhost:8000/v1; several, separated by commas, share
    the calls."""
    api_key: SecretStr | None = None
    """Key for the endpoint; never written anywhere. Prefer the environment to this option."""
    api_version: str | None = None
    """API version, for Azure deployments only."""
    timeout: float = Field(default=300.0, gt=0)
    """Seconds for one whole reply, from the request to its last byte, before the request is retried."""
    patience: float = Field(default=600.0, ge=0)
    """Seconds to retry a call that fails, all attempts and waits together; 0 tries once."""
    concurrency: int = Field(default=16, ge=1)
    """Requests in flight at once, at most."""
    extra_body: dict[str, Any] | None = None
    """Further fields for every request, as JSON, such as {"top_k": 20}."""
    shield_text: bool = True
    """Break control strings of the model, such as <|im_end|>, in what is sent, and restore them in replies:
    a server would take those of a text for the end of a turn. Switch it off for texts that you trust."""


class LocalConfig(Settings):
    """How a model runs inside this process."""

    adapter: str | None = None
    """Folder of a LoRA adapter (peft) to put on the local model."""
    merged: bool | None = None
    """Merge the adapter of a local model into its weights when it is loaded; when not given, on a GPU, where its
    small products take longer than the rest of a step."""
    device: str | None = None
    """Where a local model runs, such as cpu or cuda:0. Default: the first GPU, or the CPU."""
    cache_gb: float | None = Field(default=None, gt=0)
    """Memory for the keys and values of a local model, in gigabytes; when not given, 0.5 in llama.cpp, 2 in torch on
    a CPU, and half of what is free on a GPU."""
    max_batch_tokens: int | None = Field(default=None, ge=16)
    """Tokens of prompts that a local model computes in one step, at most; when not given, 256 in llama.cpp, 512 in
    torch on a CPU, and 32,768 on a GPU."""
    max_running: int | None = Field(default=None, ge=1)
    """Requests that a local model works on at once, at most; when not given, 2 in llama.cpp, 64 in torch on a CPU,
    and 1,024 on a GPU."""
    runtime: LocalRuntime | None = None
    """What computes a local model; when not given, llama.cpp for a GGUF file where there is no NVIDIA GPU, else
    torch."""
    yarn_window: int | None = Field(default=None, ge=1)
    """Window to extend the model to with YaRN, in tokens; also for vllm:MODEL."""
    yarn_factor: float | None = Field(default=None, ge=1)
    """As yarn_window, as a multiple of the model's own window."""


class VllmConfig(Settings):
    """How vLLM is started on this machine."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model in vLLM."""
    data_parallel_size: int | None = Field(default=None, ge=1)
    """Copies of the model, each with its own server; as many as there are GPUs for when not given."""
    vllm_python: str | None = None
    """Python that vLLM is installed for, such as ~/vllm/bin/python; this one when not given."""
    vllm_args: str | None = None
    """Further arguments of vLLM's server, in one string, such as '--max-model-len 32768 --dtype half'."""
    vllm_log_dir: str | None = None
    """Folder for the logs of vLLM; one in your state folder when not given."""
    start_seconds: float = Field(default=1200.0, gt=0)
    """Seconds to wait until vLLM has loaded the model."""
    token_ids: bool = True
    """Ask vLLM for the token ids and log-probabilities of every prompt and reply."""
    yarn_window: int | None = Field(default=None, ge=1)
    """As for a local model."""
    yarn_factor: float | None = Field(default=None, ge=1)
    """As for a local model."""


class ServeConfig(Settings):
    """Where `memagent serve` listens, which clients it admits, and its limits."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can reach the default."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes any free port."""
    api_key: SecretStr | None = None
    """Key that requests must carry. Prefer MEMAGENT_API_KEY in the environment to this option."""
    allowed_hosts: str | None = None
    """Further names of this server that clients use, comma-separated; addresses, localhost and the
    machine's own name need not be listed."""
    max_concurrency: int = Field(default=256, ge=1)
    """Maximum number of concurrent requests; further ones get status 429."""
    max_request_bytes: int = Field(default=16_000_000, ge=1000)
    """Maximum size of a request; larger ones get status 413. Files in a request to the gateway have at most as
    many characters of text."""
    request_log: bool = True
    """Print a line for each request on standard error: client, path, status, tokens, seconds, no text."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish when the server shuts down."""


class GatewayConfig(Settings):
    """What the reading gateway keeps, what it costs, and how much it reads at once."""

    state_dir: str | None = None
    """Folder for files, readings and what keys have used; one in your state folder when not given."""
    max_readings: int = Field(default=64, ge=1)
    """Readings under way at once, at most; further ones get status 429."""
    reading_calls: int = Field(default=8, ge=1)
    """Calls of all readings in flight at once, at most. Short conversations do not wait for them; keep it
    below what the engine computes at once."""
    max_stored_bytes: int = Field(default=1_000_000_000, ge=1000)
    """Size of the files of one key together, at most."""
    keep_days: float = Field(default=30.0, gt=0)
    """Days that a reading is kept after its last step, so that it can be continued."""
    price_in: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, for limits on cost."""
    price_out: float | None = Field(default=None, ge=0)
    """Price of a million completion tokens."""

    @property
    def prices(self) -> Prices | None:
        """What calls cost; None where no price is set."""
        return Prices.of(self.price_in, self.price_out)

    @model_validator(mode="after")
    def _prices_agree(self) -> Self:
        _ = self.prices  # raises where one is missing
        return self


class KeyLimits(Settings):
    """What requests with a key may use; None leaves it to the server."""

    max_concurrency: int | None = Field(default=None, ge=1)
    """Concurrent requests with this key, at most; further ones get status 429."""
    max_request_bytes: int | None = Field(default=None, ge=1000)
    """Maximum size of a request with this key, within the server's own."""
    max_cost: float | None = Field(default=None, ge=0)
    """Cost of all requests with this key, at most, in the currency of the server's prices."""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file; errors call it `what`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


MAX_DEPTH = 20
"""Names in the path of a setting."""


def with_override(values: dict[str, Any], change: str) -> dict[str, Any]:
    """Values of settings with `a.b.0.c=value` put in; the value is TOML, or else plain text."""
    name, mark, text = change.partition("=")
    if not mark or not name.strip():
        raise ConfigError(f"{change[:100]!r} changes no setting; write it as name=value")
    path = name.strip().split(".")
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{name[:100]!r} is no setting; none is inside more than {MAX_DEPTH}")
    result: dict[str, Any] = _replaced(values, path, _toml_value(text), name)
    return result


def _replaced(values: Any, path: list[str], value: Any, name: str) -> Any:
    """A copy of nested dicts and lists with the value at a path replaced."""
    if not path:
        return value
    key, *rest = path
    if isinstance(values, list):
        entries = {str(number): number for number in range(len(values))}
        if key not in entries:
            raise ConfigError(
                f"{name}: there is no entry {key} among {len(values)}, counted from 0"
            )
        at = entries[key]
        return [*values[:at], _replaced(values[at], rest, value, name), *values[at + 1 :]]
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: there is nothing inside that {key} could name")
    inner = values.get(key)  # None: an optional table that is not set
    return {**values, key: _replaced({} if inner is None else inner, rest, value, name)}


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _explain(error: ValidationError, cls: type[FileRecord]) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    # of several forms of a value the first is named, without its kind
    name = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("literal["))
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name}; {_hint(problem['loc'], cls)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{name}: {message[0].lower()}{message[1:]}" if name else message


def _hint(path: tuple[str | int, ...], cls: type[BaseModel]) -> str:
    """What an unknown key was probably meant to be: a sibling, else the same key elsewhere."""
    *above, key = path
    siblings = [name for inside in _classes_at(above, cls) for name in inside.model_fields]
    if near := nearest(str(key), siblings):
        return f"did you mean {'.'.join(str(part) for part in [*above, near])}?"
    elsewhere = [name for name in _dotted_names(cls) if name.rpartition(".")[2] == key]
    return f"did you mean {elsewhere[0]}?" if elsewhere else hint(str(key), siblings)


def _classes_at(path: Sequence[str | int], cls: type[BaseModel]) -> list[type[BaseModel]]:
    """The settings classes that the values at a path may be of; places in lists add nothing."""
    classes = [cls]
    for part in path:
        fields = [each.model_fields[part] for each in classes if part in each.model_fields]
        classes = [each for field in fields for each in _classes_in(field.annotation)] or classes
    return classes


def _dotted_names(cls: type[BaseModel], above: str = "") -> Iterator[str]:
    """All settings of a class and of the classes inside it, except those in lists."""
    for name, field in cls.model_fields.items():
        yield above + name
        if get_origin(field.annotation) is not list:
            for inside in _classes_in(field.annotation):
                yield from _dotted_names(inside, f"{above}{name}.")


def _classes_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes that an annotation such as `list[A] | None` names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes_in(argument)


# --- configs that are shipped ---------------------------------------------------------------------

ConfigKind = Literal["train", "eval", "data"]
"""Which command a config is for."""
SUFFIX = ".toml"
PACKAGED = Path(__file__).resolve().parent / "configs"
"""Where an installed package has them."""
IN_CHECKOUT = Path(__file__).resolve().parents[2] / "configs"
"""Where a clone of the repository has them."""
NO_CONFIG = "prompts"
"""Files whose names start so are parts of configs."""
TITLES: dict[ConfigKind, str] = {"train": "config", "eval": "suite", "data": "recipe"}


def configs_folder() -> Path:
    """The folder of all shipped configs."""
    return PACKAGED if PACKAGED.is_dir() else IN_CHECKOUT


def config_names(kind: ConfigKind) -> list[str]:
    """Names of the shipped configs of a kind, such as `tiny_cpu` or `reader_1.5b/rl`."""
    folder = configs_folder() / kind
    paths = [path.relative_to(folder) for path in folder.rglob(f"*{SUFFIX}")]
    return sorted(
        path.as_posix().removesuffix(SUFFIX)
        for path in paths
        if not path.name.startswith(NO_CONFIG)
    )


def find_config(kind: ConfigKind, name: str | Path) -> Path:
    """The file that a path or the name of a shipped config means; a file takes precedence.

    Raises ConfigError if there is none.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        return path
    names = config_names(kind)
    if str(name) in names:
        return configs_folder() / kind / f"{name}{SUFFIX}"
    title = TITLES[kind]
    if path.suffix != SUFFIX:
        near = hint(str(name), names)
        raise ConfigError(f"there is no file {name}, and no {title} called so is shipped; {near}")
    same = [one for one in names if path.with_suffix("").as_posix().endswith(one)]
    shipped = f"; `{same[0]}` names the one that comes with memagent" if same else ""
    raise ConfigError(f"there is no {title} {name}{shipped}")
