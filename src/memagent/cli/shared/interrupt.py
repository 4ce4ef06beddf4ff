"""Signals that end a command."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def stop_like_ctrl_c(number: int = signal.SIGTERM) -> None:
    """Cancel the running task on a signal, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError):  # Windows has no signal handlers in its event loop
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
