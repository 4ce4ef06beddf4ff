"""A time limit for the headers of a request: connections that never finish them are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20.0
"""Time from the first byte of a request, or from connecting, to the end of its headers."""


def deadline_protocol() -> Any:
    """uvicorn's HTTP protocol with the time limit."""

    class DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at run time
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Start the time limit between requests, and end it when a request has its headers."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._unwatch()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

        def _unwatch(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _close(self) -> None:
            self._deadline = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return DeadlineProtocol
