"""How the engine that samples replies gets new weights.

    Colocated      the engine runs on the parameters in training, or on a merged copy that is refreshed: its
                   caches are dropped; with asynchronous rollouts calls in progress continue on the new copy
    LoraEndpoint   save the adapter ──▶ RUN/sync/v000012-1f09ae ──▶ each endpoint loads it ──▶ calls name
                   it as their model ──▶ the previous one is unloaded and removed
    WeightSync     the engine keeps its weights

    sync = open_sync(config.rollout, engine, trained, run)
    await sync.push(12)          # replies are now sampled by version 12
    sync.policy_version          # for `Collection`, where the engine reports no version

Endpoints load adapters as vLLM does, and must see the folder of the run:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank 32
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine
from memagent.errors import ConfigError
from memagent.rl.settings import RolloutSettings
from memagent.rl.weights.checkpoint import save_adapter
from memagent.rl.weights.models import MergedCopy, Trained

if TYPE_CHECKING:  # it brings a library that training with a model in this process does not need
    from memagent.engines.openai import Answer, EndpointEngine

SYNC = "sync"
"""Folder of a run for the adapter that endpoints read."""
IDLE_SECONDS = 0.005
"""Poll interval while an engine finishes cancelled calls."""


class WeightSync:
    """Gives new weights to an engine; this one keeps those before the first step."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample replies."""
        return 0

    async def push(self, policy_version: int) -> None:
        """Make the engine sample from the current weights.

        No call may be in progress, unless rollouts are asynchronous.
        """

    async def release(self) -> None:
        """The trainer is about to update: an engine that shares its devices frees them until the next push."""


def open_sync(
    settings: RolloutSettings,
    engine: BaseEngine,
    trained: Trained,
    run: Path,
    *,
    merged: MergedCopy | None = None,
    num_versions: int = 1,
) -> WeightSync:
    """The way that suits the engine of a run. Calls in progress may use `num_versions` of the weights."""
    if settings.engine is None:
        assert isinstance(engine, LocalEngine), "the trained weights are in a local engine"
        return Colocated(engine, merged, while_running=settings.asynchronous)
    if settings.sync == "none":
        return WeightSync()
    from memagent.engines.openai import EndpointEngine

    if not isinstance(engine, EndpointEngine):
        raise ConfigError(
            f"the engine {settings.engine} cannot load an adapter; name an endpoint such as "
            'openai:MODEL, or set `rollout.sync="none"`'
        )
    return LoraEndpoint(
        engine,
        run / SYNC,
        lambda folder: save_adapter(trained.model, folder),
        num_versions=num_versions,
    )


@dataclass(frozen=True, slots=True)
class Colocated(WeightSync):
    """An engine in this process, on the parameters in training or on a merged copy of them."""

    engine: LocalEngine
    merged: MergedCopy | None = None
    while_running: bool = False
    """Whether the merged copy changes while calls are in progress, which then go on."""

    @property
    def policy_version(self) -> int:
        """As the engine reports it."""
        return self.engine.policy_version

    async def push(self, policy_version: int) -> None:
        """Only a merged copy is written; caches of the old values are dropped."""
        if self.while_running:
            await asyncio.to_thread(self._change, policy_version)  # waits for the end of a step
            return
        # cancelled calls end with their step, those that wait for a place with the next one
        while (load := self.engine.load).num_running or load.num_waiting:
            await asyncio.sleep(IDLE_SECONDS)
        self._change(policy_version)

    def _change(self, policy_version: int) -> None:
        with self.engine.changing_weights(policy_version, while_running=self.while_running):
            if self.merged is not None:
                self.merged.refresh()


class LoraEndpoint(WeightSync):
    """Endpoints that load adapters on request, as vLLM does."""

    def __init__(
        self,
        engine: EndpointEngine,
        folder: Path,
        save: Callable[[Path], None],
        *,
        num_versions: int = 1,
    ) -> None:
        """`save` writes the current adapter to a folder. Leftovers in `folder` are removed.

        The newest `num_versions` adapters stay loaded: calls in progress may use them.
        """
        self._version = 0
        self._engine = engine
        self._folder = folder.parent.resolve() / folder.name
        self._save = save
        self._num_versions = num_versions
        self._pushed: deque[tuple[str, Path]] | None = None
        """Adapters that are loaded, the newest last."""

    @property
    def policy_version(self) -> int:
        """That of the adapter that was loaded last."""
        return self._version

    async def push(self, policy_version: int) -> None:
        """Save the adapter, have every endpoint load it, and name it in calls from now on."""
        if self._pushed is None:
            await self._clear()
            self._pushed = deque()
        # endpoints may have one of the same version: from another run, or before a warm start
        mark = secrets.token_hex(3)
        name = f"memagent-v{policy_version}-{mark}"
        path = self._folder / f"v{policy_version:06}-{mark}"
        self._save(path)
        answers = await self._post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        for endpoint, answer in answers:
            if answer.status != 200 and "already been loaded" not in answer.text:
                raise ConfigError(_refusal(endpoint, answer, path))
        self._engine.switch_model(name, policy_version)
        self._version = policy_version
        self._pushed.append((name, path))
        while len(self._pushed) > self._num_versions:
            old, folder = self._pushed.popleft()  # endpoints that do not have it are ignored
            await self._post("/unload_lora_adapter", {"lora_name": old})
            shutil.rmtree(folder, ignore_errors=True)

    async def _post(self, path: str, body: dict[str, str]) -> list[tuple[EndpointEngine, Answer]]:
        endpoints = self._engine.endpoints
        answers = await asyncio.gather(*(endpoint.post(path, body) for endpoint in endpoints))
        return list(zip(endpoints, answers, strict=True))

    async def _clear(self) -> None:
        """Remove what an earlier process of this run left, here and at the endpoints."""
        listed = await asyncio.gather(
            *(endpoint.list_models() for endpoint in self._engine.endpoints)
        )
        for name in _adapters_in(self._folder, (model for models in listed for model in models)):
            await self._post("/unload_lora_adapter", {"lora_name": name})
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
        f"{endpoint.address} refuses the adapter (HTTP {answer.status}: {answer.text}); start "
        "vLLM with the variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and with --enable-lora "
        f"--max-lora-rank {rank}, where it can read {path.parent}"
    )
