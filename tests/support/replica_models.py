"""Replicas of tiny models, and what they are expected to reply, for tests."""

import asyncio
from pathlib import Path
from typing import Any

from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.rl.distributed.replicas import EmbeddedReplica
from memagent.rl.settings import ModelSettings
from memagent.types import Completion, Sampling
from tests.support.tiny_models import make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the red ledger?"}]
LONG = Sampling(max_tokens=300, temperature=1.0, seed=4)


def embedded(model: Path, **settings: Any) -> EmbeddedReplica:
    return EmbeddedReplica(
        model=ModelSettings(source=str(model), **settings),
        source=str(model),
        seed=0,
        engine_settings={"cache_gb": 0.01},
    )


def two_models(folder: Path) -> tuple[Path, Path]:
    """Two models of the same shapes with different weights."""
    first, second = (make_tiny_model(folder / str(seed), "qwen2", seed=seed) for seed in (0, 1))
    return first, second


async def greedy(engine: Any) -> Completion:
    reply: Completion = await engine.complete(MESSAGES, Sampling(max_tokens=12, temperature=0.0))
    return reply


async def expected(model: Path, adapter: Path | None = None) -> Completion:
    loaded = load(str(model), adapter=None if adapter is None else str(adapter))
    async with LocalEngine(loaded) as engine:
        return await greedy(engine)


def named(model: Path, adapter: Path | None = None) -> list[tuple[str, Any]]:
    loaded = load(str(model), adapter=None if adapter is None else str(adapter)).model
    return [(n, p) for n, p in loaded.named_parameters() if adapter is None or "lora_" in n]


async def until(condition: Any) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.05)
