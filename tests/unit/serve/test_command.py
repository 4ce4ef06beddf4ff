"""`memagent serve` before it serves: options, key, missing libraries, what is reported."""

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from memagent.cli.serve import run as serve
from memagent.config import ServeConfig
from memagent.errors import ConfigError
from memagent.profiles import config_file


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
    with pytest.raises(ConfigError, match=rf'needs {library}; .*"memagent\[local,serve\]"'):
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


PROFILES = """
[profiles.work]
base_url = "http://gpu.lan:8000/v1"
model = "lab/reader-7b"
api_key_env = "WORK_KEY"
mode = "parallel"
tokenizer = "bytes"

[profiles.here]
engine = "local:tiny"
device = "cpu"
chunk_tokens = 1000
"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROFILES)
    monkeypatch.setenv("WORK_KEY", "of-the-endpoint")


def parsed(*arguments: str) -> serve.ServeOptions:
    context = serve.command.make_context("run", list(arguments))
    return serve.ServeOptions.parse(context.params)


@pytest.mark.usefixtures("profiles")
def test_a_profile_gives_the_engine_behind_the_reader_and_its_key() -> None:
    chosen = parsed("--reader", "--profile", "work", "--api-key", "of-the-gateway")
    choice = chosen.choose()
    assert (choice.model, choice.address) == ("lab/reader-7b", "http://gpu.lan:8000/v1")
    assert choice.settings["api_key"].get_secret_value() == "of-the-endpoint"
    assert chosen.server.api_key == SecretStr("of-the-gateway")
    assert parsed("--reader", "--profile", "work").server.api_key is None
    assert (chosen.reading, chosen.tokenizer) == ({"mode": "parallel"}, "bytes")
    assert parsed("--reader", "--profile", "work", "--mode", "in_order").reading == {
        "mode": "in_order"
    }


@pytest.mark.usefixtures("profiles")
def test_a_model_that_is_served_as_it_is_takes_no_settings_of_reading_from_a_profile() -> None:
    chosen = parsed("--profile", "here")
    assert (chosen.model, chosen.local.device) == ("tiny", "cpu")
    assert parsed("--profile", "here", "--reader").reading == {"chunk_tokens": 1000}
    with pytest.raises(
        ConfigError, match=r"^the profile work names an endpoint; it needs --reader$"
    ):
        parsed("--profile", "work")
    assert parsed("--profile", "work", "--engine", "local:other").model == "other"
