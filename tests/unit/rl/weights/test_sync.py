"""New weights for the engine that samples replies: in this process, at endpoints, or never."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from memagent.config import LocalConfig
from memagent.engines.base import open_engine
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.engines.openai import EndpointEngine
from memagent.engines.vllm.engine import VllmEngine
from memagent.errors import ConfigError, EngineError
from memagent.rl.agents.client import Client
from memagent.rl.settings import RolloutSettings
from memagent.rl.types import Outcome
from memagent.rl.weights.models import Trained
from memagent.rl.weights.sync import Colocated, LoraEndpoint, WeightSync, open_sync
from memagent.types import Sampling
from tests.support import fake_vllm
from tests.support.collecting import collecting
from tests.support.jobs import jobs
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the ledger?"}]
SAMPLING = Sampling(max_tokens=20)
ALLOWED = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class Weights:
    """A stand-in for a model in training: saves its current adapter."""

    def __init__(self, rank: int = 8) -> None:
        self.note = "start"
        self._rank = rank

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        config = {"r": self._rank, "note": self.note}
        (folder / "adapter_config.json").write_text(json.dumps(config))


class Servers:
    """Opens engines on stand-ins for vLLM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[VllmEngine] = []

    def open(self, args: str = "--enable-lora", *, count: int = 1) -> VllmEngine:
        engine = open_engine(
            "vllm:some/model",
            vllm_python=sys.executable,
            vllm_args=args,
            vllm_log_dir=str(self._folder / "logs"),
            start_seconds=30,
            patience=0.1,
            data_parallel_size=count,
        )
        assert isinstance(engine, VllmEngine)
        self._opened.append(engine)
        return engine

    async def aclose(self) -> None:
        for engine in self._opened:
            await engine.aclose()


@pytest.fixture
async def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    fake_vllm.install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(ALLOWED, "True")
    opened = Servers(tmp_path)
    yield opened
    await opened.aclose()


async def said(engine: EndpointEngine) -> set[str]:
    """What each endpoint says."""
    replies = [await one.complete(MESSAGES, SAMPLING) for one in engine.endpoints]
    return {reply.text.partition(" at port")[0] for reply in replies}


def served(engine: VllmEngine) -> list[list[str]]:
    """The models that each server lists."""
    found = []
    for server in engine.servers:
        key = {"Authorization": f"Bearer {server.launch.api_key}"}
        with urlopen(Request(f"{server.base_url}/models", headers=key)) as response:
            found.append([model["id"] for model in json.load(response)["data"]])
    return found


# --- adapters at endpoints ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
async def test_every_endpoint_uses_the_adapter_that_was_pushed_last(
    servers: Servers, tmp_path: Path, count: int
) -> None:
    engine, weights = servers.open(count=count), Weights()
    sync = LoraEndpoint(engine, tmp_path / "sync", weights.save)
    for version in range(3):
        weights.note = f"weights {version}"
        await sync.push(version)
        assert await said(engine) == {f"weights {version}"}
        assert (await engine.complete(MESSAGES, SAMPLING)).text.startswith(f"weights {version}")
        assert sync.policy_version == version
    assert engine.tokenizer == "some/model"
    assert served(engine) == [["some/model", engine.model]] * count
    (left,) = (tmp_path / "sync").iterdir()
    assert left.name.startswith("v000002-")


async def test_other_weights_of_the_same_version_are_loaded_too(
    servers: Servers, tmp_path: Path
) -> None:
    """As after a warm start, which comes before the first step."""
    engine, weights = servers.open(), Weights()
    sync = LoraEndpoint(engine, tmp_path / "sync", weights.save)
    await sync.push(0)
    weights.note = "warm"
    await sync.push(0)
    assert await said(engine) == {"warm"}


async def test_a_resumed_run_removes_what_the_killed_one_left(
    servers: Servers, tmp_path: Path
) -> None:
    engine = servers.open()
    elsewhere = LoraEndpoint(engine, tmp_path / "other run", Weights().save)
    await elsewhere.push(7)
    others = engine.model
    engine.switch_model("some/model")
    killed = LoraEndpoint(engine, tmp_path / "sync", Weights().save)
    await killed.push(7)
    engine.switch_model("some/model")
    going_on = LoraEndpoint(engine, tmp_path / "sync", Weights().save)
    await going_on.push(7)
    assert served(engine) == [["some/model", others, engine.model]]
    assert len(list((tmp_path / "sync").iterdir())) == 1


