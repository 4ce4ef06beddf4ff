"""Open an engine by name: `local:MODEL`, `openai:MODEL`, `vllm:MODEL` or `scripted`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from memagent import blocking, trust
from memagent.config import EngineConfig, LocalConfig, LocalRuntime, Settings, VllmConfig
from memagent.engines import store
from memagent.engines.addresses import (
    NO_ENDPOINT,
    addresses,
    endpoint_from,
    origin,
    origins,
    public_url,
)
from memagent.engines.limit import RetryListener
from memagent.errors import ConfigError
from memagent.names import hint, nearest
from memagent.types import Completion, Engine, Message, Sampling

if TYPE_CHECKING:
    from memagent.engines.openai import EndpointEngine

ENGINES: dict[str, str] = {
    "local": "memagent.engines.base:open_local",
    "openai": "memagent.engines.openai:open_endpoint",
    "scripted": "memagent.engines.scripted:open_scripted",
    "vllm": "memagent.engines.vllm.engine:open_vllm",
}
"""Kind to `module:function`; imported when used, because engines bring heavy libraries."""
SETTINGS: dict[str, tuple[type[Settings], ...]] = {
    "local": (LocalConfig,),
    "openai": (EngineConfig,),
    "scripted": (),
    "vllm": (EngineConfig, VllmConfig),
}
"""The settings that a kind of engine takes."""
ANY_ENDPOINT = "openai:"
"""The engine where an endpoint is set and no model is named: the endpoint says which it serves."""
EMBEDDED = f"local:{store.EMBEDDED}"
"""The engine where neither an engine nor an endpoint is set."""
ALMOST = 0.8
"""How similar to a kind of engine a plain name must be to be taken for a misspelt one."""
SECRET_SETTINGS = ("api_key", "base_url")
"""Never kept as given: one is a key, the other may hold one."""
ADDRESS_SETTINGS = ("base_url", "api_key")
"""Settings that mean an endpoint, though no model is named."""
CODE_SETTINGS = ("vllm_python", "vllm_args")
"""Settings that decide which code is run."""
NEEDS: dict[str, tuple[str, ...]] = {"local": ("xllamacpp", "torch")}
"""Libraries of which a kind of engine needs one, looked for before anything is fetched."""


@dataclass(slots=True)
class Serving:
    """How the replies of an endpoint are judged; one record for all engines that stand for it."""

    num_tries: int = 4
    """How often an empty reply is requested before it is accepted."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that the server has counted."""
    longest_counted: int = 0
    """Tokens of the same prompt by our own count."""


class Facts:
    """What is known of an engine besides its model: of one that is not ours, nothing."""

    served_window: int | None = None
    """Tokens the model can see at once, where the engine knows."""
    reading_defaults: Mapping[str, Any] = MappingProxyType({})
    """Settings of reading that suit the model, by name; what the user sets counts more."""
    limits_itself: bool = False
    """True when the engine keeps to its own limit of calls at once, waits between attempts left out."""
    calls_at_once: int | None = None
    """Calls that the engine works on at once, at most, where it knows; more of them wait."""
    runs_here: bool = False
    """True when calls are computed in this process: they cost nothing, and no text leaves it."""
    runtime: str | None = None
    """What computes a local model; None for other engines."""
    num_replicas: int = 1
    """Copies of the model that share the calls, each with a limit of calls at once of its own."""
    on_retry: RetryListener | None = None
    """Called with each failed attempt that is repeated, by engines that repeat attempts."""
    serving: Serving | None = None
    """What an endpoint serves; None where replies are taken as they come."""

    @property
    def kept_address(self) -> str | None:
        """The address that a run is resumed with, without credentials; None where there is none."""
        return None

    async def drop_prompts(self, cache_salt: str | None) -> None:
        """Drop what is cached here of prompts with this salt and not in use; by default nothing is."""


def facts_of(engine: Engine) -> Facts:
    """What is known of an engine."""
    return engine if isinstance(engine, Facts) else Facts()


