"""vLLM servers as engine replicas of a cluster: they get all weights and adapters while they run, and may die.

    make test-vllm

Skipped unless MEMAGENT_TEST_VLLM names a Python that has vLLM.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.cluster import Cluster
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.types import Completion, Message, Sampling
from memagent.watchdog import others_in
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

PYTHON = os.environ.get("MEMAGENT_TEST_VLLM")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm starts vLLM"),
    pytest.mark.timeout(1800),
]
ARGUMENTS = "--enforce-eager --dtype float32 --max-num-seqs 8"
RANK = 8
MESSAGES: list[Message] = [{"role": "user", "content": "Where is the red ledger kept?"}]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LONG = Sampling(max_tokens=400, temperature=1.0, seed=5)
ALL = slice(None)
NOISE_FACTOR = 2
"""How far a log-probability may be from the exact one, in units of the largest rounding error of our own float32.

vLLM adds up in another order than we do, so its roundings are others, of the same size. Random weights of this scale
make attention sharp, and three layers amplify a rounding of 6e-8 a thousandfold and more; by how much depends on the
tokens, so the unit is measured on them, over the whole vocabulary. Over 300 tokens bfloat16 in the values of the last
layer alone is 9 units off, in all keys 690; weights of another version are thousands.
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from tests.support.ray_nodes import ray_nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with ray_nodes(1):
            yield Cluster(wait_seconds=60, on_note=lambda text: None, is_local=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shapes, without tied embeddings. Heads of 64, the smallest of vLLM on a CPU."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 256, "max_position_embeddings": 1024}
    return [make_tiny_model(folder / str(n), "llama", seed=n, **sizes) for n in (0, 1)]


def settings(folder: Path) -> dict[str, Any]:
    return {
        "vllm_python": PYTHON,
        "vllm_args": ARGUMENTS,
        "vllm_log_dir": str(folder / "logs"),
        "start_seconds": 900,
    }


async def expected(model: Path, adapter: Path | None = None) -> Completion:
    loaded = load(str(model), adapter=None if adapter is None else str(adapter))
    async with LocalEngine(loaded) as engine:
        return await engine.complete(MESSAGES, GREEDY)


async def assert_greedy(reply: Completion, model: Path, adapter: Path | None = None) -> None:
    """Whether a reply is what the local engine says, and has the log-probabilities that the model gives it."""
    other = await expected(model, adapter)
    assert reply.completion_ids == other.completion_ids
    assert reply.prompt_ids == other.prompt_ids
    for one in (reply, other):
        assert_logprobs(one, model, adapter)


def assert_logprobs(
    reply: Completion, model: Path, adapter: Path | None = None, *, of: slice = ALL
) -> None:
    """Whether the tokens `of` a reply have the log-probabilities of a model, but for roundings of float32."""
    assert reply.prompt_ids is not None
    assert reply.completion_ids is not None
    assert reply.logprobs is not None
    ids = torch.tensor([[*reply.prompt_ids, *reply.completion_ids]])
    loaded = load(str(model), adapter=None if adapter is None else str(adapter)).model
    rounded_TV, exact_TV = logprobs_of(loaded, ids), logprobs_of(loaded.double(), ids)
    noise = float((rounded_TV - exact_TV).abs().max())
    first = len(reply.prompt_ids)
    exact_T = exact_TV[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
    found_T = torch.tensor(reply.logprobs, dtype=torch.float64)
    assert found_T.shape == exact_T.shape
    differences_T = (found_T - exact_T).abs()[of]
    assert differences_T.max() < NOISE_FACTOR * noise, f"float32 itself is off by {noise:.1e}"


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logprobs: torch.Tensor = model(ids).logits[0].double().log_softmax(-1)
    return logprobs


async def test_all_weights_are_published_to_a_running_server_which_is_replaced_when_it_is_killed(
    cluster: Cluster, models: list[Path], tmp_path: Path
) -> None:
    from memagent.rl.distributed.replicas import open_replicas
    from memagent.rl.distributed.vllm_replica import VllmReplica

    notes: list[str] = []
    opener = VllmReplica(model=str(models[0]), engine_settings=settings(tmp_path))
    async with open_replicas(
        cluster, opener, num=1, resources={"CPU": 1}, start_seconds=900, on_note=notes.append
    ) as engine:
        first = await engine.complete(MESSAGES, GREEDY)
        await assert_greedy(first, models[0])
        version = await publish_during_replies(engine, models)
        second = await engine.complete(MESSAGES, GREEDY)
        await assert_greedy(second, models[1])
        assert second.policy_version == version
        assert second.completion_ids != first.completion_ids

        running = [asyncio.ensure_future(engine.complete(MESSAGES, LONG)) for _ in range(4)]
        await asyncio.sleep(0.3)
        killed = kill_servers(str(models[0]))
        replies = await asyncio.gather(*running)
        assert notes[0].startswith("engine replica 0 died (vLLM ended")
        assert notes[-1] == "engine replica 0 is back"
        assert [others_in(group) for group in killed] == [[]], "its workers ended with it"
        assert all(reply.policy_version == version for reply in replies)
        await assert_greedy(await engine.complete(MESSAGES, GREEDY), models[1])


async def publish_during_replies(engine: Any, models: list[Path]) -> int:
    """Publish weights until replies go on over them; even versions are the first model, odd ones the second."""
    from memagent.rl.distributed.weights import ship

    for attempt, seconds in enumerate((0.5, 1.0, 2.0, 4.0, 8.0)):
        version = 4 + 2 * attempt
        await engine.publish(ship(load(str(models[0])).model.named_parameters()), version)
        running = [
            asyncio.ensure_future(engine.complete(MESSAGES, replace(LONG, seed=seed)))
            for seed in range(8)
        ]
        await asyncio.sleep(seconds)  # long enough for some tokens, on a machine of any speed
        weights = ship(load(str(models[1])).model.named_parameters(), bucket_bytes=200_000)
        await engine.publish(weights, version + 1)
        replies = await asyncio.gather(*running)
        for reply in replies:
            assert_sampled_by(reply, {version: models[0], version + 1: models[1]})
        if any(reply.token_versions is not None for reply in replies):
            return version + 1
    raise AssertionError("no reply went on over new weights")


def assert_sampled_by(reply: Completion, by_version: dict[int, Path]) -> None:
    """Each token has the log-probability that the model of its version gives it, after all tokens before it."""
    assert reply.completion_ids is not None
    assert reply.policy_version is not None
    versions = list(reply.token_versions or [reply.policy_version] * len(reply.completion_ids))
    assert versions == sorted(versions)
    for version in set(versions):
        first = versions.index(version)
        own = slice(first, first + versions.count(version))
        assert_logprobs(reply, by_version[version], of=own)


def kill_servers(model: str) -> list[int]:
    """End the vLLM servers of this test's own model, but not what watches over them; their groups."""
    killed = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and model in command:
            killed.append(os.getpgid(int(path.parent.name)))
            os.kill(int(path.parent.name), signal.SIGKILL)
    return killed


async def test_adapters_are_published_to_a_running_server(
    cluster: Cluster, models: list[Path], tmp_path: Path
) -> None:
    from memagent.rl.distributed.replicas import open_replicas
    from memagent.rl.distributed.vllm_replica import VllmReplica
    from memagent.rl.distributed.weights import ship

    adapters = [
        make_tiny_adapter(models[0], tmp_path / str(seed), rank=RANK, seed=seed) for seed in (0, 1)
    ]
    opener = VllmReplica(
        model=str(models[0]),
        adapter_config=(adapters[0] / "adapter_config.json").read_text(),
        num_versions=2,
        engine_settings=settings(tmp_path),
    )
    async with open_replicas(
        cluster, opener, num=1, resources={"CPU": 1}, start_seconds=900
    ) as engine:
        for version, adapter in enumerate(adapters, start=1):
            named = load(str(models[0]), adapter=str(adapter)).model.named_parameters()
            await engine.publish(ship((n, p) for n, p in named if "lora_" in n), version)
            reply = await engine.complete(MESSAGES, GREEDY)
            await assert_greedy(reply, models[0], adapter)
            assert reply.policy_version == version


def test_training_steps_with_a_server_that_is_killed_between_them(
    models: list[Path], tmp_path: Path
) -> None:
    from memagent.tracking import read_metrics
    from tests.support.cluster_runs import train
    from tests.support.ray_nodes import running_nodes
    from tests.support.tiny_training import tiny_run

    config = tiny_run(tmp_path, steps=3, warm_start=None, validation=None, objective={})
    config["model"] = {"source": str(models[0])}
    config["rollout"] = {
        "prompts": 2,
        "group_size": 2,
        "engine": f"vllm:{models[0]}",
        "engine_settings": settings(tmp_path),
    }

    def kill(trainer: Any, step: int) -> None:
        if step == 1:
            kill_servers(str(models[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with running_nodes(1, num_cpus=4) as nodes:
            config["cluster"] = {"address": nodes.address, "start_seconds": 900}
            watch = train(config, tmp_path / "run", kill)
    records = read_metrics(tmp_path / "run")
    assert watch.steps == [1, 2, 3]
    assert [record["staleness_max"] for record in records] == [0.0, 0.0, 0.0]
    assert all(record["mismatch_kl"] < 1e-4 for record in records)
    assert sum(record["num_failed"] for record in records) == 0
    assert "engine replica 0 is back" in watch.notes
