"""Run async code from ordinary code, also where an event loop is running already (notebooks).

One background thread holds one event loop for the life of the process, so that an engine's
connections stay open from one blocking call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_closers: list[Callable[[], Coroutine[Any, Any, None]]] = []


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Ctrl-C cancels it before it is raised here."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """An async iterator as an ordinary one."""
    try:
        while (found := run(_next(items))) is not None:
            yield found[0]
    finally:
        close = getattr(items, "aclose", None)
        if close and _loop and not _loop.is_closed():  # when the process ends, `_end` has done it
            run(close())


def when_loop_ends(
    loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """If this is our own loop, call `close` before the process exits."""
    if loop is _loop:
        _closers.append(close)


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    """The next item, wrapped, because an item may itself be None; None at the end."""
    try:
        return (await anext(items),)
    except StopAsyncIteration:
        return None


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_loop.run_forever, name="memagent-loop", daemon=True)
            thread.start()
            atexit.register(_end, _loop, thread)
        return _loop


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close iterators, connections and the loop itself. What hangs is not waited for."""
    for close in (loop.shutdown_asyncgens, *_closers):
        asyncio.run_coroutine_threadsafe(close(), loop).result(timeout=5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=5)
    if not thread.is_alive():
        loop.close()