class BaseEngine(Facts, ABC):
    """What our engines have in common: `with engine:` and `async with engine:` close them."""

    model: str
    tokenizer: str

    @property
    def is_alive(self) -> bool:
        """False when what computes the replies has ended by itself, for good."""
        return True

    @abstractmethod
    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply. Raises EngineError when the engine fails for good."""

    @abstractmethod
    async def aclose(self) -> None:
        """Free connections, processes and memory."""

    def stand_for(self, engine: Engine) -> None:
        """Take over what is known of another engine, to which this one passes its calls on."""
        self.model, self.tokenizer = engine.model, engine.tokenizer
        facts = facts_of(engine)
        self.served_window = facts.served_window
        self.reading_defaults = facts.reading_defaults
        self.calls_at_once = facts.calls_at_once
        self.serving = facts.serving
        self.on_retry = facts.on_retry

    def close(self) -> None:
        """As `aclose`, for code that is not async."""
        blocking.run(self.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def as_endpoint(engine: Engine) -> EndpointEngine | None:
    """An engine as the endpoint that it is; None for one that calls no endpoint."""
    if facts_of(engine).runs_here:
        return None
    from memagent.engines.openai import EndpointEngine  # brings the HTTP client

    return engine if isinstance(engine, EndpointEngine) else None


def open_engine(engine: str | None = None, **settings: Any) -> BaseEngine:
    """An engine from `KIND:MODEL`; a plain model name means an OpenAI-compatible endpoint.

    open_engine("openai:qwen2.5-7b", base_url="http://localhost:8000/v1")
    open_engine("scripted")
    open_engine()    # the endpoint in the environment, else the embedded model

    An endpoint is asked what it serves. A local model with a short name is pulled when it is first used,
    and comes with the adapter that is shipped for it, if there is one.
    """
    return choose_engine(engine, settings).open()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine that is not open yet.

    Example: EngineChoice(spec="local:smollm2-135m", settings={"device": "cpu"})
    """

    spec: str
    """As `open_engine` takes it; never empty."""
    settings: Mapping[str, Any]
    is_embedded: bool = False
    """True when neither an engine nor an endpoint was set."""

    @property
    def kind(self) -> str:
        """The kind of the engine, a key of ENGINES."""
        return split_spec(self.spec)[0]

    @property
    def model(self) -> str:
        """The model's name; empty where the endpoint says which it is."""
        return split_spec(self.spec)[1]

    @property
    def address(self) -> str | None:
        """Where an endpoint is, as far as the settings say."""
        return self.settings.get("base_url")

    @property
    def title(self) -> str:
        """The spec; of an endpoint whose model is not named, what is known of it."""
        return "the endpoint" if self.spec == ANY_ENDPOINT else self.spec

    def pull(self, on_progress: store.OnPull | None = None) -> None:
        """Fetch a local model with a short name, unless it is here."""
        check_installed(self.kind)  # else a download would be in vain
        if self.kind == "local" and self.model in store.KNOWN:
            try:
                store.pull(self.model, on_progress=on_progress)
            except ConfigError as error:
                raise ConfigError(f"{error}; or give an endpoint: `base_url=URL`") from None

    def open(self) -> BaseEngine:
        """The engine; its model is pulled first."""
        self.pull()
        engine: BaseEngine = opener_of(self.kind)(self.model, **self.settings)
        return engine

    def kept(self, engine: BaseEngine) -> EngineChoice:
        """What a manifest may keep of an open engine: no key, no credentials in the address.

        The address counts as named by the user from now on, see `memagent.trust`.
        """
        settings = {
            name: value
            for name, value in self.settings.items()
            if name not in SECRET_SETTINGS and value is not None
        }
        if engine.runtime is not None:
            settings["runtime"] = engine.runtime
        if engine.kept_address:
            settings["base_url"] = engine.kept_address
            trust.remember("address", *map(origin, addresses(engine.kept_address)))
        trust.remember("code", *(str(settings[name]) for name in CODE_SETTINGS if name in settings))
        spec = f"{self.spec}{engine.model}" if self.spec == ANY_ENDPOINT else self.spec
        return EngineChoice(spec=spec, settings=settings)


