"""`memagent serve`: a local model behind an OpenAI-compatible address."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click
from pydantic import SecretStr

from memagent.cli.models import pull_if_known
from memagent.cli.shared.options import PanelCommand, given, panel_option, settings_options
from memagent.config import LocalConfig
from memagent.engines.base import check_engine, open_engine, split_spec
from memagent.errors import ConfigError
from memagent.serve.settings import ServeConfig

API_KEY_VARIABLE = "MEMAGENT_API_KEY"
LOOPBACK = ("127.", "::1", "localhost")
LIBRARIES = ("fastapi", "uvicorn")


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
    """Serve a local model over HTTP, as OpenAI does it: /v1/chat/completions and /v1/completions
    (both can stream), /v1/models, /health, and /metrics for Prometheus.

    \b
      memagent serve --engine local:smollm2-135m
      memagent ask book.txt -q "Who inherits the house?" --base-url http://127.0.0.1:8000/v1

    Only this machine can ask it unless --host says otherwise. Ctrl-C or SIGTERM lets running requests
    finish; a second one does not.
    """
    config = _config(options)
    model = _local_model(options["engine"])
    _require_libraries()
    check_engine("local")
    pull_if_known(model)
    with open_engine(options["engine"], **given(LocalConfig, options)) as engine:
        # imported here: both bring torch, and `check_engine` says what to install where it is missing
        from memagent.engines.local.engine import LocalEngine
        from memagent.serve.run import serve

        assert isinstance(engine, LocalEngine)
        serve(engine, config, on_ready=lambda url: _tell(url, engine.model, config))


def _config(options: dict[str, Any]) -> ServeConfig:
    values = given(ServeConfig, options)
    if "api_key" not in values and (key := os.environ.get(API_KEY_VARIABLE)):
        values["api_key"] = SecretStr(key)
    return ServeConfig.parse(values)


def _local_model(engine: str) -> str:
    kind, model = split_spec(engine)
    if kind != "local":
        raise ConfigError(f"{engine!r} is not a model on this machine; give --engine local:MODEL")
    return model


def _require_libraries() -> None:
    for library in LIBRARIES:
        try:
            import_module(library)
        except ModuleNotFoundError as error:
            if error.name != library:
                raise
            raise ConfigError(
                f'memagent serve needs {library}; pip install "memagent[local,serve]"'
            ) from None


def _tell(url: str, model: str, config: ServeConfig) -> None:
    """The address on standard output, what to do with it on standard error."""
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if config.api_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
    print(f"{url}/v1", flush=True)
    print(f"serving {model}; ask it with", file=sys.stderr)
    print(f"  memagent ask FILE -q QUESTION --base-url {url}/v1", file=sys.stderr)
    print(f"  curl {url}/v1/chat/completions{key} \\", file=sys.stderr)
    print(f"    -H 'Content-Type: application/json' -d '{body}'", file=sys.stderr)
    if not config.api_key and not config.host.startswith(LOOPBACK):
        print("anybody who can reach this machine can ask it: give --api-key", file=sys.stderr)
