"""Memory of a GPU: what a closed engine frees, and what happens when there is too little.

    python -m pytest tests/gpu/test_gpu_memory.py -v

The garbage collector is off, so that nothing is freed by chance.
"""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memagent.config import LocalConfig
from memagent.engines.local.cuda.sizes import free_reserve
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.generator import BatchOutOfMemory, Generator
from memagent.engines.local.loading import LoadedModel, load
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
CACHE_GB = 0.25
MIB = 2**20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    return load(str(folder), device="cuda", dtype=torch.float32)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    free_reserve(CUDA)
    gc.disable()
    yield
    gc.enable()


def opened(loaded: LoadedModel) -> LocalEngine:
    engine = LocalEngine(loaded, LocalConfig(cache_gb=CACHE_GB, max_running=64))
    assert type(engine._generator._model).__name__ == "GpuModel"
    return engine


async def answers(engine: LocalEngine) -> list[tuple[int, ...]]:
    """Replies to 1, 3, 9 and 30 prompts at once: graphs of four sizes."""
    sampling = Sampling(max_tokens=20, temperature=0.0)
    found = []
    for count in (1, 3, 9, 30):
        prompts = [[5 + number, *range(20, 60)] for number in range(count)]
        replies = await asyncio.gather(*(engine.generate(one, sampling) for one in prompts))
        found += [reply.completion_ids or () for reply in replies]
    return found


def test_a_closed_engine_has_freed_all_but_the_weights(loaded: LoadedModel) -> None:
    async def open_and_close() -> None:
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(3):
            engine = opened(loaded)
            await answers(engine)
            assert len(engine._generator._model._graphs) >= 2  # type: ignore[attr-defined]
            assert torch.cuda.memory_allocated() - before > CACHE_GB * 2**30
            await engine.aclose()
            assert torch.cuda.memory_allocated() - before < MIB
            assert torch.cuda.memory_reserved() - reserved < 32 * MIB

    asyncio.run(open_and_close())


def test_captured_sizes_share_one_workspace(loaded: LoadedModel) -> None:
    """cuBLAS has one of 32 MiB for each thread and stream; each capture had a stream of its own."""

    async def capture() -> None:
        before = torch.cuda.memory_allocated()
        engine = opened(loaded)
        await answers(engine)
        model: Any = engine._generator._model
        buffers = [*vars(model._replies).values(), *vars(model._replies.parts).values()]
        held = sum(one.nbytes for one in [model.cache, *buffers] if isinstance(one, torch.Tensor))
        assert torch.cuda.memory_allocated() - before - held < 80 * MIB
        await engine.aclose()

    asyncio.run(capture())


def test_an_engine_goes_on_when_another_one_is_closed(loaded: LoadedModel) -> None:
    """Its graphs hold addresses of workspaces, which must not be freed with those of the other."""

    async def close_others() -> None:
        staying, leaving = opened(loaded), opened(loaded)
        expected = await answers(staying)
        assert await answers(leaving) == expected
        await leaving.aclose()
        late = opened(loaded)  # its thread may get the handle of the one that ended
        assert await answers(late) == expected
        await late.aclose()
        # the calls of this thread may not read what the engine's graphs use, nor write to it
        overwritten = [torch.full((64 * MIB,), float("nan"), device="cuda") for _ in range(4)]
        left = overwritten[0][: 4 * MIB].view(2048, 2048)
        assert bool((left @ left).isnan().all())
        assert await answers(staying) == expected
        del overwritten, left
        assert await answers(staying) == expected
        await staying.aclose()

    asyncio.run(close_others())


# --- too little memory ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Any:
    """One activation of a token takes 1.6 MB, and there are three of them."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=192,
        intermediate_size=400_000,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with CUDA:
        return LlamaForCausalLM(config).float().eval()


@contextmanager
def at_most(spare: int) -> Iterator[None]:
    """This process may use so many bytes more than it has."""
    free_reserve(CUDA)
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def generator_of(model: Any) -> Generator:
    return Generator(model, num_slots=8192, eos_ids=(), max_batch_tokens=4096, max_running=8)


def replies(generator: Generator) -> list[list[int]]:
    sampling = Sampling(max_tokens=8, temperature=0.0)
    prompts = [[number, *range(100, 600)] for number in range(4)]
    requests = [generator.submit(prompt, sampling, seed=0) for prompt in prompts]
    while generator.has_work:
        generator.step()
    return [request.completion_ids for request in requests]


def test_prompts_that_do_not_fit_the_memory_are_read_in_parts(wide: Any) -> None:
    whole = generator_of(wide)
    expected = replies(whole)
    assert whole.scheduler.max_batch_tokens == 4096
    whole.close()
    limited = generator_of(wide)
    with at_most(2000 * MIB):
        assert replies(limited) == expected
    assert limited.scheduler.max_batch_tokens < 1100
    limited.close()


def test_after_a_step_that_never_fits_the_next_ones_are_computed(wide: Any) -> None:
    generator = generator_of(wide)
    expected = replies(generator)
    generator.forget()
    allocated = torch.cuda.memory_allocated()
    with at_most(10 * MIB), pytest.raises(BatchOutOfMemory) as failure:
        replies(generator)
    assert failure.value.requests
    assert torch.cuda.memory_allocated() <= allocated, "nothing of the failed step is held"
    generator.abort()
    assert replies(generator) == expected
    generator.close()


# --- other libraries ------------------------------------------------------------------------------

RANK = """
import sys, torch
from memagent.documents.ranking import rank_by_words
torch.zeros(1, device="cuda")
free = torch.cuda.mem_get_info()[0]
assert rank_by_words(["It rained.", "The mill."], "Which mill?", what="it")[0].number == 1
print("jax" in sys.modules, (free - torch.cuda.mem_get_info()[0]) >> 20)
"""


def test_ranking_by_words_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    has_jax, taken_mib = done.stdout.split()
    assert (has_jax, int(taken_mib) < 64) == ("False", True)
