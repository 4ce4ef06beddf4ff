"""Batches that do not fit the memory: smaller ones are computed, and only what never fits is refused."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local import generator as generator_module
from memagent.engines.local.cuda.model import GpuModel, _Buffers
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.generator import MIN_BATCH_TOKENS, BatchOutOfMemory, Generator
from memagent.engines.local.loading import is_out_of_memory, load
from memagent.engines.local.scheduler import GenerationRequest, Piece
from memagent.errors import EngineError, MachineError
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_model

OUT_OF_MEMORY = "the model ran out of memory; lower `cache_gb`, `max_running` or `window`"
GREEDY = Sampling(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(str(make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2"))).model


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    folder = make_tiny_model(tmp_path / "llama", "llama")
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        yield engine


class Limited:
    """A model on a machine with little memory."""

    def __init__(self, model: Any, *, fits: Callable[[Sequence[Piece]], bool]) -> None:
        self._model = model
        self._fits = fits
        self.sizes: list[int] = []
        """Tokens of each batch that was tried; negative ones did not fit."""
        self.num_freed = 0

    def run(self, pieces: Sequence[Piece], steps: int) -> Any:
        size = sum(piece.length for piece in pieces)
        if not self._fits(pieces):
            self.sizes.append(-size)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        self.sizes.append(size)
        return self._model.run(pieces, steps)

    def free_memory(self) -> None:
        self.num_freed += 1
        self._model.free_memory()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def at_most(num_tokens: int) -> Callable[[Sequence[Piece]], bool]:
    return lambda pieces: sum(piece.length for piece in pieces) <= num_tokens


def prompts(*lengths: int) -> list[list[int]]:
    return [[number + 3, *range(10, 9 + length)] for number, length in enumerate(lengths)]


def limited(model: Any, **settings: Any) -> tuple[Generator, Limited]:
    fits = settings.pop("fits")
    generator = Generator(
        model, eos_ids=(), **{"num_slots": 4096, "max_batch_tokens": 1024, **settings}
    )
    generator._model = machine = Limited(generator._model, fits=fits)
    return generator, machine


def replies(generator: Generator, given: list[list[int]]) -> list[list[int]]:
    requests = [generator.submit(prompt, GREEDY, seed=0) for prompt in given]
    while generator.has_work:
        generator.step()
    assert generator.scheduler.pool.num_free + sum(
        len(node.tokens) for node in generator.scheduler.tree.nodes()
    ) == (generator.scheduler.pool.num_slots), "no slot is lost"
    return [request.completion_ids for request in requests]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(model: Any) -> None:
    given = prompts(400, 300, 200)
    whole, _ = limited(model, fits=at_most(5000))
    generator, machine = limited(model, fits=at_most(150))
    assert replies(generator, given) == replies(whole, given)
    assert machine.sizes[:4] == [-900, -450, -225, 112]
    assert machine.num_freed == 3
    assert max(machine.sizes) <= 112, "and the next ones are as small"
    assert generator.scheduler.max_batch_tokens == 112


def test_of_too_many_replies_the_youngest_wait(model: Any) -> None:
    given = prompts(*[12] * 100)
    settings: dict[str, Any] = {"max_batch_tokens": 2048, "max_running": 100}
    whole, _ = limited(model, fits=at_most(5000), **settings)
    generator, machine = limited(
        model, fits=lambda p: not machine.sizes or at_most(MIN_BATCH_TOKENS)(p), **settings
    )
    assert replies(generator, given) == replies(whole, given)
    assert machine.sizes[:3] == [1200, -100, 64]


def test_larger_batches_are_tried_again_after_a_while(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_module, "GROW_AFTER_STEPS", 2)
    has_room: list[bool] = []
    generator, machine = limited(model, fits=lambda p: bool(has_room) or at_most(150)(p))
    replies(generator, prompts(400))
    assert generator.scheduler.max_batch_tokens < 1024
    has_room.append(True)
    for number in range(8):
        replies(generator, [[number, *range(300)]])
    assert generator.scheduler.max_batch_tokens == 1024
    assert machine.sizes[-1] > 0


def test_memory_that_is_free_again_is_used_for_the_smallest_batch(model: Any) -> None:
    generator, machine = limited(model, fits=lambda pieces: machine.num_freed > 0)
    assert len(replies(generator, prompts(9))[0]) == 6
    assert machine.sizes[:2] == [-9, 9]


def test_the_smallest_batch_that_does_not_fit_is_refused(model: Any) -> None:
    refused: list[GenerationRequest] = []
    generator, machine = limited(
        model, fits=lambda pieces: refused[0] not in [piece.request for piece in pieces]
    )
    requests = [generator.submit(prompt, GREEDY, seed=0) for prompt in prompts(300, 20, 30)]
    refused.append(requests[0])
    with pytest.raises(BatchOutOfMemory) as failure:
        generator.step()
    assert failure.value.requests == [requests[0]]
    assert machine.sizes == [-350, -175, -87, -64, -64][: len(machine.sizes)]
    assert list(generator.abort(failure.value.requests)) == [requests[0]]
    while generator.has_work:
        generator.step()
    assert [len(request.completion_ids) for request in requests] == [0, 6, 6]


def test_the_frames_of_a_failure_hold_no_memory_while_it_is_tried_again(model: Any) -> None:
    class Activations:
        """Stands for tensors of a step."""

    made: list[weakref.ref[Activations]] = []
    kept: list[BaseException] = []
    alive: list[bool] = []
    generator, machine = limited(model, fits=at_most(5000))

    def run(pieces: Sequence[Piece], steps: int) -> Any:
        activations = Activations()
        if not made:
            made.append(weakref.ref(activations))
            kept.append(torch.OutOfMemoryError("out of memory"))
            raise kept[0]
        del activations
        alive.append(made[0]() is not None)
        return machine._model.run(pieces, steps)

    machine.run = run  # type: ignore[method-assign]
    machine.free_memory = lambda: alive.append(made[0]() is not None)  # type: ignore[method-assign]
    gc.disable()
    try:
        replies(generator, prompts(9))
    finally:
        gc.enable()
    assert len(alive) > 2
    assert not any(alive), "even though somebody keeps the error"


@pytest.mark.parametrize(
    ("part", "method"), [(GpuModel, "_read"), (GpuModel, "_generate"), (_Buffers, "fill_layout")]
)
def test_a_step_of_the_gpu_that_failed_halfway_gives_the_same_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch, part: Any, method: str
) -> None:
    """Its replies may have been sampled, and some buffers filled, before the memory did not suffice."""
    given = prompts(90, 20, 140, 60, 200)

    def opened() -> Generator:
        generator = Generator(model, num_slots=4096, eos_ids=(), max_batch_tokens=100)
        generator._model.close()
        generator._model = GpuModel(model, 4096, max_running=8)
        return generator

    expected = replies(opened(), given)
    num_calls = 0
    whole = getattr(part, method)

    def fails_at_times(self: Any, *arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 1:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, *arguments)

    monkeypatch.setattr(part, method, fails_at_times)
    monkeypatch.setattr(generator_module, "MIN_BATCH_TOKENS", 8)
    assert replies(opened(), given) == expected
    assert num_calls > 3


# --- the engine -----------------------------------------------------------------------------------


async def test_only_the_requests_of_a_batch_that_never_fits_are_refused(
    engine: LocalEngine,
) -> None:
    long = list(range(20, 300))
    machine: Any = Limited(
        engine._generator._model, fits=lambda p: all(len(one.request.prompt_ids) < 200 for one in p)
    )
    engine._generator._model = machine
    with engine.hold():
        calls = [
            asyncio.ensure_future(engine.generate(prompt, GREEDY))
            for prompt in (long, [9, *long], [5, 6, 7], [8, 9])
        ]
        await asyncio.sleep(0)
    found = await asyncio.gather(*calls, return_exceptions=True)
    failed = [one for one in found if isinstance(one, BaseException)]
    assert [str(one) for one in failed] == [OUT_OF_MEMORY] * 2
    assert engine.is_alive
    assert {type(one) for one in failed} == {MachineError}
    assert len({id(one) for one in failed}) == 2, "each call has an error of its own"
    assert [len(one.completion_ids) for one in found if not isinstance(one, BaseException)] == [
        6,
        6,
    ]
    engine.weights_changed()  # fails if anything is in use
    assert engine.load.num_used_slots == 0


async def test_a_lost_gpu_is_a_failure_of_the_machine_and_a_bug_is_not(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, is_machine in (
        (KeyError("a bug"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
    ):

        def broken(*arguments: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(engine._generator._model, "run", broken)
        with pytest.raises(EngineError, match="the local model failed") as failure:
            await engine.generate([5, 6, 7], GREEDY)
        assert isinstance(failure.value, MachineError) == is_machine
        assert engine.is_alive != is_machine


def test_an_error_on_the_way_out_of_a_lack_of_memory_means_the_same() -> None:
    failure = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not is_out_of_memory(failure)
    failure.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(failure)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
