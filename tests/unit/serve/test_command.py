"""`memagent serve` before it serves: options, key, missing libraries, what is reported."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from memagent.cli.serve import run as serve
from memagent.config import ServeConfig
from memagent.errors import ConfigError


def options(**values: Any) -> ServeConfig:
    return serve.ServeOptions.parse({"engine": "local:tiny", **values}).server


def test_only_this_machine_can_connect_by_default() -> None:
    config = options(host=None, port=None, api_key=None)
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", 8000, None)


def test_the_key_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "from-environment")
    assert options().api_key == SecretStr("from-environment")
    assert options(api_key="given").api_key == SecretStr("given")


@pytest.mark.parametrize("library", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_library_is_named_with_its_extra(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ConfigError, match=rf'needs {library}; pip install "memagent\[local,serve\]"'
    ):
        CliRunner().invoke(
            serve.command, ["--engine", "local:tiny"], catch_exceptions=False, standalone_mode=False
        )


def test_an_open_address_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    serve._report("http://0.0.0.0:8000", "tiny", ServeConfig(host="0.0.0.0"))
    assert "set --api-key" in capsys.readouterr().err
    serve._report("http://127.0.0.1:8000", "tiny", ServeConfig())
    printed = capsys.readouterr()
    assert printed.out == "http://127.0.0.1:8000/v1\n"
    assert "--api-key" not in printed.err


def test_the_key_is_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    serve._report("http://127.0.0.1:8000", "tiny", ServeConfig(api_key=SecretStr("secret")))
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err
    assert "$MEMAGENT_API_KEY" in printed.err


def test_settings_of_the_gateway_need_the_reader() -> None:
    for name in ("window", "state_dir", "base_url", "tokenizer", "vllm_args"):
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} needs --reader$"):
            options(**{name: 5000})
    with pytest.raises(ConfigError, match="or --reader"):
        _ = serve.ServeOptions.parse({"engine": "openai:x"}).model


def test_behind_the_reader_the_environment_has_the_key_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "of-the-endpoint")
    assert options(reader=True).api_key is None
    assert options(reader=True, api_key="given").api_key == SecretStr("given")


def test_any_engine_can_be_behind_the_reader() -> None:
    values = {"engine": "openai:x", "reader": True, "base_url": "http://localhost:1/v1"}
    choice = serve.ServeOptions.parse(values).choose()
    assert (choice.kind, choice.model, choice.address) == ("openai", "x", "http://localhost:1/v1")
