"""The options of commands that read texts: the engine, how it reads, what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from memagent.cli.shared.engine import ENGINES, EngineOptions, engine_options
from memagent.cli.shared.options import SHOWN, all_options, reading_options, set_option
from memagent.cli.shared.run_options import PRICES, LimitOptions, limit_options
from memagent.config import AgentConfig

F = TypeVar("F", bound=Callable[..., Any])
SETTING = "Any other setting, such as memory_tokens=512 or price_in=2.5; repeatable. docs/config.md lists them."


def reader_options(shown: Sequence[str] = SHOWN, **further: Any) -> Callable[[F], F]:
    """All of them, with options for those settings of reading that are `shown`; `further` values by name, each with its type, may be set too."""
    return all_options(
        limit_options,
        engine_options,
        reading_options(only=shown),
        set_option(
            AgentConfig,
            *ENGINES,
            panel="Reading",
            help=SETTING,
            further={**PRICES, **further},
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What `reader_options` were given."""

    tokenizer: str | None
    limits: LimitOptions
    engine: EngineOptions
    agent: Annotated[dict[str, Any], AgentConfig]
