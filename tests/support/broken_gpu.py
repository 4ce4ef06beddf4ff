"""Engines whose GPU fails, on a machine without one, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent.engines.base import BaseEngine, EngineChoice
from memagent.engines.local.engine import LocalEngine

if TYPE_CHECKING:
    from memagent.rl.distributed.replicas import EmbeddedModel, EmbeddedReplica

REASON = "CUDA error: an illegal memory access was encountered"


def break_gpu(engine: BaseEngine) -> None:
    """Have every step of a local engine fail as on a lost GPU."""
    assert isinstance(engine, LocalEngine)
    model: Any = engine._generator._model
    model.run = fail


def fail(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError(REASON)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenAtFirst:
    """Opens a replica on a GPU that fails; on a sound one when it is called again."""

    marker: Path
    opener: EmbeddedReplica

    def __call__(self) -> EmbeddedModel:
        opened = self.opener()
        if not self.marker.exists():
            self.marker.write_text("")
            break_gpu(opened.engine)
        return opened


@dataclass(frozen=True, kw_only=True)
class BrokenChoice(EngineChoice):
    """The same for an engine that is named."""

    marker: Path

    def open(self, **options: Any) -> BaseEngine:
        engine = EngineChoice.open(self, **options)
        if not self.marker.exists():
            self.marker.write_text("")
            break_gpu(engine)
        return engine
