"""When to try a failed call again: jittered backoff, the server's own word, and an end of patience.

What decides is time, not a number of attempts: an endpoint that is down for a minute costs a minute.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

FIRST_DELAY = 0.25
LONGEST_DELAYS = {"unreachable": 2.0, "failed": 5.0, "busy": 20.0}
SHORTEST_WAIT, LONGEST_FLOOR = 0.25, 1.0
"""Seconds between attempts at least, whatever the server asks for: the first time, and after several."""
LONGEST_WAIT = 366 * 86400.0
"""Longer waits that a server asks for count as this one."""
FIRST_CONTACT_PATIENCE = 20.0
"""Seconds for an address that has never answered: more likely mistyped than down."""

FailureKind = Literal["unreachable", "failed", "busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt that may be tried again."""

    kind: FailureKind
    reason: str
    retry_after: float | None = None
    """Seconds the server asked us to wait; 0 where the next attempt can be sent at once."""
    num_attempts: int = 1
    """Requests that failed: more than one where several endpoints were tried in turn."""


RetryListener = Callable[[Failure, float], None]
"""Gets each failed attempt and the seconds before the next."""


class Patience:
    """Decides, for one call, how long to wait before the next attempt and when to stop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started: float | None = None
        self.num_failures = 0
        self.num_attempts = 0
        """Requests so far; a failure may stand for several."""

    def delay(self, failure: Failure, *, has_answered: bool) -> float | None:
        """Seconds to wait before trying again, or None when patience has run out.

        `has_answered`: the endpoint has answered some call by now.
        """
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        delay = _delay(failure, self.num_failures)
        self.num_failures += 1
        self.num_attempts += failure.num_attempts
        is_first_contact = failure.kind == "unreachable" and not has_answered
        limit = min(self._seconds, FIRST_CONTACT_PATIENCE) if is_first_contact else self._seconds
        return None if now - self._started + delay > limit else delay

    @property
    def waited(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._started is None else time.monotonic() - self._started


def _delay(failure: Failure, num_failures: int) -> float:
    if failure.retry_after is not None:
        floor = min(LONGEST_FLOOR, SHORTEST_WAIT * 2.0 ** min(num_failures, 16))
        wait = max(failure.retry_after, floor) if failure.retry_after else 0.0
        return wait * random.uniform(1.0, 1.1)
    longest = LONGEST_DELAYS[failure.kind]
    return min(longest, FIRST_DELAY * 2.0 ** min(num_failures, 16)) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The wait a server asks for, in seconds: `retry-after-ms`, or `Retry-After` as number or date.

    None where it makes no sense; never shorter than `SHORTEST_WAIT`.
    """
    try:
        if milliseconds := headers.get("retry-after-ms"):
            seconds = float(milliseconds) / 1000
        elif value := headers.get("retry-after"):
            seconds = _seconds(value)
        else:
            return None
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, SHORTEST_WAIT), LONGEST_WAIT) if math.isfinite(seconds) else None


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return parsedate_to_datetime(value).timestamp() - time.time()
