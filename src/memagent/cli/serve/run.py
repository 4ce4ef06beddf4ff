"""`memagent serve run`: a local model, or any engine behind the reader, over OpenAI's HTTP API."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import click
from pydantic import SecretStr

from memagent.agent.reader import Reader
from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.options import (
    PanelCommand,
    given,
    panel_option,
    profile_option,
    reading_options,
    set_option,
    settings_options,
)
from memagent.cli.shared.run_options import (
    ENGINES,
    ClusterOptions,
    cluster_options,
    joined,
    open_chosen,
    open_reader,
    pull_known,
)
from memagent.config import (
    AgentConfig,
    EngineConfig,
    GatewayConfig,
    LocalConfig,
    ServeConfig,
    VllmConfig,
)
from memagent.engines.base import (
    EngineChoice,
    choose_engine,
    open_engine,
    opener_of,
    split_spec,
)
from memagent.errors import ConfigError
from memagent.plugins import require
from memagent.profiles import load_profile, with_profile

if TYPE_CHECKING:
    from memagent.serve.app import ServedEngine
    from memagent.serve.guard import RequestRecord

API_KEY_VARIABLE = "MEMAGENT_API_KEY"
LOOPBACK = ("127.", "::1", "localhost")
LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")
GATEWAY_LIBRARIES = (*LIBRARIES, "python_multipart")
READER_ONLY = (AgentConfig, EngineConfig, VllmConfig, GatewayConfig)
"""Settings that need `--reader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `memagent serve`."""

    engine: str | None
    is_reader: bool
    server: ServeConfig
    local: LocalConfig
    gateway: GatewayConfig
    tokenizer: str | None
    reading: dict[str, Any]
    endpoint: dict[str, Any]
    cluster: ClusterOptions

    @classmethod
    def parse(cls, options: dict[str, Any]) -> Self:
        """Options of the command line; the key may come from the environment."""
        is_reader = bool(options.get("reader"))
        cluster = ClusterOptions(cluster=options.get("cluster"), replicas=options.get("replicas"))
        options, endpoint_key = _with_profile(options, is_cluster=cluster.cluster is not None)
        if is_reader and cluster.cluster is not None:
            raise ConfigError(
                "a reader runs on one machine; serve the model with --cluster, and start a second server with "
                "--reader --base-url URL before it"
            )
        if not is_reader:
            _check_without_reader(options, is_cluster=cluster.cluster is not None)
        server = given(ServeConfig, options)
        # behind the reader, the variable has the key of the endpoint that the engine calls
        if not is_reader and "api_key" not in server and (key := os.environ.get(API_KEY_VARIABLE)):
            server["api_key"] = SecretStr(key)
        endpoint = {**given(EngineConfig, options), **given(VllmConfig, options)}
        endpoint.pop("api_key", None)
        if endpoint_key is not None:
            endpoint["api_key"] = endpoint_key
        return cls(
            engine=options.get("engine"),
            is_reader=is_reader,
            server=ServeConfig.parse(server),
            local=LocalConfig.parse(given(LocalConfig, options)),
            gateway=GatewayConfig.parse(given(GatewayConfig, options)),
            tokenizer=options.get("tokenizer"),
            reading=given(AgentConfig, options),
            endpoint=endpoint,
            cluster=cluster,
        )

    @property
    def model(self) -> str:
        """The model of `engine`, which must be a local one."""
        if self.engine is None:
            raise ConfigError("no model is named; use --engine local:MODEL")
        kind, model = split_spec(self.engine)
        if kind != "local":
            raise ConfigError(
                f"{self.engine!r} is not a local model; use --engine local:MODEL, or --reader"
            )
        return model

    def choose(self) -> EngineChoice:
        """The engine behind the reader, of any kind."""
        local = self.local.model_dump(exclude_unset=True)
        return choose_engine(self.engine, {**self.endpoint, **local})


def _with_profile(
    options: dict[str, Any], *, is_cluster: bool
) -> tuple[dict[str, Any], SecretStr | None]:
    """Options with the settings of the profile that is named, and its key for the endpoint.

    `api_key` among the options is the server's own. A model that is served as it is takes nothing of endpoints
    and of reading.
    """
    name = options.get("profile_name")
    if name is None:
        return options, None
    profile = load_profile(name)
    if not options.get("reader"):
        groups = (LocalConfig, VllmConfig) if is_cluster else (LocalConfig,)
        own = {"engine", *(each for group in groups for each in group.model_fields)}
        names_endpoint = "engine" not in profile.values and options.get("engine") is None
        if names_endpoint and {"model", "base_url"} & profile.values.keys():
            raise ConfigError(f"the profile {name} names an endpoint; it needs --reader")
        kept = {key: value for key, value in profile.values.items() if key in own}
        profile = profile.model_copy(update={"values": kept})
    merged = with_profile(profile, {**options, "api_key": None})
    return {**merged, "api_key": options.get("api_key")}, merged["api_key"]


def _check_without_reader(options: dict[str, Any], *, is_cluster: bool) -> None:
    shared = {*ServeConfig.model_fields, *LocalConfig.model_fields}
    if is_cluster:
        shared |= VllmConfig.model_fields.keys()
    names = [name for group in READER_ONLY for name in group.model_fields if name not in shared]
    for name in [*names, "tokenizer"]:
        if options.get(name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --reader")


@click.command("run", cls=PanelCommand)
@panel_option(
    "--engine",
    panel="Options",
    help="The model to serve, as local:MODEL: a pulled one by name, a folder, or a GGUF file. With --reader "
    "an engine of any kind, as for `memagent ask`.",
)
@panel_option(
    "--reader",
    is_flag=True,
    panel="Options",
    help="Put the reader before the engine: requests longer than its window are read section by section.",
)
@profile_option("profile_name", panel="Options")
@settings_options(
    ServeConfig,
    panel="Server",
    only=("host", "port", "api_key", "allowed_hosts", "max_concurrency"),
)
@settings_options(GatewayConfig, panel="Gateway (with --reader)", only=("state_dir",))
@reading_options("Reading (with --reader)", only=("mode", "window", "evidence"))
@settings_options(EngineConfig, panel="Engine (with --reader)", only=("model", "base_url"))
@set_option(
    AgentConfig,
    *ENGINES,
    GatewayConfig,
    ServeConfig,
    panel="Server",
    help="Any other setting of the server, the engine and the reader, such as cache_gb=8; repeatable. "
    "docs/config.md lists them.",
)
@cluster_options
def command(**options: Any) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Without --reader a local model: /v1/chat/completions and /v1/completions (both can stream), /v1/models,
    /health, and /metrics for Prometheus.

    With --reader the model `memagent`, which answers requests of any length: /v1/chat/completions,
    /v1/responses, /v1/files, /v1/models, /health, /metrics and /openapi.json. Short conversations go to the
    engine as they are; of longer ones the text is read and the last message of the user is the question.

    \b
      memagent serve --engine local:smollm2-135m
      memagent ask book.txt -q "Who inherits the house?" --base-url http://127.0.0.1:8000/v1
      memagent serve --reader --engine local:memagent-135m
      memagent serve --cluster 10.0.0.1:6379 --engine vllm:MODEL --replicas 4 --set tensor_parallel_size=2

    With --cluster replicas of a local model, or of one in vLLM, run on the nodes of a Ray cluster behind one
    address, that of its head node.

    Each request is a line on standard error, without its text; --set request_log=false leaves them out.
    Only this machine can connect unless --host is set. On Ctrl-C or SIGTERM running requests finish
    first; a second signal shuts down immediately. Readings that do not finish are continued when the same
    request is sent again.
    """
    chosen = ServeOptions.parse(options)
    if chosen.cluster.cluster is not None:
        _serve_on_cluster(chosen)
    elif chosen.is_reader:
        _serve_reader(chosen)
    else:
        _serve_local(chosen)


def _serve_local(chosen: ServeOptions) -> None:
    model = chosen.model
    for library in LIBRARIES:
        require(library, f'memagent serve needs {library}; pip install "memagent[local,serve]"')
    opener_of("local")
    from memagent.serve.app import make_app
    from memagent.serve.http import serve
    from memagent.serve.listen import bound

    with bound(
        chosen.server.host, chosen.server.port
    ) as listener:  # before a model is fetched and loaded in vain
        pull_known(model, CommandConsole())
        with open_engine(f"local:{model}", **chosen.local.model_dump(exclude_unset=True)) as opened:
            engine = cast("ServedEngine", opened)
            serve(
                partial(make_app, engine, chosen.server, on_request=_on_request(chosen)),
                chosen.server,
                listener,
                on_ready=lambda url: _report(url, engine.public_name, chosen.server),
                on_drain=_report_drain,
            )


def _serve_on_cluster(chosen: ServeOptions) -> None:
    for library in LIBRARIES:
        require(library, f'memagent serve needs {library}; pip install "memagent[local,serve]"')
    if chosen.engine is None:
        raise ConfigError("no model is named; use --engine vllm:MODEL or --engine local:MODEL")
    choice = chosen.choose()
    from memagent.serve.cluster import check_choice, serving_on

    check_choice(choice, chosen.server)
    console = CommandConsole()
    with joined(chosen.cluster.cluster, console) as cluster:
        assert cluster is not None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own would end us at once
        num_replicas = chosen.cluster.replicas or cluster.num_nodes
        console.report(f"starting {num_replicas} replicas of {choice.spec}")
        with serving_on(cluster, choice, chosen.server, num_replicas=num_replicas) as url:
            _report(url, choice.model, chosen.server)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
            console.report("shutting down when running requests finish")


def _serve_reader(chosen: ServeOptions) -> None:
    for library in GATEWAY_LIBRARIES:
        require(library, f'memagent serve needs {library}; pip install "memagent[serve]"')
    choice = chosen.choose()
    opener_of(choice.kind)
    from memagent.serve.http import serve
    from memagent.serve.listen import bound
    from memagent.serve.reading.app import gateway_app, keys_of
    from memagent.serve.reading.state import GatewayState, state_folder

    keys_of(chosen.gateway, chosen.server)  # before a model is loaded in vain
    console = CommandConsole()
    with (
        bound(chosen.server.host, chosen.server.port) as listener,
        GatewayState(state_folder(chosen.gateway)) as state,
        open_chosen(choice, console) as engine,
    ):
        tokenizer, reading = chosen.tokenizer, chosen.reading
        reader = open_reader(engine, console, reading, tokenizer=tokenizer, **reading)
        make = partial(
            gateway_app,
            engine,
            reader,
            state,
            chosen.gateway,
            chosen.server,
            on_request=_on_request(chosen),
        )
        serve(
            make,
            chosen.server,
            listener,
            on_ready=lambda url: _report_gateway(url, reader, chosen),
            on_drain=_report_drain,
        )


def _on_request(chosen: ServeOptions) -> Callable[[RequestRecord], None] | None:
    return _log_request if chosen.server.request_log else None


def _log_request(record: RequestRecord) -> None:
    if not record.is_probe:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {record}", file=sys.stderr, flush=True)


def _report_drain(num_running: int) -> None:
    requests = "1 request finishes" if num_running == 1 else f"{num_running} requests finish"
    print(f"shutting down when {requests}; a second signal stops now", file=sys.stderr, flush=True)


def _report(url: str, model: str, config: ServeConfig) -> None:
    """Print the address on standard output, and how to use it on standard error."""
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if config.api_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
    print(f"{url}/v1", flush=True)
    print(f"serving {model}; use it with", file=sys.stderr)
    print(f"  memagent ask FILE -q QUESTION --base-url {url}/v1", file=sys.stderr)
    print(f"  curl {url}/v1/chat/completions{key} \\", file=sys.stderr)
    print(f"    -H 'Content-Type: application/json' -d '{body}'", file=sys.stderr)
    if not config.api_key and not config.host.startswith(LOOPBACK):
        _warn_open("set --api-key")


def _warn_open(remedy: str) -> None:
    print(
        f"warning: anyone who can reach this machine can use the server; {remedy}", file=sys.stderr
    )


def _report_gateway(url: str, reader: Reader, chosen: ServeOptions) -> None:
    """As `_report`, for the gateway."""
    from memagent.serve.reading.app import keys_of

    needs_key = keys_of(chosen.gateway, chosen.server).holder_of(None) is None
    print(f"{url}/v1", flush=True)
    print(
        f"reading with {reader.engine.model} through a window of {reader.config.window:,} tokens; use it with",
        file=sys.stderr,
    )
    key = "api_key=KEY" if needs_key else 'api_key="none"'
    print(f'  openai.OpenAI(base_url="{url}/v1", {key}), model "memagent"', file=sys.stderr)
    if not needs_key and not chosen.server.host.startswith(LOOPBACK):
        _warn_open("add a key with `memagent serve keys add NAME`")
