"""What runs on the nodes of a cluster, on one GPU and without Ray: a trainer rank with FSDP2 and nccl, an engine
replica that sleeps, weights that another process on the same GPU copies.

    python -m pytest tests/gpu/test_gpu_cluster.py -v

On a CPU, with gloo, the same laws hold.
"""

import asyncio
import base64
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from memagent.errors import EngineError
from memagent.rl.distributed.ranks import RankSpec, join_group, open_learner
from memagent.rl.distributed.replicas import EmbeddedModel, EmbeddedReplica
from memagent.rl.distributed.vllm_replica import gpu_id, updates_of
from memagent.rl.distributed.weights import (
    Bucket,
    GroupSpec,
    IpcRoute,
    SharedBuffer,
    WeightGroup,
    WeightReceiver,
    buffer_bytes,
    fill,
    specs_of,
    split,
)
from memagent.rl.distributed.weights import opened as opened_buffer
from memagent.rl.settings import ModelSettings, TrainConfig, parse_config
from memagent.rl.types import Group
from memagent.rl.update.learner import Learner, Ranks
from memagent.rl.weights import models as models_module
from tests.support.replica_models import expected, greedy, named
from tests.support.rollouts import near_policy, random_groups
from tests.support.tiny_models import make_tiny_model
from tests.support.tiny_training import tiny_run

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CACHE_GB = 0.25
MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shapes."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), "qwen2", seed=seed) for seed in (0, 1)]


