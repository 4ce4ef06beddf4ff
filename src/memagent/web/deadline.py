"""Time limits of connections: for the headers of a request, and for a client that does not take what it is sent."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20.0
"""Time from the first byte of a request, or from connecting, to the end of its headers."""
WRITE_SECONDS = 60.0
"""Time in which a client has to take what was written to it, which is a piece of a response."""


def deadline_protocol() -> Any:
    """uvicorn's HTTP protocol with the time limits."""

    class DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at run time
        _deadline: asyncio.TimerHandle | None = None
        _write_deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # whatever is not sent yet counts as waiting
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._unwatch_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            # not closed, which would wait until all is sent
            self._write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

        def resume_writing(self) -> None:
            self._unwatch_writing()
            super().resume_writing()

        def _unwatch_writing(self) -> None:
            if self._write_deadline is not None:
                self._write_deadline.cancel()
                self._write_deadline = None

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