async def test_rollouts_are_of_the_version_that_was_pushed(
    servers: Servers, tmp_path: Path
) -> None:
    engine = servers.open()
    sync = LoraEndpoint(engine, tmp_path / "sync", Weights().save)
    await sync.push(5)

    async def agent(task: Any, client: Client) -> Outcome:
        reply = await client.chat.completions.create(messages=MESSAGES)
        return Outcome(answer=reply.choices[0].message.content, reward=1.0)

    (group,) = await collecting(
        jobs(1), agent, engine, group_size=2, policy_version=sync.policy_version
    ).all()
    assert [row.policy_version for one in group.rollouts for row in one.samples] == [5, 5]


@pytest.mark.parametrize(
    ("args", "allowed", "rank", "reason"),
    [
        ("--enable-lora", "", 8, "HTTP 404: .*Not Found"),
        ("", "True", 8, "HTTP 500: LoRA is not enabled"),
        ("--enable-lora", "True", 32, "HTTP 500: LoRA rank 32 is greater"),
    ],
)
async def test_a_refused_adapter_names_how_to_start_the_server(
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: str,
    allowed: str,
    rank: int,
    reason: str,
) -> None:
    monkeypatch.setenv(ALLOWED, allowed)
    engine = servers.open(args)
    sync = LoraEndpoint(engine, tmp_path / "sync", Weights(rank).save)
    with pytest.raises(ConfigError) as raised:
        await sync.push(1)
    assert raised.match(reason)
    assert raised.match(rf"{ALLOWED}=True and with --enable-lora --max-lora-rank {rank}, where it")
    assert "\n" not in str(raised.value)
    assert engine.model == "some/model"


async def test_an_endpoint_that_is_gone_is_reported(servers: Servers, tmp_path: Path) -> None:
    engine = servers.open()
    sync = LoraEndpoint(engine, tmp_path / "sync", Weights().save)
    await sync.push(1)
    await servers.aclose()
    with pytest.raises(EngineError, match=r"failed for .* attempt"):
        await sync.push(2)


# --- the others -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


async def test_an_engine_on_the_same_weights_gets_the_new_version_without_a_copy(
    folder: Path,
) -> None:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        sync = Colocated(engine)
        await sync.push(12)
        call = asyncio.ensure_future(engine.complete(MESSAGES, Sampling(max_tokens=400)))
        while not engine.load.num_running:
            await asyncio.sleep(0.001)
        call.cancel()
        await sync.push(13)  # what was taken back may still be in its last step
        assert sync.policy_version == 13
        assert (await engine.complete(MESSAGES, SAMPLING)).policy_version == 13


async def test_new_weights_wait_for_cancelled_calls_that_were_not_started(folder: Path) -> None:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        with engine.hold():
            call = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=2)))
            await asyncio.sleep(0)
            call.cancel()
            pushing = asyncio.ensure_future(Colocated(engine).push(7))
            await asyncio.sleep(0.02)
            assert not pushing.done()
        await pushing
        assert engine.policy_version == 7


async def test_a_frozen_engine_keeps_the_version_of_the_start() -> None:
    sync = WeightSync()
    await sync.push(9)
    assert sync.policy_version == 0


def opened(folder: Path, *, adapter: Path | None = None) -> Trained:
    loaded = load(str(folder), adapter=None if adapter is None else str(adapter))
    return Trained(loaded=loaded, parameters=(), has_adapter=adapter is not None)


async def test_the_settings_choose_the_sync(servers: Servers, folder: Path, tmp_path: Path) -> None:
    trained = opened(folder)
    local = LocalEngine(trained.loaded, LocalConfig(cache_gb=0.01))
    assert isinstance(open_sync(RolloutSettings(), local, trained, tmp_path), Colocated)
    await local.aclose()
    elsewhere = RolloutSettings(engine="scripted", sync="none")
    assert type(open_sync(elsewhere, open_engine("scripted"), trained, tmp_path)) is WeightSync
    with pytest.raises(ConfigError, match=r'scripted cannot load .* `rollout\.sync="none"'):
        open_sync(RolloutSettings(engine="scripted"), open_engine("scripted"), trained, tmp_path)


async def test_the_pushed_adapter_is_the_one_that_peft_saves(
    servers: Servers, folder: Path, tmp_path: Path
) -> None:
    from peft import PeftConfig
    from safetensors.torch import load_file

    trained = opened(folder, adapter=make_tiny_adapter(folder, tmp_path / "adapter", rank=4))
    engine = servers.open("--enable-lora")
    sync = open_sync(RolloutSettings(engine="vllm:some/model"), engine, trained, tmp_path)
    await sync.push(3)
    (saved,) = (tmp_path / "sync").iterdir()
    assert PeftConfig.from_pretrained(str(saved)).r == 4
    given = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    pushed = load_file(saved / "adapter_model.safetensors")
    assert given.keys() == pushed.keys()
    assert all(given[name].equal(pushed[name]) for name in given)