@pytest.fixture
def store() -> Iterator[Any]:
    """Where the ranks of a group meet; the group ends with the test."""
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def groups(models: list[Path]) -> list[Group]:
    from memagent.engines.local.loading import load

    model = load(str(models[0])).model
    return near_policy(model, random_groups(model, num_groups=4, group_size=4), noise=0.01)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a GPU, so that results can be compared."""
    load = models_module.load

    def exactly(*arguments: Any, **settings: Any) -> Any:
        return load(*arguments, **{**settings, "dtype": torch.float32})

    monkeypatch.setattr(models_module, "load", exactly)


def run_config(folder: Path, model: Path, *, offload: bool) -> TrainConfig:
    cluster = {"offload": offload}
    values = tiny_run(folder, cluster=cluster, warm_start=None, validation=None, objective={})
    values["model"] = {"source": str(model)}
    return parse_config(values)


def trained(learner: Learner, groups: list[Group], folder: Path) -> list[dict[str, float]]:
    """Metrics of two steps, after which it is saved."""
    learner.begin(learner.config.optim, num_steps=2)
    metrics = [learner.update(groups, policy_version=step) for step in range(2)]
    folder.mkdir()
    learner.save(folder)
    return metrics


@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "offloaded"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_sharded_rank_trains_saves_and_publishes_what_a_whole_one_does(
    device: str,
    *,
    offload: bool,
    models: list[Path],
    groups: list[Group],
    store: Any,
    tmp_path: Path,
) -> None:
    spec = RankSpec(
        ranks=Ranks(rank=0, num=1),
        config=run_config(tmp_path, models[0], offload=offload),
        source=str(models[0]),
        run_dir=str(tmp_path),
        on_gpu=device == "cuda",
        meeting=f"127.0.0.1:{store.port}",
    )
    join_group(spec, store)
    assert f"{device}:{'nccl' if device == 'cuda' else 'gloo'}" in dist.get_backend_config()
    whole, sharded = (open_learner(spec, is_sharded=is_sharded) for is_sharded in (False, True))
    assert sharded.trained.is_sharded
    alone = trained(whole, groups, tmp_path / "whole")
    for found, one in zip(trained(sharded, groups, tmp_path / "sharded"), alone, strict=True):
        assert found == pytest.approx(one, rel=1e-3, abs=1e-5)
    published, kept = sharded.weights(), whole.weights()
    assert {value.device.type for value in published.values()} == {"cpu"}
    for name, value in published.items():
        torch.testing.assert_close(value, kept[name].cpu(), rtol=1e-3, atol=1e-4)
    assert (tmp_path / "sharded" / "model").is_dir()


def opened(model: Path, device: str) -> EmbeddedModel:
    return EmbeddedReplica(
        model=ModelSettings(source=str(model), device=device),
        source=str(model),
        seed=0,
        engine_settings={"cache_gb": CACHE_GB},
    )()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_replica_that_sleeps_frees_the_device_and_wakes_with_its_weights(
    device: str, models: list[Path]
) -> None:
    gc.collect()
    gc.disable()  # what is freed is freed by the replica
    try:
        # needs no plug-in, which a GPU machine may not have
        asyncio.run(sleep_and_wake(device, models))
    finally:
        gc.enable()


async def sleep_and_wake(device: str, models: list[Path]) -> None:
    before = allocated(device)
    replica = opened(models[0], device)
    try:
        first = await greedy(replica.engine)
        assert first.completion_ids == (await expected(models[0])).completion_ids
        if device == "cuda":
            assert allocated(device) - before > CACHE_GB * 1e9 / 2
        for version, model in ((3, models[1]), (4, models[0])):
            await replica.sleep()
            assert allocated(device) - before < 4 * MIB
            with pytest.raises(EngineError, match="sleeps while the ranks train"):
                await greedy(replica.engine)
            await replica.wake()
            replica.take(named(model), version)
            reply = await greedy(replica.engine)
            assert reply.completion_ids == (await expected(model)).completion_ids
            assert reply.policy_version == version
        await replica.sleep()
        await replica.wake()
        again = await greedy(replica.engine)
        assert (again.completion_ids, again.policy_version) == (first.completion_ids, 4)
    finally:
        await replica.aclose()


# --- weights that are sent directly ---------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def open_and_sum(requests: Any, answers: Any) -> None:
    """Another process: open a buffer, and say what is in a copy of it, as often as it is asked."""
    while (handle := requests.get()) is not None:
        flat = opened_buffer(handle)
        while requests.get() == "copy":
            answers.put((flat.device.type, int(flat.clone().sum())))
        del flat


@needs_gpu
def test_another_process_opens_memory_of_the_gpu_and_sees_what_is_written_to_it() -> None:
    context = multiprocessing.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    other = context.Process(target=open_and_sum, args=(requests, answers))
    other.start()
    before = allocated("cuda")
    for _ in range(3):  # pushes, each with a buffer of its own
        shared: Any = SharedBuffer(4 * MIB, "cuda")
        requests.put(shared.handle)
        for value in (1, 2):  # buckets, in the same buffer
            shared.flat.fill_(value)
            torch.cuda.synchronize()
            requests.put("copy")
            assert answers.get(timeout=120) == ("cuda", value * 4 * MIB)
        requests.put("done")
        shared.close()
    requests.put(None)
    other.join(60)
    assert other.exitcode == 0
    torch.cuda.ipc_collect()
    assert allocated("cuda") == before, "what was handed out is freed"


def take_all(model: Path, device: str, buckets: list[Bucket], handles: Any, answers: Any) -> None:
    """A replica in another process: weights arrive in a buffer, bucket by bucket."""
    asyncio.run(take_and_reply(model, device, buckets, handles, answers))


async def take_and_reply(
    model: Path, device: str, buckets: list[Bucket], handles: Any, answers: Any
) -> None:
    replica = opened(model, device)
    receiver = WeightReceiver()
    route = IpcRoute(push="push", seconds=120)

    async def deliver() -> None:
        for _ in buckets:
            handle = await asyncio.to_thread(handles.get)
            answers.put(await receiver.deliver("push", handle, 120))

    delivering = asyncio.ensure_future(deliver())
    await replica.receive(receiver.received(route, buckets, device), 5)
    await delivering
    reply = await greedy(replica.engine)
    answers.put((reply.policy_version, reply.completion_ids))
    await replica.aclose()


@pytest.mark.parametrize("device", DEVICES)
def test_a_replica_takes_weights_from_the_buffer_of_a_rank_on_its_device(
    device: str, models: list[Path]
) -> None:
    weights = [(name, one.detach().to(device)) for name, one in named(models[1])]
    buckets = split(specs_of(weights), bucket_bytes=100_000)
    assert len(buckets) > 2
    context = multiprocessing.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    arguments = (models[0], device, buckets, handles, answers)
    replica = context.Process(target=take_all, args=arguments)
    replica.start()
    shared: Any = SharedBuffer(buffer_bytes(buckets), device)
    for _ in fill(weights, buckets, shared.flat):
        if device == "cuda":
            torch.cuda.synchronize()
        handles.put(shared.handle)
        assert answers.get(timeout=240) is None
    assert answers.get(timeout=120) == (5, asyncio.run(expected(models[1])).completion_ids)
    replica.join(60)
    shared.close()


@needs_gpu
def test_a_weight_group_broadcasts_with_nccl_and_lives_beside_the_group_of_the_ranks(
    store: Any,
) -> None:
    meeting = f"127.0.0.1:{store.port}"
    spec = GroupSpec(name="weights", meeting=meeting, size=1, on_gpu=True, seconds=60)
    group = WeightGroup(spec, 0, store)
    flat = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(MIB)
    group.broadcast(flat)
    torch.cuda.synchronize()
    assert int(flat[-1]) == 255
    group.close()


@needs_gpu
def test_requests_for_vllm_name_the_gpu_and_the_bytes_of_a_bucket() -> None:
    weights = [(f"layer.{number}", torch.full((64, 64), 2.0, device="cuda")) for number in range(3)]
    buckets = split(specs_of(weights), bucket_bytes=2 * 64 * 64 * 4)
    buffer = torch.empty(buffer_bytes(buckets), dtype=torch.uint8, device="cuda")

    async def requests() -> list[dict[str, Any]]:
        return [one async for one in updates_of(fill(weights, buckets, buffer))]

    found = asyncio.run(requests())
    assert [one["names"] for one in found] == [["layer.0", "layer.1"], ["layer.2"]]
    assert [one["tensor_sizes"] for one in found] == [[16384, 16384], [16384]]
    for one in found:
        handles = pickle.loads(base64.b64decode(one["ipc_handles_pickled"]))
        assert list(handles) == [gpu_id(weights[0][1])]
