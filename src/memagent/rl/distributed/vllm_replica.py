"""An engine replica whose engine is a vLLM server that the actor starts on its GPUs, and ends.

    adapters       files of the node ──▶ vLLM loads them beside those in use
    all weights    files of the node ──▶ paused, `reload_weights`, resumed
                   buckets on the GPU ──▶ paused, vLLM's own weight transfer ("ipc"): it opens the memory of the
                   actor and copies, resumed

The actor is the only process that receives weights from ranks: a server that ends takes nobody with it, and its
Python needs nothing of ours.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import shutil
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from memagent.engines.llamacpp.adapters import PREFIX, WEIGHTS
from memagent.engines.vllm.engine import CONTROL_VARIABLES, HANDLE_VARIABLES, VllmEngine
from memagent.engines.vllm.servers import visible_gpus
from memagent.errors import ConfigError, MachineError
from memagent.launcher import end_servers
from memagent.rl.distributed.replicas import Replica
from memagent.rl.distributed.weights import Bucket, Filled, cuda_handle, shipped
from memagent.rl.weights.models import open_outside
from memagent.rl.weights.sync import LoraEndpoint

ADAPTER_CONFIG = "adapter_config.json"
ALIVE_SECONDS = 1.0
"""How often a server that loads weights is looked at."""
TRANSFER_ARGUMENTS = "--weight-transfer-config.backend ipc"
"""The options of a server that opens memory of the actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReplica:
    """Starts vLLM on the GPUs of the actor."""

    model: str
    """As vLLM knows it; a path must be the same on all nodes."""
    adapter_config: str | None = None
    """The adapter_config.json of the adapter in training; None where all weights are trained."""
    num_versions: int = 1
    """Adapters that calls in progress may use."""
    takes_buckets: bool = False
    """Whether ranks send weights directly; the server then opens memory of the actor."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Replica:
        if self.adapter_config is None and not visible_gpus(os.environ):
            _check_cpu_reload(self.model)
        os.environ.update(CONTROL_VARIABLES)
        values = dict(self.engine_settings)
        arguments = values.get("vllm_args") or ""
        if self.adapter_config is not None:
            rank = int(json.loads(self.adapter_config)["r"])
            arguments = (
                f"--enable-lora --max-lora-rank {rank} --max-loras {self.num_versions} {arguments}"
            )
        if self.takes_buckets:
            os.environ.update(HANDLE_VARIABLES)
            arguments = f"{TRANSFER_ARGUMENTS} {arguments}"
        values["vllm_args"] = arguments.strip() or None
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

    @property
    def device(self) -> torch.device:
        """The first GPU of the actor."""
        return torch.device("cuda", 0)

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Calls in progress end on the weights that they started with."""
        await self._while_alive(self._load(buckets, policy_version))

    async def receive(self, buckets: Iterator[Filled], policy_version: int) -> None:
        """Hand buckets on to the server. One that got only some of them is ended: it cannot start again."""
        first = await asyncio.to_thread(next, buckets, None)  # until then it goes on as it was
        if first is None:
            return
        try:
            updates = updates_of(chain([first], buckets))
            await self._while_alive(self.engine.update_weights(updates, policy_version))
        except BaseException:
            await asyncio.to_thread(end_servers, self.engine.servers)
            raise

    async def _while_alive(self, working: Awaitable[None]) -> None:
        """Wait for work of the server, as long as it is there."""
        work = asyncio.ensure_future(working)
        while not work.done():
            await asyncio.wait([work], timeout=ALIVE_SECONDS)
            if not self.is_alive:  # it would be asked again and again
                work.cancel()
                raise MachineError(self.engine.servers[0].why_ended())
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
        weights = {f"{PREFIX}{peft_name(name)}": value for name, value in shipped(self._buckets)}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

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


# --- buckets for vLLM -----------------------------------------------------------------------------


async def updates_of(buckets: Iterator[Filled]) -> AsyncIterator[dict[str, Any]]:
    """Requests of vLLM's weight transfer, for buckets on a GPU. One is done before the next is asked for."""
    staged: list[torch.Tensor] = []
    handles: dict[str, tuple[Any, ...]] = {}
    while (filled := await asyncio.to_thread(next, buckets, None)) is not None:
        if not staged or staged[0].numel() < filled.flat.numel():
            staged = [
                torch.empty_like(filled.flat, device=f"cuda:{index}")
                for index in range(torch.cuda.device_count())
            ]
            handles = {gpu_id(one): cuda_handle(one).arguments for one in staged}
        for one in staged:  # each GPU of the server has a copy
            one[: filled.flat.numel()].copy_(filled.flat)
            torch.cuda.synchronize(one.device)
        yield update_request(filled.bucket, handles)
    staged.clear()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def gpu_id(tensor: torch.Tensor) -> str:
    """By which name vLLM knows the GPU of a tensor."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def update_request(bucket: Bucket, handles: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What vLLM's transfer engine "ipc" wants to know of a bucket, as JSON; `handles` by GPU."""
    return {
        "names": [spec.name for spec in bucket.specs],
        "dtype_names": [spec.dtype for spec in bucket.specs],
        "shapes": [list(spec.shape) for spec in bucket.specs],
        "tensor_sizes": [spec.num_bytes for spec in bucket.specs],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(dict(handles))).decode(),
    }