def choose_engine(
    spec: str | None, settings: Mapping[str, Any], *, stored: EngineChoice | None = None
) -> EngineChoice:
    """The engine that is meant, with all its settings. Settings that are None count as not given.

    Without a name it is the `stored` one, of a run that is resumed; else the endpoint in the settings or
    the environment; else the embedded model. Raises ConfigError for settings of another kind of engine.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    model = given.pop("model", None)
    if spec and model:
        raise ConfigError("give either `engine=KIND:MODEL` or `model`, not both")
    is_default = not spec and not model and stored is None
    if model:
        spec = f"{ANY_ENDPOINT}{model}"
    elif not spec:
        spec = stored.spec if stored else _default_engine(given)
    check_settings(spec, given)
    own = _own_settings(spec, stored, given)
    if stored:
        check_settings(spec, own)
        check_stored(own, given)
    return EngineChoice(
        spec=spec, settings={**own, **given}, is_embedded=is_default and spec == EMBEDDED
    )


def check_stored(stored: Mapping[str, Any], given: Mapping[str, Any], *, prefix: str = "") -> None:
    """Raise ConfigError for settings of a run directory that only the user may decide.

    That is where text and keys are sent, and which code is run: what the user neither gives now nor
    named before is refused. Messages write `prefix` before the name of a setting.
    """
    address = stored.get("base_url")
    if address is not None and given.get("base_url") is None:
        named = origins(endpoint_from(os.environ).base_url or "")
        url = public_url(str(address))
        trust.require(
            "address",
            *origins(str(address)) - named,
            what=f"the endpoint {url}",
            may="the text may go there",
            again=f"{prefix}base_url={url}",
        )
    for name in CODE_SETTINGS:
        value = stored.get(name)
        if value is None or given.get(name) is not None or trust.is_known("code", str(value)):
            continue
        raise ConfigError(
            f"the run directory sets `{prefix}{name}` to {str(value)[:200]!r}, which you have not named on "
            f"this machine; if it is right, give `{prefix}{name}` again"
        )


def check_settings(spec: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of another kind of engine."""
    kind, _ = split_spec(spec)
    own = {name for group in SETTINGS[kind] for name in group.model_fields}
    others = {
        name for groups in SETTINGS.values() for group in groups for name in group.model_fields
    }
    if foreign := [name for name in settings if name in others - own or not own]:
        names = ", ".join(f"`{name}`" for name in foreign)
        raise ConfigError(f"{names} does not go with the engine {spec!r}")


def _default_engine(settings: Mapping[str, Any]) -> str:
    """An endpoint only where one is set: neither a key of the environment nor a timeout sends text away."""
    is_set = not settings.keys().isdisjoint(ADDRESS_SETTINGS)
    if is_set or endpoint_from(os.environ).base_url:
        return ANY_ENDPOINT
    if settings.keys() & EngineConfig.model_fields.keys():
        raise ConfigError(NO_ENDPOINT)
    return EMBEDDED


