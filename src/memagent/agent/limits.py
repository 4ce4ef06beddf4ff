"""Limits on calls and cost: a call that would exceed one is not sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memagent.config import check_numbers
from memagent.errors import ConfigError, LimitReached
from memagent.types import Prices, Usage


class Reservation(NamedTuple):
    """The highest cost of a call in flight."""

    cost: float


class Limits:
    """Counts what a run has used, calls in flight included at their highest possible cost."""

    def __init__(
        self,
        *,
        max_calls: int | None = None,
        max_cost: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        check_numbers(max_calls=max_calls, max_cost=max_cost)
        if prices is not None:
            check_numbers(price_in=prices.prompt, price_out=prices.completion)
        if max_cost is not None and prices is None:
            raise ConfigError("a limit on cost needs prices; give `price_in` and `price_out`")
        self.max_calls = max_calls
        self.max_cost = max_cost
        self.has_prices = prices is not None
        self.num_calls = 0
        self.cost = 0.0
        self.on_used: Callable[[Usage], object] | None = None
        """Called with what each call used."""
        self._prices = prices or Prices(prompt=0.0, completion=0.0)

    def count(self, usage: Usage) -> None:
        """Count what was used before, as when a run is resumed."""
        self.num_calls += usage.calls
        self.cost += self._prices.cost_of(usage)

    def reserve(self, *, prompt_tokens: int, completion_tokens: int) -> Reservation:
        """Make room for a call. Raises LimitReached when it could exceed a limit."""
        cost = self._prices.cost(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        if self.max_calls is not None and self.num_calls + 1 > self.max_calls:
            calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
            raise LimitReached(f"stopped after {calls}: `max_calls={self.max_calls}`")
        if self.max_cost is not None and self.cost + cost > self.max_cost:
            raise LimitReached(
                f"stopped at a cost of {self.cost:.4f}: the next call could cost {cost:.4f} and exceed "
                f"`max_cost={self.max_cost}`"
            )
        self.num_calls += 1
        self.cost += cost
        return Reservation(cost)

    def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Replace what a call might have cost by what it did."""
        self.cost += self._prices.cost_of(usage) - reservation.cost
        if self.on_used and usage.calls:
            self.on_used(usage)

    def release(self, reservation: Reservation) -> None:
        """Give back the room of a call that failed."""
        self.num_calls -= 1
        self.cost -= reservation.cost
