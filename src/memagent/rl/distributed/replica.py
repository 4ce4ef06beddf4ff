"""One engine replica: an engine in a process of its own on a node of the cluster.

    TrainedReplica(EmbeddedReplica(...))     the model in the actor's process, on its GPU or CPU
    TrainedReplica(VllmReplica(...))         a vLLM server that the actor starts on its GPUs (`vllm_replica.py`)

An opener is sent to the node and called there. What it returns has an engine, takes new weights, and frees its
memory while it sleeps, for ranks that share the GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch

from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine, is_gpu_failure
from memagent.engines.replicas import EngineReplica, HostedEngine, ReplicaReply, first_line
from memagent.errors import EngineError
from memagent.rl.distributed.buckets import Bucket, BufferHandle, Filled, tensors
from memagent.rl.distributed.transfer import Received, Route, WeightReceiver, ship, shipped
from memagent.rl.settings import ModelSettings
from memagent.rl.weights.models import MergedCopy, Trained, open_model
from memagent.types import Completion, Sampling, TokenEngine


class Replica(HostedEngine, Protocol):
    """An engine that takes weights."""

    @property
    def device(self) -> torch.device:
        """Where it wants weights that are sent to it."""
        ...

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Sample from these weights from now on; calls in progress go on."""
        ...

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """As `load`, with weights that arrive bucket by bucket on `device`.

        If they do not arrive to the end, nothing is sampled before the next `load` or `receive`.
        """
        ...

    def share(self) -> list[Any] | None:
        """Put the weights into the object store, for another replica; None if they cannot be read."""
        ...

    async def sleep(self) -> None:
        """Free the memory of the device. No call may be in progress."""
        ...

    async def wake(self) -> None:
        """Take the memory again."""
        ...


class OpenReplica(Protocol):
    """Opens a replica, on its node."""

    def __call__(self) -> Replica: ...


class TrainedReplica(EngineReplica):
    """Runs as a Ray actor."""

    _hosted: Replica | None

    def __init__(self, opener: OpenReplica) -> None:
        super().__init__(opener)
        self._receiver = WeightReceiver()
        self._receiving = asyncio.Lock()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> ReplicaReply:
        """One reply to a prompt of tokens."""
        return await self._reply(lambda engine: _generated(engine, prompt_ids, sampling))

    async def load(self, buckets: Sequence[Any], policy_version: int) -> str | None:
        """Take new weights; None, or why the engine has ended."""
        return await self._why_ended(self._opened.load(buckets, policy_version))

    async def receive(
        self, route: Route, buckets: Sequence[Bucket], policy_version: int
    ) -> Received:
        """Take new weights that ranks send."""
        hosted = self._opened
        async with self._receiving:
            arriving = self._receiver.received(route, buckets, hosted.device)
            try:
                await hosted.receive(arriving, policy_version)
            except Exception as error:
                return Received(error=first_line(error), is_alive=hosted.is_alive)
            finally:
                arriving.close()
        return Received()

    async def deliver(self, push: str, handle: BufferHandle, seconds: float) -> str | None:
        """The rank beside this replica has filled a buffer of a push; None, or why it was not copied."""
        return await self._receiver.deliver(push, handle, seconds)

    async def abandon(self, key: str) -> None:
        """The ranks send nothing more of a push; `key` is that of its route."""
        self._receiver.abandon(key)

    async def share(self) -> list[Any] | None:
        """References to the weights of this replica, for another one; None if it cannot read them."""
        try:
            return await asyncio.to_thread(self._opened.share)
        except Exception:
            if self._opened.is_alive:
                raise
            return None

    async def sleep(self) -> str | None:
        """Free the device; None, or why the engine has ended."""
        return await self._why_ended(self._opened.sleep())

    async def wake(self) -> str | None:
        """Take the device again; None, or why the engine has ended."""
        return await self._why_ended(self._opened.wake())

    async def _why_ended(self, working: Awaitable[None]) -> str | None:
        """Wait for some work; an error that leaves the engine alive is raised."""
        try:
            await working
        except Exception as error:
            if self._opened.is_alive:
                raise
            return first_line(error)
        return None

    @property
    def _opened(self) -> Replica:
        assert self._hosted is not None, "the driver starts a replica first"
        return self._hosted


