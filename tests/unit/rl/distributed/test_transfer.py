"""Weights from a rank to replicas without Ray: members of a group in threads, with gloo."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.rl.distributed.weights import (
    BroadcastRoute,
    GroupSpec,
    IpcRoute,
    SharedBuffer,
    WeightReceiver,
    WeightSender,
    direct_way,
    specs_of,
    split,
    tensors,
)
from memagent.rl.settings import parse_config
from tests.support.replica_models import embedded, expected, greedy, named
from tests.support.tiny_models import make_tiny_model

WEIGHTS = [(f"layer.{number}", torch.full((10, 10), float(number))) for number in range(6)]
BUCKETS = split(specs_of(WEIGHTS), bucket_bytes=900)
SECONDS = 20


def group(sender: WeightSender, name: str = "first", *, size: int = 3) -> GroupSpec:
    meeting = sender.meet("127.0.0.1")
    return GroupSpec(name=name, meeting=meeting, size=size, on_gpu=False, seconds=SECONDS)


def take(receiver: WeightReceiver, route: BroadcastRoute) -> dict[str, torch.Tensor]:
    return {n: one.clone() for n, one in tensors(receiver.received(route, BUCKETS, "cpu"))}


def test_all_members_of_a_group_get_all_weights_and_it_serves_again() -> None:
    assert len(BUCKETS) == 3
    sender, receivers = WeightSender(), [WeightReceiver(), WeightReceiver()]
    spec = group(sender)
    with ThreadPoolExecutor() as threads:
        for factor in (1.0, 2.0):
            taking = [
                threads.submit(take, one, BroadcastRoute(group=spec, member=member))
                for member, one in enumerate(receivers, start=1)
            ]
            weights = ((name, factor * one) for name, one in WEIGHTS)
            route = BroadcastRoute(group=spec, member=0)
            assert sender.send(weights, BUCKETS, route, "cpu") is None
            for one in taking:
                found = one.result(timeout=60)
                assert list(found) == [name for name, _ in WEIGHTS]
                assert all(torch.equal(found[name], factor * value) for name, value in WEIGHTS)


def test_a_member_that_leaves_in_the_middle_is_an_error_of_the_others_and_a_new_group_works() -> (
    None
):
    sender, receivers = WeightSender(), [WeightReceiver(), WeightReceiver()]
    spec, asked = group(sender), []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in WEIGHTS:
            asked.append(name)
            yield name, one

    def leave() -> None:
        arriving = receivers[0].received(BroadcastRoute(group=spec, member=1), BUCKETS, "cpu")
        next(arriving)
        arriving.close()

    started = time.monotonic()
    with ThreadPoolExecutor() as threads:
        leaving = threads.submit(leave)
        other = threads.submit(take, receivers[1], BroadcastRoute(group=spec, member=2))
        reason = sender.send(weights(), BUCKETS, BroadcastRoute(group=spec, member=0), "cpu")
        leaving.result(timeout=60)
        failure = other.exception(timeout=60)
    assert reason is not None
    assert reason.startswith("a member of the group for weights is gone: ")
    assert "gloo" not in reason
    assert isinstance(failure, RuntimeError)
    assert time.monotonic() - started < SECONDS, "nobody waits for the limit"
    assert asked == [name for name, _ in WEIGHTS], "other ranks gather them too"

    again = group(sender, "second", size=2)
    with ThreadPoolExecutor() as threads:
        taking = threads.submit(take, receivers[1], BroadcastRoute(group=again, member=1))
        route = BroadcastRoute(group=again, member=0)
        assert sender.send(iter(WEIGHTS), BUCKETS, route, "cpu") is None
        assert torch.equal(taking.result(timeout=60)["layer.5"], WEIGHTS[5][1])


def test_a_group_that_nobody_joins_is_an_error_in_time() -> None:
    sender = WeightSender()
    meeting = sender.meet("127.0.0.1")
    spec = GroupSpec(name="alone", meeting=meeting, size=2, on_gpu=False, seconds=0.5)
    started = time.monotonic()
    reason = sender.send(iter(WEIGHTS), BUCKETS, BroadcastRoute(group=spec, member=0), "cpu")
    assert reason
    assert time.monotonic() - started < 20


def deliver(receiver: WeightReceiver, *, num: int, seconds: float) -> list[str | None]:
    """The reply to a rank for each bucket, one after the other in one buffer."""
    shared: Any = SharedBuffer(900, "cpu")

    async def all_of_them() -> list[str | None]:
        answers = []
        for number, bucket in enumerate(BUCKETS[:num]):
            shared.flat[: bucket.num_bytes].view(torch.float32).fill_(float(number))
            answers.append(await receiver.deliver("push", shared.handle, seconds))
        return answers

    answers = asyncio.run(all_of_them())
    shared.close()
    return answers


def test_buckets_in_shared_memory_are_copied_one_after_the_other() -> None:
    receiver = WeightReceiver()
    route = IpcRoute(push="push", seconds=20)
    found: dict[str, torch.Tensor] = {}

    def copy() -> None:
        for name, one in tensors(receiver.received(route, BUCKETS, "cpu")):
            found[name] = one.clone()

    copying = threading.Thread(target=copy)
    copying.start()
    assert deliver(receiver, num=3, seconds=20) == [None, None, None]
    copying.join(60)
    assert [float(one[0, 0]) for one in found.values()] == [0, 0, 1, 1, 2, 2]


def test_a_bucket_that_is_not_copied_is_told_to_the_rank() -> None:
    assert deliver(WeightReceiver(), num=1, seconds=0.2) == [
        "a bucket of weights was not copied within 0.2 s"
    ]
    receiver = WeightReceiver()

    def refuse() -> None:
        arriving = receiver.received(IpcRoute(push="push", seconds=20), BUCKETS, "cpu")
        next(arriving)
        arriving.close()

    refusing = threading.Thread(target=refuse)
    refusing.start()
    (answer,) = deliver(receiver, num=1, seconds=20)
    assert answer is not None
    assert answer.startswith("the replica cannot take weights")
    refusing.join(60)


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    arriving = WeightReceiver().received(IpcRoute(push="push", seconds=0.2), BUCKETS, "cpu")
    with pytest.raises(RuntimeError, match=r"no bucket of weights came within 0.2 s"):
        next(arriving)


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_a_replica_that_is_told_to_expect_nothing_more_does_not_wait(way: str) -> None:
    receiver, sender = WeightReceiver(), WeightSender()
    route: Any = IpcRoute(push="push", seconds=SECONDS)
    if way == "broadcast":  # nobody else comes
        route = BroadcastRoute(group=replace(group(sender, size=2), seconds=6), member=1)
    with ThreadPoolExecutor() as threads:
        taking = threads.submit(take, receiver, route)
        time.sleep(0.5)
        started = time.monotonic()
        receiver.abandon(route.key)
        assert isinstance(taking.exception(timeout=60), RuntimeError)
        with pytest.raises(RuntimeError, match="stopped sending"):
            take(receiver, route)
    assert time.monotonic() - started < 5


async def test_a_model_that_got_only_some_weights_samples_nothing_until_it_has_all(
    tmp_path: Path,
) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "qwen2", seed=seed) for seed in (0, 1)]
    replica = embedded(models[0])()
    weights = named(models[1])

    def ending() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:3]
        raise RuntimeError("the rank has ended")

    try:
        with pytest.raises(RuntimeError, match="the rank has ended"):
            replica.take(ending(), 5)
        asked = asyncio.ensure_future(greedy(replica.engine))
        await asyncio.sleep(0.3)
        assert not asked.done()
        replica.take(weights, 5)
        reply = await asked
        assert reply.completion_ids == (await expected(models[1])).completion_ids
        assert (reply.policy_version, reply.token_versions) == (5, None)
    finally:
        await replica.aclose()


VLLM = {"engine": "vllm:MODEL"}
LORA = {"source": "m", "lora_rank": 8}


@pytest.mark.parametrize(
    ("cluster", "rollout", "model", "on_gpu", "way"),
    [
        ({}, {}, {}, False, "broadcast"),
        ({}, {}, {}, True, "broadcast"),
        ({}, VLLM, {}, True, "broadcast"),
        ({}, VLLM, {}, False, None),
        ({}, VLLM, LORA, True, None),
        ({}, {}, LORA, True, "broadcast"),
        ({}, {"engine": "openai:m"}, LORA, True, None),
        ({"placement": "colocated"}, {}, {}, True, "ipc"),
        ({"placement": "colocated"}, {}, {}, False, "ipc"),
    ],
)
def test_the_way_of_weights_follows_placement_devices_and_engine(
    cluster: dict[str, Any],
    rollout: dict[str, Any],
    model: dict[str, Any],
    *,
    on_gpu: bool,
    way: str | None,
) -> None:
    tasks = [{"tasks": ["small/colours"]}]
    values = {"cluster": cluster, "rollout": rollout, "tasks": tasks}
    config = parse_config({"model": model or {"source": "m"}, **values})
    assert direct_way(config, on_gpu=on_gpu) == way
