"""What a closed engine frees, at once: the garbage collector is off in these tests."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local.cuda.model import GpuModel
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.generator import Generator
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import EngineError, MachineError
from memagent.rl.distributed.replicas import EmbeddedModel
from memagent.rl.weights.models import MergedCopy
from memagent.types import Sampling
from tests.support.replica_models import embedded, greedy
from tests.support.timing import eventually
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

SHORT = Sampling(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def cache_of(engine: LocalEngine) -> weakref.ref[torch.Tensor]:
    return weakref.ref(engine._generator._model.cache)


@pytest.mark.parametrize("is_used", [True, False])
async def test_a_closed_engine_has_freed_its_cache(folder: Path, *, is_used: bool) -> None:
    engine = LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
    cache = cache_of(engine)
    if is_used:
        await engine.generate([5, 6, 7], SHORT)
    await engine.aclose()
    assert cache() is None
    await engine.aclose()
    assert engine.load.num_running == 0
    engine.weights_changed(7)  # of a model that a trainer goes on with
    assert engine.policy_version == 7
    with pytest.raises(MachineError, match="the engine is closed"):
        await engine.generate([5, 6, 7], SHORT)


async def test_the_weights_are_freed_with_the_last_reference_to_a_closed_engine(
    folder: Path,
) -> None:
    engine = LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
    weights = weakref.ref(engine._loaded.model.get_input_embeddings().weight)
    await engine.generate([5, 6, 7], SHORT)
    await engine.aclose()
    closed = weakref.ref(engine)
    del engine
    await eventually(lambda: (closed(), weights()) == (None, None))


async def test_an_engine_that_fails_its_requests_when_it_is_closed_frees_its_cache_too(
    folder: Path,
) -> None:
    engine = LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
    cache = cache_of(engine)
    with engine.hold():
        stream = engine.stream([5, 6, 7], Sampling(max_tokens=400))
        waiting = stream.__anext__()
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        await engine.aclose()
    with pytest.raises(EngineError, match="the engine was closed"):
        await task
    assert cache() is None


def gpu_generator(loaded: LoadedModel) -> Generator:
    """A generator of the GPU's model, on the CPU."""
    generator = Generator(loaded.model, num_slots=512, eos_ids=(), max_running=4)
    generator._model.close()
    generator._model = GpuModel(loaded.model, 512, max_running=4)
    return generator


def test_the_model_of_a_gpu_frees_cache_buffers_and_graphs(folder: Path) -> None:
    generator = gpu_generator(load(str(folder)))
    model: Any = generator._model
    generator.submit([5, 6, 7], SHORT, seed=0)
    while generator.has_work:
        generator.step()

    class Graph:
        """A captured one."""

    graph, logits = Graph(), torch.zeros(3)
    model._graphs[1] = (graph, logits)
    buffers = model._replies
    held = [model.cache, buffers, buffers.items, buffers.parts.mixed, buffers.tokens, graph, logits]
    freed = list(map(weakref.ref, held))
    del held, buffers, graph, logits
    generator.close()
    assert [one() for one in freed] == [None] * 7
    generator.close()


# --- replicas and merged copies -------------------------------------------------------------------


@pytest.mark.parametrize("has_adapter", [False, True])
async def test_a_replica_that_sleeps_has_freed_its_cache(
    folder: Path, tmp_path: Path, *, has_adapter: bool
) -> None:
    replica: EmbeddedModel = embedded(folder, **({"lora_rank": 4} if has_adapter else {}))()
    first = await greedy(replica.engine)
    for _ in range(2):
        cache = cache_of(replica.engine)
        await replica.sleep()
        assert cache() is None
        await replica.wake()
        assert (await greedy(replica.engine)).completion_ids == first.completion_ids
    await replica.aclose()


async def test_the_weights_of_a_merged_copy_are_freed_with_it_and_its_engine(
    folder: Path, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(folder, tmp_path / "adapter")
    loaded = load(str(folder), adapter=str(adapter))
    merged = MergedCopy(loaded)
    engine = LocalEngine(merged.loaded, LocalConfig(cache_gb=0.01))
    await engine.generate([5, 6, 7], SHORT)
    weights = weakref.ref(merged._pairs[0][1])
    cache = cache_of(engine)
    await engine.aclose()
    assert cache() is None
    del engine, merged
    await eventually(lambda: weights() is None)


# --- graphs ---------------------------------------------------------------------------------------


def test_a_graph_has_its_workspace_in_its_own_pool_and_warms_up_in_one_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    streams: list[Any] = []

    class Stream:
        def __init__(self, device: Any) -> None:
            streams.append(self)

        def wait_stream(self, other: Any) -> None: ...

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        events.append(f"{what} begins")
        yield
        events.append(f"{what} ends")

    class Graph:
        def pool(self) -> str:
            return "pool"

    def capture(graph: Any, *, pool: Any, **_: Any) -> Any:
        return entered(f"capture in {pool}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered("warm-up"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty the cache"))
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: events.append("clear"), raising=False)
    model: Any = GpuModel(load(str(folder)).model, 64, max_running=4)
    model.device = SimpleNamespace(type="cuda")
    with torch.inference_mode():
        model._captured(1)
        warm_up_stream = model._warm_up_stream
        model._captured(2)
    begun = ["warm-up begins", "warm-up ends", "clear"]
    assert events == [
        *begun, "capture in None begins", "capture in None ends", "clear",
        *begun, "capture in pool begins", "capture in pool ends", "clear",
    ]  # fmt: skip
    assert model._warm_up_stream is warm_up_stream
    events.clear()
    model.free_memory()
    assert (events, model._graphs, model._graph_pool) == (
        ["wait", "clear", "empty the cache"],
        {},
        None,
    )
