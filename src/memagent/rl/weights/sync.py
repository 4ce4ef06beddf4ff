"""How the engine that draws replies gets new weights.

    Colocated      the engine has the trained parameters themselves: it is told that they have changed
    LoraEndpoint   save the adapter ──▶ RUN/sync/v000012-1f09ae ──▶ each endpoint loads it ──▶ calls ask
                   for it by name ──▶ the one before is unloaded and removed
    Frozen         the engine keeps its weights

    sync = open_sync(config.rollout, engine, trained, run)
    await sync.push(12)          # replies from now on are of version 12
    sync.policy_version          # for `collect`, where the engine tells no version

Endpoints load adapters as vLLM does, and must see the folder of the run:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine
from memagent.errors import ConfigError
from memagent.rl.settings import RolloutSettings
from memagent.rl.weights.checkpoint import save_adapter
from memagent.rl.weights.models import Trained

if TYPE_CHECKING:  # it brings a library that training with a model in this process does not need
    from memagent.engines.openai import Answer, EndpointEngine

SYNC = "sync"
"""Folder of a run for the adapter that endpoints read."""
IDLE_SECONDS = 0.005
"""Between looks at an engine that still lets go of calls which were taken back."""


class WeightSync(Protocol):
    """Gives new weights to an engine."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that replies are drawn from."""
        ...

    async def push(self, policy_version: int) -> None:
        """Let replies be drawn from the weights as they are now. No call may be under way."""
        ...


def open_sync(
    settings: RolloutSettings, engine: BaseEngine, trained: Trained, run: Path
) -> WeightSync:
    """What suits the engine of a run."""
    if settings.engine is None:
        assert isinstance(engine, LocalEngine), "the trained weights are in a local engine"
        return Colocated(engine)
    if settings.sync == "none":
        return Frozen()
    from memagent.engines.openai import EndpointEngine

    if not isinstance(engine, EndpointEngine):
        raise ConfigError(
            f"the engine {settings.engine} cannot be given an adapter; name an endpoint such as "
            'openai:MODEL, or set rollout.sync="none"'
        )
    return LoraEndpoint(engine, run / SYNC, lambda folder: save_adapter(trained.model, folder))


class Colocated:
    """An engine in this process, on the parameters that are trained."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    @property
    def policy_version(self) -> int:
        """What the engine says."""
        return self._engine.policy_version

    async def push(self, policy_version: int) -> None:
        """Nothing is copied; what was computed with the old values is dropped."""
        while self._engine.load.num_running:  # calls that were taken back end with their step
            await asyncio.sleep(IDLE_SECONDS)
        self._engine.weights_changed(policy_version)


class Frozen:
    """An engine that keeps the weights it has: those before the first step."""

    @property
    def policy_version(self) -> int:
        """Always 0."""
        return 0

    async def push(self, policy_version: int) -> None:
        """The engine stays as it is."""


class LoraEndpoint:
    """Endpoints that load an adapter when they are told to, as vLLM does."""

    def __init__(self, engine: EndpointEngine, folder: Path, save: Callable[[Path], None]) -> None:
        """`save` writes the adapter as it is now to a folder. Leftovers in `folder` are removed."""
        self.policy_version = 0
        self._engine = engine
        self._folder = folder.resolve()
        self._save = save
        self._pushed: tuple[str, Path] | None = None

    async def push(self, policy_version: int) -> None:
        """Save the adapter, have every endpoint load it, ask for it from now on."""
        if self._pushed is None:
            await self._clear()
        # endpoints may know one of the same version: from another run, or before a warm start
        mark = secrets.token_hex(3)
        name = f"memagent-v{policy_version}-{mark}"
        path = self._folder / f"v{policy_version:06}-{mark}"
        self._save(path)
        answers = await self._tell(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        for endpoint, answer in answers:
            if answer.status != 200 and "already been loaded" not in answer.text:
                raise ConfigError(_refusal(endpoint, answer, path))
        self._engine.switch_model(name)
        self.policy_version = policy_version
        if self._pushed is not None:
            await self._drop(*self._pushed)
        self._pushed = (name, path)

    async def _tell(self, path: str, body: dict[str, str]) -> list[tuple[EndpointEngine, Answer]]:
        endpoints = self._engine.endpoints
        answers = await asyncio.gather(*(endpoint.post(path, body) for endpoint in endpoints))
        return list(zip(endpoints, answers, strict=True))

    async def _drop(self, name: str, path: Path) -> None:
        """Whether an endpoint still had it does not matter."""
        await self._tell("/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(path, ignore_errors=True)

    async def _clear(self) -> None:
        """Remove what an earlier process of this run has left, here and at the endpoints."""
        listed = await asyncio.gather(
            *(endpoint.list_models() for endpoint in self._engine.endpoints)
        )
        for name in _adapters_in(self._folder, (model for models in listed for model in models)):
            await self._tell("/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)


def _adapters_in(folder: Path, models: Iterable[dict[str, object]]) -> list[str]:
    """Names of the adapters that were loaded from below a folder."""
    found = {
        str(model["id"]): None
        for model in models
        if isinstance(root := model.get("root"), str) and Path(root).is_relative_to(folder)
    }
    return list(found)


def _refusal(endpoint: EndpointEngine, answer: Answer, path: Path) -> str:
    rank = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    return (
        f"{endpoint.address} does not load the adapter (HTTP {answer.status}: {answer.text}); start "
        "vLLM with the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and with --enable-lora "
        f"--max-lora-rank {rank}, where it can read {path.parent}"
    )
