"""The options that name an engine, and how commands open it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from memagent.cli.shared.options import all_options, panel_option, profile_option, settings_options
from memagent.cli.shared.progress import PullProgress
from memagent.cli.shared.run_command import CommandConsole
from memagent.config import EngineConfig, LocalConfig, VllmConfig
from memagent.engines import store
from memagent.engines.base import BaseEngine, EngineChoice, choose_engine

ENGINES = (EngineConfig, LocalConfig, VllmConfig)
"""Settings of engines of any kind."""
engine_options = all_options(
    panel_option(
        "--engine",
        panel="Engine",
        help="Engine as KIND:MODEL: openai:MODEL for an endpoint, local:MODEL for a model in this "
        "process, vllm:MODEL for vLLM started on the GPUs here, scripted for none at all.",
    ),
    profile_option(),
    settings_options(EngineConfig, panel="Engine", only=("model", "base_url")),
)
"""`--engine`, `--profile`, `--model` and `--base-url`; everything else is set with `--set`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of engines that were given as options."""

    endpoint: Annotated[dict[str, Any], EngineConfig]
    local: Annotated[dict[str, Any], LocalConfig]
    vllm: Annotated[dict[str, Any], VllmConfig]

    @property
    def all(self) -> dict[str, Any]:
        """All of them; `model` among them names an endpoint's model."""
        return {**self.endpoint, **self.local, **self.vllm}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `engine_options` were given."""

    engine: str | None
    settings: EngineSettings

    def choose(self, *, stored: EngineChoice | None = None) -> EngineChoice:
        """The engine that is meant; see `choose_engine`."""
        return choose_engine(self.engine, self.settings.all, stored=stored)


def open_chosen(choice: EngineChoice, console: CommandConsole) -> BaseEngine:
    """The engine; the download of a model is shown."""
    if choice.kind == "vllm":
        console.report("starting vLLM; it is shut down with this command")
    if choice.kind == "local":
        with PullProgress(choice.model, console) as progress:
            choice.pull(progress)
    return choice.open()


def pull_known(name: str, console: CommandConsole) -> None:
    """Fetch a model that has a short name, if it is not here yet."""
    if name in store.KNOWN:
        with PullProgress(name, console) as progress:
            store.pull(name, on_progress=progress)
