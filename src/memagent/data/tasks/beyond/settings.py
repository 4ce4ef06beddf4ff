"""What every task of this folder takes."""

from __future__ import annotations

from pydantic import Field

from memagent.data.tasks.registry import TaskSettings
from memagent.errors import ConfigError


class BeyondSettings(TaskSettings):
    """Length, tokenizer, seed, and how much of the filler looks like what is asked for."""

    tokens: int | None = Field(default=8192, ge=64)
    """Length of the text in tokens of the tokenizer; reached within 2 %, never exceeded."""
    distractor_share: float = Field(default=0.05, ge=0, le=0.5)
    """Share of the filler's sentences that are facts of the asked form about something else."""

    @property
    def length(self) -> int:
        """`tokens`, which these tasks need."""
        if self.tokens is None:
            raise ConfigError("tokens: say how long the text should be, such as tokens=8192")
        return self.tokens
