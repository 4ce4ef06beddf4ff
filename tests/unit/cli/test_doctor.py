"""What works on this machine, and the command that adds what is missing."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from memagent.cli import doctor
from memagent.cli.doctor import Finding, examine
from memagent.engines.base import ENGINES


def found(area: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine() if finding.area == area}


def test_engines_devices_and_folders_are_looked_at() -> None:
    engines = found("engines")
    assert set(engines) == set(ENGINES)
    assert engines["scripted"].state == "ok"
    assert engines["local"].detail == "llama.cpp runs GGUF files; torch runs other models on cpu"
    assert "cpu" in engines["local"].detail
    folders = found("folders")
    assert {finding.state for finding in folders.values()} == {"ok"}
    assert re.search(r", [\d,]+ MB used, \d+ GB free$", folders["cache"].detail)


def test_a_missing_library_is_named_with_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ['nosuch-library>=1; extra == "viewer"', 'pydantic>=2; extra == "viewer"', "click>=8"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    [extra] = found("extras").values()
    assert (extra.name, extra.state) == ("viewer", "missing")
    assert extra.detail == "without nosuch-library"
    assert extra.remedy == 'pip install "memagent[viewer]"'


def test_an_engine_whose_library_is_missing_names_the_command_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_installed = doctor._is_installed
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name != "vllm" and is_installed(name))
    engine = found("engines")["vllm"]
    assert engine.state == "missing"
    assert engine.detail == "vLLM is not installed for this Python"
    assert engine.remedy == 'pip install "memagent[vllm]"'


def test_profiles_are_checked_and_endpoints_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MEMAGENT_BASE_URL", "http://user:secret@127.0.0.1:9/v1")
    (tmp_path / "memagent").mkdir()
    (tmp_path / "memagent" / "config.toml").write_text(
        '[profiles.good]\nbase_url = "http://127.0.0.1:9/v1"\n[profiles.bad]\nnosuch = 1\n'
    )
    profiles = found("profiles")
    assert (profiles["good"].state, profiles["good"].detail) == ("ok", "http://127.0.0.1:9/v1")
    assert profiles["bad"].state == "broken"
    assert "unknown setting nosuch" in profiles["bad"].detail
    [endpoint] = found("endpoint").values()
    assert (endpoint.name, endpoint.state) == ("http://127.0.0.1:9/v1", "note")


def test_an_endpoint_that_does_not_answer_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MEMAGENT_BASE_URL", "http://127.0.0.1:9/v1")
    [endpoint] = [each for each in examine(connects=True) if each.area == "endpoint"]
    assert endpoint.state == "broken"
