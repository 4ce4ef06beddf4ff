"""A replica whose GPU has failed says so, so that it is replaced; without Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.errors import MachineError
from memagent.rl.distributed.replicas import EmbeddedModel, TrainedReplica
from memagent.rl.distributed.weights import Bucket, Filled
from memagent.types import Sampling
from tests.support.broken_gpu import REASON, BrokenAtFirst, break_gpu, fail
from tests.support.replica_models import MESSAGES, embedded
from tests.support.tiny_models import make_tiny_model

FEW = Sampling(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


async def test_a_reply_that_fails_with_the_gpu_is_for_another_replica(
    model: Path, tmp_path: Path
) -> None:
    replica = TrainedReplica(BrokenAtFirst(marker=tmp_path / "opened", opener=embedded(model)))
    await replica.start()
    reply = await replica.complete(MESSAGES, FEW)
    assert reply.is_dead
    assert isinstance(reply.error, MachineError)
    assert REASON in str(reply.error)
    await replica.aclose()


async def test_a_reply_that_fails_otherwise_is_an_error_of_its_call(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = embedded(model)()
    replica = TrainedReplica(lambda: opened)
    await replica.start()

    def bug(*arguments: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(opened.engine._generator._model, "run", bug)
    reply = await replica.complete(MESSAGES, FEW)
    assert (reply.is_dead, opened.is_alive) == (False, True)
    await replica.aclose()


async def fail_asleep(replica: TrainedReplica, opened: EmbeddedModel) -> str | None:
    opened._move = fail  # type: ignore[method-assign]
    return await replica.sleep()


async def fail_awake(replica: TrainedReplica, opened: EmbeddedModel) -> str | None:
    assert await replica.sleep() is None
    opened._move = fail  # type: ignore[method-assign]
    return await replica.wake()


async def fail_getting_weights(replica: TrainedReplica, opened: EmbeddedModel) -> str | None:
    def arriving() -> Iterator[Filled]:
        fail()
        yield Filled(Bucket(()), torch.zeros(0))

    return await replica._why_ended(opened.receive(arriving(), 3))


@pytest.mark.parametrize("act", [fail_asleep, fail_awake, fail_getting_weights])
async def test_a_gpu_that_fails_while_a_replica_sleeps_wakes_or_gets_weights_ends_it(
    act: Callable[..., Any], model: Path
) -> None:
    opened = embedded(model)()
    replica = TrainedReplica(lambda: opened)
    await replica.start()
    assert await act(replica, opened) == REASON
    assert not opened.is_alive
    await replica.aclose()


async def test_a_replica_whose_gpu_failed_before_it_slept_is_not_taken_for_sound(
    model: Path,
) -> None:
    opened = embedded(model)()
    break_gpu(opened.engine)
    replica = TrainedReplica(lambda: opened)
    await replica.start()
    assert (await replica.complete(MESSAGES, FEW)).is_dead
    await replica.sleep()
    assert not opened.is_alive