def _own_settings(
    spec: str, stored: EngineChoice | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings beneath the given ones: those of a run that is resumed, else what the model brings."""
    kind, model = split_spec(spec)
    if kind != "local":
        settings = stored.settings if stored and stored.kind == kind else {}
        return {name: value for name, value in settings.items() if name != "api_key"}
    if stored is None:
        adapter = None if "adapter" in given else store.shipped_adapter(model)
        return {"adapter": str(adapter)} if adapter else {}
    kept = stored.settings if stored.kind == kind else {}
    return {"adapter": None, **kept}  # as when the run began, whatever is shipped by now


def check_installed(kind: str) -> None:
    """As `opener_of`, by a look at what is installed: nothing is imported, which may take seconds."""
    libraries = NEEDS.get(kind, ())
    if libraries and not any(find_spec(library) for library in libraries):
        raise _lacks(kind, libraries[0])


def opener_of(kind: str) -> Callable[..., Any]:
    """What opens a kind of engine. Raises ConfigError when something that it needs is not installed."""
    check_installed(kind)
    module, function = ENGINES[kind].split(":")
    try:
        opener: Callable[..., Any] = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memagent"):
            raise
        raise _lacks(kind, error.name) from None
    return opener


def _lacks(kind: str, library: str | None) -> ConfigError:
    return ConfigError(
        f'the {kind} engine needs {library}; install it with pip install "memagent[{kind}]", '
        "or name an endpoint with `base_url`"
    )


def split_spec(spec: str) -> tuple[str, str]:
    """The kind and the model that an engine's name means."""
    kind, colon, model = spec.partition(":")
    if kind in ENGINES:
        return kind, model
    if colon and kind.isalpha() and "/" not in kind and kind.islower() and not model[:1].isdigit():
        raise ConfigError(f"unknown engine {kind!r}; {hint(kind, ENGINES)}")
    if not colon and (near := nearest(spec, ENGINES, cutoff=ALMOST)):
        raise ConfigError(
            f"unknown engine {spec!r}; did you mean {near}? "
            f"A model of that name behind an endpoint is openai:{spec}"
        )
    return "openai", spec


# --- what computes a local model ------------------------------------------------------------------

# llama.cpp in a process of its own, or torch in this one:
#
#     local:reader.gguf ──┬─ no NVIDIA GPU ──▶ llama.cpp     `runtime=llama.cpp`
#     local:my-folder   ──┴─ otherwise ──────▶ torch         `runtime=torch`


LIBRARIES: dict[LocalRuntime, tuple[str, ...]] = {
    "llama.cpp": ("xllamacpp",),
    "torch": ("torch", "transformers"),
}
REMEDIES: dict[LocalRuntime, str] = {
    "llama.cpp": 'pip install "memagent[local]", or, where there is no wheel of it for this machine, name an '
    "endpoint with `base_url`",
    "torch": 'pip install "memagent[gpu]", or name an endpoint with `base_url`',
}


def open_local(model: str, **settings: Any) -> BaseEngine:
    """An engine for a model on this machine: a pulled one by name, a folder, or a GGUF file."""
    if not model:
        raise ConfigError("no model named; use local:NAME, or local:PATH of a folder or GGUF file")
    config = LocalConfig.parse(settings)
    runtime = runtime_of(model, config)
    missing = [library for library in LIBRARIES[runtime] if find_spec(library) is None]
    if missing:
        raise ConfigError(f"a local model in {runtime} needs {missing[0]}; {REMEDIES[runtime]}")
    if runtime == "torch":
        from memagent.engines.local.engine import open_torch

        return open_torch(model, config)
    from memagent.engines.llamacpp.engine import open_llama

    return open_llama(model, config)


def runtime_of(model: str, config: LocalConfig) -> LocalRuntime:
    """What computes a model, which must be on this machine, by these settings."""
    if config.runtime is not None:
        return config.runtime
    is_for_gpu = config.device not in (None, "cpu") or (config.device is None and _has_gpus())
    is_file = store.locate(model).is_file()
    return "llama.cpp" if is_file and not is_for_gpu and _is_usable("llama.cpp") else "torch"


def local_runtimes() -> str:
    """What runs local models here, in words."""
    found = []
    is_default = not _has_gpus()
    if _is_usable("llama.cpp"):
        found.append("llama.cpp runs GGUF files" + ("" if is_default else ", where it is set"))
    if _is_usable("torch"):
        from memagent.engines.local.loading import device_names

        others = "other models" if found and is_default else "models"
        found.append(f"torch runs {others} on {', '.join(device_names())}")
    return "; ".join(found)


def _has_gpus() -> bool:
    """Whether torch can compute on a GPU of NVIDIA's."""
    from memagent.engines.vllm.servers import visible_gpus

    return _is_usable("torch") and bool(visible_gpus(os.environ))


def _is_usable(runtime: LocalRuntime) -> bool:
    return all(find_spec(library) for library in LIBRARIES[runtime])
