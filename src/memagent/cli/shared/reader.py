"""The options of commands that read texts: the engine, how it reads, what it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from memagent.cli.shared.engine import EngineOptions, engine_options
from memagent.cli.shared.options import all_options, reading_options
from memagent.cli.shared.run_options import LimitOptions, limit_options, price_options
from memagent.config import AgentConfig

reader_options = all_options(limit_options, price_options, engine_options, reading_options())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What `reader_options` were given."""

    tokenizer: str | None
    limits: LimitOptions
    engine: EngineOptions
    agent: Annotated[dict[str, Any], AgentConfig]
