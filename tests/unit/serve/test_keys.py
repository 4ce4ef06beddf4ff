"""Keys of the gateway: hashed, limited, removed at once."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.datastructures import Headers

from memagent.cli.serve.keys import command
from memagent.config import KeyLimits
from memagent.errors import ConfigError
from memagent.serve.keys import KeyStore, OneKey, checked_holder, key_in
from memagent.serve.wire import ApiError


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys.json")


def test_the_file_has_no_key_and_is_private(store: KeyStore, tmp_path: Path) -> None:
    key = store.add("anna")
    file = tmp_path / "keys.json"
    assert len(key) > 30
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_a_file_of_keys_that_cannot_be_looked_at_is_the_servers_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = KeyStore(tmp_path / "file" / "keys.json")
    with pytest.raises(ApiError) as caught:
        checked_holder(store, Headers({"authorization": "Bearer mem-1"}))
    assert caught.value.status == 503


def test_a_key_gives_its_holder_and_limits(store: KeyStore) -> None:
    key = store.add("anna", KeyLimits(max_cost=2.5))
    store.add("bert")
    holder = store.holder_of(key)
    assert holder is not None
    assert (holder.name, holder.limits) == ("anna", KeyLimits(max_cost=2.5))
    assert store.holder_of(key + "x") is None
    assert store.holder_of(None) is None
    assert store.holder_of("") is None


def test_a_removed_key_stops_working_in_other_processes_too(
    store: KeyStore, tmp_path: Path
) -> None:
    key, other = store.add("anna"), KeyStore(tmp_path / "keys.json")
    assert other.holder_of(key) is not None
    store.remove("anna")
    assert other.holder_of(key) is None
    assert store.exists  # a key is needed all the same


def test_a_file_of_keys_counts_from_when_it_is_written_and_for_good(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for before, opened_by in ((OneKey(None), None), (OneKey("one"), "one")):
        store = KeyStore(file, without_file=before)
        assert store.holder_of(opened_by) is not None
        key = KeyStore(file).add("anna")
        assert store.holder_of(opened_by) is None
        assert store.holder_of(key) is not None
        file.unlink()
        assert store.holder_of(opened_by) is None
        assert store.holder_of(key) is None


def test_names_are_unique_and_visible(store: KeyStore) -> None:
    store.add("anna")
    with pytest.raises(ConfigError, match="already"):
        store.add("anna ")
    for name in ("", "\x1b[2J", "x" * 65):
        with pytest.raises(ConfigError, match="visible characters"):
            store.add(name)
    with pytest.raises(ConfigError, match="did you mean anna"):
        store.remove("ann")


def test_a_damaged_file_opens_no_door(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    for text in ("", "{}", '[{"name": "x"}]', "nonsense"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not a file of keys"):
            KeyStore(file).holder_of("mem-x")


def test_a_key_is_sent_as_bearer() -> None:
    assert key_in(Headers({"authorization": "Bearer  abc "})) == "abc"
    assert key_in(Headers({"authorization": "Basic abc"})) is None
    assert key_in(Headers({})) is None
    assert checked_holder(OneKey("abc"), Headers({"authorization": "bearer abc"})).name == "key"
    for wrong in ("", "Bearer", "Bearer ab", "Bearer äbc"):
        with pytest.raises(ApiError) as caught:
            checked_holder(OneKey("abc"), Headers({"authorization": wrong}))
        assert caught.value.status == 401


def test_the_command_adds_lists_and_removes_keys(tmp_path: Path) -> None:
    place = ["--state-dir", str(tmp_path)]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(command, [*arguments, *place], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    key = run("add", "anna", "--max-concurrency", "4").strip()
    store = KeyStore(tmp_path / "keys.json")
    assert store.holder_of(key) is not None
    assert run("list").startswith("anna  20")
    assert "max_concurrency=4" in run("list")
    listed = json.loads(run("list", "--json"))
    assert listed[0]["limits"] == {"max_concurrency": 4}
    assert "sha256" not in listed[0]
    run("rm", "anna")
    assert store.list() == []
