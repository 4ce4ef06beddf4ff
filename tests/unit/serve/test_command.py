"""`memagent serve` before it serves: options, key, missing libraries, what is told."""

from __future__ import annotations

import sys

import pytest
from pydantic import SecretStr

from memagent.cli import serve
from memagent.errors import ConfigError
from memagent.serve.settings import ServeConfig


def test_only_this_machine_may_ask_by_default() -> None:
    config = serve._config({"host": None, "port": None, "api_key": None})
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", 8000, None)


def test_the_key_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "from-environment")
    assert serve._config({}).api_key == SecretStr("from-environment")
    assert serve._config({"api_key": "given"}).api_key == SecretStr("given")


@pytest.mark.parametrize("library", ["fastapi", "uvicorn"])
def test_a_missing_library_is_named_with_its_extra(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ConfigError, match=rf'needs {library}; pip install "memagent\[local,serve\]"'
    ):
        serve._require_libraries()


def test_an_open_address_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    serve._tell("http://0.0.0.0:8000", "tiny", ServeConfig(host="0.0.0.0"))
    assert "give --api-key" in capsys.readouterr().err
    serve._tell("http://127.0.0.1:8000", "tiny", ServeConfig())
    told = capsys.readouterr()
    assert told.out == "http://127.0.0.1:8000/v1\n"
    assert "--api-key" not in told.err


def test_the_key_is_never_told(capsys: pytest.CaptureFixture[str]) -> None:
    serve._tell("http://127.0.0.1:8000", "tiny", ServeConfig(api_key=SecretStr("secret")))
    told = capsys.readouterr()
    assert "secret" not in told.out + told.err
    assert "$MEMAGENT_API_KEY" in told.err
