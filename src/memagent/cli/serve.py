"""`memagent serve`: a local model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import click
from pydantic import SecretStr

from memagent.cli.shared.engine import pull_known
from memagent.cli.shared.options import PanelCommand, given, panel_option, settings_options
from memagent.cli.shared.run_command import CommandConsole
from memagent.config import LocalConfig, ServeConfig
from memagent.engines.base import check_engine, open_engine, split_spec
from memagent.errors import ConfigError
from memagent.extras import require

if TYPE_CHECKING:
    from memagent.serve.request_log import RequestRecord

API_KEY_VARIABLE = "MEMAGENT_API_KEY"
LOOPBACK = ("127.", "::1", "localhost")
LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `memagent serve`."""

    engine: str
    server: ServeConfig
    local: LocalConfig

    @classmethod
    def parse(cls, options: dict[str, Any]) -> Self:
        """Options of the command line; the key may come from the environment."""
        server = given(ServeConfig, options)
        if "api_key" not in server and (key := os.environ.get(API_KEY_VARIABLE)):
            server["api_key"] = SecretStr(key)
        return cls(
            engine=options["engine"],
            server=ServeConfig.parse(server),
            local=LocalConfig.parse(given(LocalConfig, options)),
        )

    @property
    def model(self) -> str:
        """The model of `engine`, which must be a local one."""
        kind, model = split_spec(self.engine)
        if kind != "local":
            raise ConfigError(f"{self.engine!r} is not a local model; use --engine local:MODEL")
        return model


@click.command("serve", cls=PanelCommand)
@panel_option(
    "--engine",
    required=True,
    panel="Options",
    help="The model to serve, as local:MODEL: a pulled one by name, a folder, or a GGUF file.",
)
@settings_options(ServeConfig, panel="Server")
@settings_options(LocalConfig, panel="Local model")
def command(**options: Any) -> None:
    """Serve a local model over HTTP with OpenAI's API: /v1/chat/completions and /v1/completions (both
    can stream), /v1/models, /health, and /metrics for Prometheus.

    \b
      memagent serve --engine local:smollm2-135m
      memagent ask book.txt -q "Who inherits the house?" --base-url http://127.0.0.1:8000/v1

    Each request is a line on standard error, without its text; --request-log false leaves them out.
    Only this machine can connect unless --host is set. On Ctrl-C or SIGTERM running requests finish
    first; a second signal shuts down immediately.
    """
    chosen = ServeOptions.parse(options)
    model = chosen.model
    for library in LIBRARIES:
        require(library, f'memagent serve needs {library}; pip install "memagent[local,serve]"')
    check_engine("local")
    # imported here: both import torch, and `check_engine` names the extra if it is missing
    from memagent.engines.local.engine import LocalEngine
    from memagent.serve.run import serve
    from memagent.web.listening import bound

    with bound(
        chosen.server.host, chosen.server.port
    ) as listener:  # before a model is fetched and loaded in vain
        pull_known(model, CommandConsole())
        with open_engine(chosen.engine, **chosen.local.model_dump(exclude_unset=True)) as engine:
            assert isinstance(engine, LocalEngine)
            serve(
                engine,
                chosen.server,
                listener,
                on_ready=lambda url: _report(url, engine.public_name, chosen.server),
                on_request=_log_request if chosen.server.request_log else None,
                on_drain=_report_drain,
            )


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
        print(
            "warning: anyone who can reach this machine can use the server; set --api-key",
            file=sys.stderr,
        )