async def _generated(
    engine: BaseEngine, prompt_ids: Sequence[int], sampling: Sampling
) -> Completion:
    if not isinstance(engine, TokenEngine):
        raise EngineError(f"{engine.model} takes no prompts of tokens")
    return await engine.generate(prompt_ids, sampling)


# --- the model in the actor's process -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedReplica:
    """Opens the model of a run in the actor; its own copy of the weights."""

    model: ModelSettings
    source: str
    """The model, at the same place on all nodes."""
    seed: int
    engine_settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> EmbeddedModel:
        trained = open_model(self.model, self.source, seed=self.seed)
        return EmbeddedModel(trained, LocalConfig.parse(dict(self.engine_settings)))


class EmbeddedModel:
    """A local engine on its own copy of the weights, with the adapter merged in if there is one."""

    def __init__(self, trained: Trained, config: LocalConfig) -> None:
        self._trained = trained
        self._config = config
        self.device = trained.model.device
        self._merged = MergedCopy(trained.loaded) if trained.has_adapter else None
        loaded = trained.loaded if self._merged is None else self._merged.loaded
        self._loaded = loaded
        self._engine: LocalEngine | None = LocalEngine(loaded, config)
        self._version = 0
        self._is_partial = False
        """Whether some weights are new and some are not: nothing is sampled then."""
        self._holding = ExitStack()
        self._is_broken = False
        """Whether the GPU has failed: this process cannot use it any more."""

    @property
    def is_alive(self) -> bool:
        """False after an error of the GPU."""
        return not self._is_broken and (self._engine is None or self._engine.is_alive)

    @property
    def engine(self) -> LocalEngine:
        """Raises EngineError while it sleeps."""
        if self._engine is None:
            raise EngineError("the engine replica sleeps while the ranks train")
        return self._engine

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Copy the weights between two steps of the engine; calls in progress go on with them."""
        with self._noting_failures():
            await asyncio.to_thread(self.take, shipped(buckets), policy_version)

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """The same with weights that arrive; see `Replica`."""
        with self._noting_failures():
            await asyncio.to_thread(self.take, tensors(buckets), policy_version)

    def share(self) -> list[Any]:
        """Put a copy of the weights into the object store."""
        with self._noting_failures():
            return ship(self._trained.parameters)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Copy weights by name. After an error nothing is sampled until all weights were taken."""
        parameters = dict(self._trained.parameters)
        coming = iter(weights)
        first = next(coming, None)  # until it is there, nothing has changed
        if first is None:
            return
        if not self._is_partial:
            self._holding.enter_context(self.engine.hold())
        self._is_partial = True
        with self.engine.changing_weights(policy_version), torch.no_grad():
            for name, value in chain([first], coming):
                parameters[name].copy_(value)
            if self._merged is not None:
                self._merged.refresh()
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the engine computes in a stream of its own
        self._version, self._is_partial = policy_version, False
        self._holding.close()

    async def sleep(self) -> None:
        """Drop the KV cache and move the weights to the CPU."""
        await self.aclose()
        with self._noting_failures():
            self._move(torch.device("cpu"))
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    async def wake(self) -> None:
        """The weights are those from before; the cache is empty."""
        if self._engine is not None:
            return
        with self._noting_failures():
            self._move(self.device)
            self._engine = LocalEngine(self._loaded, self._config)
            self._engine.weights_changed(self._version)
        if self._is_partial:
            self._holding.enter_context(self._engine.hold())

    async def aclose(self) -> None:
        """Stop the engine's thread."""
        self._is_broken = not self.is_alive
        engine, self._engine = self._engine, None
        self._holding.close()
        if engine is not None:
            await engine.aclose()

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Note errors of the GPU outside of the engine."""
        try:
            yield
        except Exception as error:
            self._is_broken = self._is_broken or is_gpu_failure(error)
            raise

    def _move(self, device: torch.device) -> None:
        for model in (self._trained.model, self._loaded.model):
            model.to(device)  # type: ignore[arg-type]
