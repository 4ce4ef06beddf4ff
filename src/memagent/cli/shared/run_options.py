"""Options of commands with a run directory: where the run is, what it may cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click

from memagent.agent.model_call import LimitSettings
from memagent.agent.reader import Reader
from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.options import (
    SHOWN,
    all_options,
    panel_option,
    profile_option,
    reading_options,
    set_option,
    settings_options,
)
from memagent.cli.shared.progress import PullProgress
from memagent.cluster import Cluster, open_cluster
from memagent.config import AgentConfig, EngineConfig, LocalConfig, VllmConfig
from memagent.engines import store
from memagent.engines.base import BaseEngine, EngineChoice, choose_engine
from memagent.errors import ConfigError

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
class EngineOptions:
    """What `engine_options` were given."""

    engine: str | None
    settings: Annotated[dict[str, Any], EngineConfig, LocalConfig, VllmConfig]
    """`model` among them names an endpoint's model."""

    def choose(self, *, stored: EngineChoice | None = None) -> EngineChoice:
        """The engine that is meant; see `choose_engine`."""
        return choose_engine(self.engine, self.settings, stored=stored)


def open_chosen(choice: EngineChoice, console: CommandConsole) -> BaseEngine:
    """The engine; the download of a model is shown."""
    if choice.kind == "vllm":
        console.report("starting vLLM; it is shut down with this command")
    if choice.kind == "local":
        with PullProgress(choice.model, console) as progress:
            choice.pull(progress)
    return choice.open()


def open_reader(
    engine: BaseEngine, console: CommandConsole, given: Mapping[str, Any], **arguments: Any
) -> Reader:
    """The reader with these arguments; settings that are `given` and have no effect are refused."""
    reader = Reader(engine, **arguments)
    reader.config.check_used(given)
    if reader.tokenizer_note:
        note = f"token counts are estimated with a margin: {reader.tokenizer_note}"
        console.report(f"{note}; `tokenizer` names one")
    return reader


def pull_known(name: str, console: CommandConsole) -> None:
    """Fetch a model that has a short name, if it is not here yet."""
    if name in store.KNOWN:
        with PullProgress(name, console) as progress:
            store.pull(name, on_progress=progress)


# --- work on a Ray cluster ------------------------------------------------------------------------

OpenEngine = Callable[[EngineChoice], Awaitable[BaseEngine]]
"""Opens an engine, on a cluster as copies."""
CLUSTER = "Cluster"
"""Heading of the help."""
cluster_option = panel_option(
    "--cluster",
    panel=CLUSTER,
    metavar="ADDRESS",
    help="Spread the work over a Ray cluster: HOST:PORT of its head node, or auto for the one in RAY_ADDRESS, "
    "else one of this machine alone.",
)
cluster_options = all_options(
    cluster_option,
    panel_option(
        "--replicas",
        type=click.IntRange(min=1),
        panel=CLUSTER,
        help="Copies of the engine on the cluster. [default: as many as it has GPUs for, else one on each node]",
    ),
)
"""`--cluster`, and how many copies of the engine run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `cluster_options` were given."""

    cluster: str | None
    replicas: int | None

    def __post_init__(self) -> None:
        if self.replicas is not None and self.cluster is None:
            raise ConfigError("`replicas` are copies on a cluster; name it with `cluster=ADDRESS`")


@contextmanager
def joined(address: str | None, console: CommandConsole) -> Iterator[Cluster | None]:
    """The cluster at an address; None without one."""
    if address is None:
        yield None
        return
    with open_cluster(address, on_note=console.report) as cluster:
        yield cluster


def engine_opener(
    cluster: Cluster | None, replicas: int | None, console: CommandConsole
) -> OpenEngine:
    """How engines are opened: on the cluster, or in this process."""

    async def opener(choice: EngineChoice) -> BaseEngine:
        if cluster is None:
            return open_chosen(choice, console)
        from memagent.engines.replicas import open_replicas

        engine = await open_replicas(cluster, choice, num=replicas, on_note=console.report)
        console.report(
            f"{engine.num_replicas} replicas of {choice.spec} on {cluster.num_nodes} nodes"
        )
        return engine

    return opener


F = TypeVar("F", bound=Callable[..., Any])


def named_path(value: str) -> Path:
    """The path. An empty one, as of a variable that is not set, would mean the current folder."""
    if not value:
        raise click.BadParameter("the path is empty; name one, or leave it out")
    return Path(value)


def run_options(kept: str) -> Callable[[F], F]:
    """`--run-dir` and `--resume`; `kept` says what the folder is for."""
    return all_options(
        panel_option(
            "--run-dir",
            type=named_path,
            metavar="PATH",
            panel="Run",
            help=f"Folder to keep {kept} in. [default: a new one in your state folder]",
        ),
        panel_option(
            "--resume",
            type=named_path,
            metavar="PATH",
            panel="Run",
            help="Resume the run in this folder; nothing that was finished is repeated.",
        ),
    )


def limit_options(function: F) -> F:
    """`--max-calls` and `--max-cost`."""
    return all_options(
        panel_option(
            "--max-calls",
            type=click.IntRange(min=1),
            panel="Run",
            help="Stop before more calls than this are sent, resumed runs included.",
        ),
        panel_option(
            "--max-cost",
            type=click.FloatRange(min=0),
            panel="Run",
            help="Stop before the run can cost more than this, resumed runs included.",
        ),
    )(function)


PRICES = {"price_in": click.FloatRange(min=0), "price_out": click.FloatRange(min=0)}
"""Prices of a million prompt and completion tokens, for `--set`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `run_options` were given."""

    run_dir: Path | None
    resume: Path | None

    def __post_init__(self) -> None:
        if self.resume is not None and self.run_dir is not None:
            raise ConfigError("give --resume to resume a run or --run-dir to begin one, not both")


# --- all options of commands that read texts ------------------------------------------------------


SETTING = "Any other setting, such as memory_tokens=512 or price_in=2.5; repeatable. docs/config.md lists them."


def reader_options(shown: Sequence[str] = SHOWN, **further: Any) -> Callable[[F], F]:
    """All of them, with options for those settings of reading that are `shown`; `further` values by name, each with its type, may be set too."""
    return all_options(
        limit_options,
        engine_options,
        reading_options(only=shown),
        set_option(
            AgentConfig, *ENGINES, panel="Reading", help=SETTING, further={**PRICES, **further}
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What `reader_options` were given."""

    tokenizer: str | None
    limits: LimitSettings
    engine: EngineOptions
    agent: Annotated[dict[str, Any], AgentConfig]
