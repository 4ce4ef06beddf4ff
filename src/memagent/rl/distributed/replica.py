"""One engine replica: an engine in a process of its own on a node of the cluster.

    TrainedReplica(EmbeddedReplica(...))     the model in the actor's process, on its GPU or CPU
    TrainedReplica(VllmReplica(...))         a vLLM server that the actor starts on its GPUs, and ends

An opener is sent to the node and called there. What it returns has an engine, takes new weights, and frees its
memory while it sleeps, for ranks that share the GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.adapters import ADAPTER_PREFIX, ADAPTER_WEIGHTS
from memagent.engines.local.engine import LocalEngine
from memagent.engines.replicas import EngineReplica, HostedEngine, ReplicaReply
from memagent.engines.vllm.engine import CONTROL_VARIABLES, VllmEngine
from memagent.engines.vllm.servers import visible_gpus
from memagent.errors import ConfigError, EngineError
from memagent.rl.distributed.shipping import shipped
from memagent.rl.settings import ModelSettings
from memagent.rl.weights.merging import MergedCopy
from memagent.rl.weights.models import Trained, open_model, open_outside
from memagent.rl.weights.sync import LoraEndpoint
from memagent.types import Completion, Sampling, TokenEngine

ADAPTER_CONFIG = "adapter_config.json"
ALIVE_SECONDS = 1.0
"""How often a server that loads weights is looked at."""


class Replica(HostedEngine, Protocol):
    """An engine that takes weights."""

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Sample from these weights from now on; calls in progress go on."""
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

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> ReplicaReply:
        """One reply to a prompt of tokens."""
        return await self._reply(lambda engine: _generated(engine, prompt_ids, sampling))

    async def load(self, buckets: Sequence[Any], policy_version: int) -> bool:
        """Take new weights; whether the engine is still there."""
        try:
            await self._opened.load(buckets, policy_version)
        except Exception:
            if self._opened.is_alive:
                raise
            return False
        return True

    async def sleep(self) -> None:
        """Free the device."""
        await self._opened.sleep()

    async def wake(self) -> None:
        """Take the device again."""
        await self._opened.wake()

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
        self._device = trained.model.device
        self._merged = MergedCopy(trained.loaded) if trained.has_adapter else None
        loaded = trained.loaded if self._merged is None else self._merged.loaded
        self._loaded = loaded
        self._engine: LocalEngine | None = LocalEngine(loaded, config)
        self._version = 0
        self.is_alive = True

    @property
    def engine(self) -> LocalEngine:
        """Raises EngineError while it sleeps."""
        if self._engine is None:
            raise EngineError("the engine replica sleeps while the ranks train")
        return self._engine

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Copy the weights between two steps of the engine; calls in progress go on with them."""
        await asyncio.to_thread(self.take, shipped(buckets), policy_version)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Copy weights by name."""
        parameters = dict(self._trained.parameters)
        with self.engine.changing_weights(policy_version), torch.no_grad():
            for name, value in weights:
                parameters[name].copy_(value)
            if self._merged is not None:
                self._merged.refresh()
        self._version = policy_version

    async def sleep(self) -> None:
        """Drop the KV cache and move the weights to the CPU."""
        await self.aclose()
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        """The weights are those from before; the cache is empty."""
        if self._engine is not None:
            return
        self._move(self._device)
        self._engine = LocalEngine(self._loaded, self._config)
        self._engine.weights_changed(self._version)

    async def aclose(self) -> None:
        """Stop the engine's thread."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    def _move(self, device: torch.device) -> None:
        for model in (self._trained.model, self._loaded.model):
            model.to(device)  # type: ignore[arg-type]


# --- a vLLM server --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReplica:
    """Starts vLLM on the GPUs of the actor."""

    model: str
    """As vLLM knows it; a path must be the same on all nodes."""
    adapter_config: str | None = None
    """The adapter_config.json of the adapter in training; None where all weights are trained."""
    num_versions: int = 1
    """Adapters that calls in progress may use."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Replica:
        if self.adapter_config is None and not visible_gpus(os.environ):
            _check_cpu_reload(self.model)
        os.environ.update(CONTROL_VARIABLES)
        values = dict(self.engine_settings)
        if self.adapter_config is not None:
            rank = int(json.loads(self.adapter_config)["r"])
            arguments = f"--enable-lora --max-lora-rank {rank} --max-loras {self.num_versions}"
            values["vllm_args"] = f"{arguments} {values.get('vllm_args') or ''}".strip()
        engine = open_outside(f"vllm:{self.model}", values)
        assert isinstance(engine, VllmEngine)
        return _Vllm(engine, self)


def _check_cpu_reload(model: str) -> None:
    """vLLM on a CPU packs the head when it starts, and keeps that of tied embeddings when weights change."""
    path = Path(model) / "config.json"
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("tie_word_embeddings"):
        raise ConfigError(
            f"vLLM on a CPU does not take new weights of {model}, whose embeddings are tied; train an adapter "
            "(`model.lora_rank`), or remove `rollout.engine`"
        )


class _Vllm:
    """A vLLM server that gets its weights as files in a folder of its node."""

    def __init__(self, engine: VllmEngine, opened: VllmReplica) -> None:
        self.engine = engine
        self._config = opened.adapter_config
        self._folder = TemporaryDirectory(prefix="memagent-weights-")
        self._buckets: Sequence[Any] = ()
        self._lora = LoraEndpoint(
            engine,
            Path(self._folder.name) / "adapters",
            self._write_adapter,
            num_versions=opened.num_versions,
        )

    @property
    def is_alive(self) -> bool:
        """Whether the server's process is there."""
        return self.engine.is_alive

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Calls in progress end on the weights that they started with."""
        work = asyncio.ensure_future(self._load(buckets, policy_version))
        while not work.done():
            await asyncio.wait([work], timeout=ALIVE_SECONDS)
            if not self.is_alive:  # it would be asked again and again
                work.cancel()
                raise EngineError(self.engine.servers[0].why_ended())
        work.result()

    async def _load(self, buckets: Sequence[Any], policy_version: int) -> None:
        if self._config is not None:
            self._buckets = buckets
            await self._lora.push(policy_version)
            self._buckets = ()
            return
        folder = Path(self._folder.name) / "weights"
        folder.mkdir()
        try:
            await asyncio.to_thread(_write_buckets, buckets, folder)
            await self.engine.load_weights(folder, policy_version)
        finally:
            shutil.rmtree(folder)

    def _write_adapter(self, folder: Path) -> None:
        assert self._config is not None
        folder.mkdir(parents=True)
        (folder / ADAPTER_CONFIG).write_text(self._config, encoding="utf-8")
        weights = {
            f"{ADAPTER_PREFIX}{peft_name(name)}": value for name, value in shipped(self._buckets)
        }
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    async def sleep(self) -> None:
        """vLLM keeps the weights in CPU memory."""
        await self.engine.sleep()

    async def wake(self) -> None:
        """The weights are those from before."""
        await self.engine.wake()

    async def aclose(self) -> None:
        """End the server."""
        await self.engine.aclose()
        self._folder.cleanup()


def peft_name(parameter: str) -> str:
    """The name under which peft stores a parameter of an adapter: without the adapter's own name."""
    return parameter.replace(".default.", ".")


def _write_buckets(buckets: Sequence[Any], folder: Path) -> None:
    for number, bucket in enumerate(buckets):
        weights = {name: value.clone() for name, value in shipped([bucket])}
        save_file(weights, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
