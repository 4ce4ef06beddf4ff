"""Settings under a name, in the user's config file."""

from pathlib import Path

import pytest

from memagent.errors import ConfigError
from memagent.profiles import list_profiles, load_profile, with_profile

TEXT = """
[profiles.work]
base_url = "http://gpu.lan:8000/v1"
model = "lab/reader-7b"
api_key_env = "WORK_KEY"
mode = "parallel"
chunk_tokens = 3000

[profiles.here]
engine = "local:smollm2-135m"
device = "cpu"
"""
KEY = "sk-work"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORK_KEY", KEY)
    path = tmp_path / "config.toml"
    path.write_text(TEXT)
    return path


def test_a_profile_gives_an_engine_and_settings_of_reading(path: Path) -> None:
    profile = load_profile("work", path)
    engine = profile.engine()
    assert engine.pop("api_key").get_secret_value() == KEY
    assert engine == {"base_url": "http://gpu.lan:8000/v1", "model": "lab/reader-7b"}
    assert profile.reading() == {"mode": "parallel", "chunk_tokens": 3000}
    assert load_profile("here", path).engine() == {"engine": "local:smollm2-135m", "device": "cpu"}
    assert list_profiles(path) == ["here", "work"]


def test_what_is_given_counts_more_than_the_profile(path: Path) -> None:
    given = {"model": None, "base_url": None, "api_key": None, "chunk_tokens": 500, "mode": None}
    found = with_profile(load_profile("work", path), given)
    assert (found["chunk_tokens"], found["mode"]) == (500, "parallel")
    assert (found["model"], found["base_url"]) == ("lab/reader-7b", "http://gpu.lan:8000/v1")
    assert found["api_key"].get_secret_value() == KEY


def test_the_key_goes_to_no_other_address(path: Path) -> None:
    given = {"model": None, "base_url": "http://elsewhere.example/v1", "api_key": None}
    found = with_profile(load_profile("work", path), given)
    assert (found["base_url"], found["api_key"]) == ("http://elsewhere.example/v1", None)


@pytest.mark.parametrize("given", [{"engine": "scripted"}, {"model": "another"}])
def test_an_engine_that_is_given_replaces_that_of_the_profile(
    path: Path, given: dict[str, str]
) -> None:
    every = {"engine": None, "model": None, "base_url": None, "api_key": None, "mode": None}
    found = with_profile(load_profile("work", path), {**every, **given})
    assert found == {**every, **given, "mode": "parallel"}


def test_a_key_that_is_not_set_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORK_KEY")
    with pytest.raises(ConfigError, match="takes its key from WORK_KEY, which is not set"):
        load_profile("work", path).engine()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[profiles.work]\napi_key = "sk-1"', "a profile holds no key; set `api_key_env`"),
        ('[profiles.work]\nbase_ulr = "x"', "unknown setting base_ulr; did you mean base_url?"),
        ("[profiles.work]\nchunk_tokens = 1", "chunk_tokens"),
        ('[profiles.work]\nengine = "scripted"\nmodel = "m"', "give either `engine` or `model`"),
        ('[profiles.worc]\nmodel = "m"', "there is no profile 'work'.*did you mean worc?"),
        ("[profile.work]", "unknown setting profile; did you mean profiles?"),
        ("[profiles", "cannot be read"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile("work", path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_file_there_is_no_profile(tmp_path: Path) -> None:
    assert list_profiles(tmp_path / "nosuch.toml") == []
    with pytest.raises(
        ConfigError,
        match=r"there is no file of profiles .*; create it with a table \[profiles.work\]",
    ):
        load_profile("work", tmp_path / "nosuch.toml")
