"""Weights straight from ranks to engine replicas, bucket by bucket, without the object store.

    broadcast   rank 0 ── WeightGroup (nccl, gloo) ──▶ all replicas              replicas have their own GPUs
    ipc         rank i ── SharedBuffer, `deliver` ──▶ the replica beside it      each shares the GPU of a rank

    rank     WeightSender.send(weights, buckets, route, device)       gathers with the other ranks, and sends
    replica  WeightReceiver.received(route, buckets, device)          yields what arrives

The driver (`direct.py`) tells both sides their routes. A side that fails says why, within the seconds of its route;
whoever had begun to take weights then needs all of them again.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from memagent.cluster import full_store_errors
from memagent.engines.replicas import first_line
from memagent.rl.distributed.buckets import (
    BUCKET_BYTES,
    Bucket,
    BufferHandle,
    Filled,
    SharedBuffer,
    buffer_bytes,
    fill,
    opened,
    specs_of,
    split,
    tensors,
)
from memagent.rl.distributed.weight_group import GroupSpec, WeightGroup, open_store

GRACE_SECONDS = 5.0
"""For the answer of a replica, beyond the time that it has itself."""
STOPPED = "the ranks have stopped sending weights"
NamedWeights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastRoute:
    """All members of a group, of which the first sends."""

    group: GroupSpec
    member: int

    @property
    def key(self) -> str:
        """By which a push is abandoned; its group is of no use then."""
        return self.group.name


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcRoute:
    """A rank and the replica that shares its device."""

    push: str
    """Which push it is: what comes late must not be taken for the next one."""
    seconds: float
    """How long a replica may take to copy a bucket."""
    replica: Any = None
    """The actor that the rank delivers to."""

    @property
    def key(self) -> str:
        """By which a push is abandoned."""
        return self.push


Route = BroadcastRoute | IpcRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What became of a push in a replica. Errors travel as values: Ray would wrap them."""

    error: str | None = None
    is_alive: bool = True
    """False when the engine has ended: the replica is of no use any more."""


class _Membership:
    """The group that a process is in, if it is in one."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def join(self, route: BroadcastRoute, store: TCPStore | None = None) -> WeightGroup:
        """The group of a route: that of the last push, or a new one in its place."""
        if self._group is None or self._group.spec != route.group:
            self.leave()
            self._group = WeightGroup(route.group, route.member, store)
        return self._group

    def leave(self) -> None:
        """Leave the group; the others notice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


# --- in a rank ------------------------------------------------------------------------------------


class WeightSender:
    """A rank that sends weights, or only gathers them for those that do."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._membership = _Membership()

    def meet(self, host: str) -> str:
        """Open the place where replicas find the first rank; its HOST:PORT."""
        if self._store is None:
            self._store = open_store(host)
        return f"{host}:{self._store.port}"

    def send(
        self,
        weights: NamedWeights,
        buckets: Sequence[Bucket],
        route: Route | None,
        device: torch.device | str,
    ) -> str | None:
        """Send all weights; None, or why not all were sent.

        Weights are asked for to the last one whatever happens, because other ranks gather them too.
        """
        if route is None:
            _drain(weights)
            return None
        with ExitStack() as stack:
            try:
                link = self._link(route, buffer_bytes(buckets), device)
                buffer, send = stack.enter_context(link)
            except Exception as error:
                _drain(weights)
                return first_line(error)
            reason = _sent(fill(weights, buckets, buffer), send)
        if reason is not None:
            self._membership.leave()
        return reason

    @contextmanager
    def _link(
        self, route: Route, num_bytes: int, device: torch.device | str
    ) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
        """A buffer, and what sends a part of it."""
        if isinstance(route, BroadcastRoute):
            group = self._membership.join(route, self._store)
            yield torch.empty(num_bytes, dtype=torch.uint8, device=device), group.broadcast
            return
        shared = SharedBuffer(num_bytes, device)
        try:
            yield shared.flat, partial(_deliver, route, shared.handle)
        finally:
            shared.close()


def _drain(weights: NamedWeights) -> None:
    for _ in weights:
        pass


def _sent(filled: Iterable[Filled], send: Callable[[torch.Tensor], None]) -> str | None:
    reason = None
    for one in filled:
        if reason is None:
            try:
                send(one.flat)
            except Exception as error:
                reason = first_line(error)
    return reason


def _deliver(route: IpcRoute, handle: BufferHandle, flat: torch.Tensor) -> None:
    """Have the replica copy what is in a buffer. Raises RuntimeError where it does not."""
    import ray

    if flat.is_cuda:
        torch.cuda.synchronize()
    call = route.replica.deliver.remote(route.push, handle, route.seconds)
    error = ray.get(call, timeout=route.seconds + GRACE_SECONDS)
    if error is not None:
        raise RuntimeError(error)


# --- in a replica ---------------------------------------------------------------------------------


class WeightReceiver:
    """Takes buckets that ranks send."""

    def __init__(self) -> None:
        self._membership = _Membership()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._abandoned = ""

    def received(
        self, route: Route, buckets: Sequence[Bucket], device: torch.device | str
    ) -> Generator[Filled]:
        """The buckets as they arrive; each is valid until the next one is asked for."""
        if route.key == self._abandoned:
            raise RuntimeError(STOPPED)
        if isinstance(route, IpcRoute):
            mailbox = self._mailboxes.setdefault(route.push, _Mailbox())
            try:
                yield from mailbox.received(buckets, route.seconds)
            finally:
                self._mailboxes.pop(route.push, None)
            return
        group = self._membership.join(route)
        buffer = torch.empty(buffer_bytes(buckets), dtype=torch.uint8, device=device)
        try:
            for bucket in buckets:
                flat = buffer[: bucket.num_bytes]
                group.broadcast(flat)
                yield Filled(bucket, flat)
        except BaseException:
            self._membership.leave()
            raise

    async def deliver(self, push: str, handle: BufferHandle, seconds: float) -> str | None:
        """A rank has filled a buffer: wait until it is copied; None, or why it is not."""
        mailbox = self._mailboxes.setdefault(push, _Mailbox())
        try:
            await asyncio.wait_for(mailbox.deliver(handle), seconds)
        except TimeoutError:
            self._mailboxes.pop(push, None)
            return f"a bucket of weights was not copied within {seconds:g} s"
        except RuntimeError as error:
            return str(error)
        return None

    def abandon(self, key: str) -> None:
        """Expect nothing more of a push: `received` fails now, not after its seconds."""
        self._abandoned = key
        self._membership.leave()
        for mailbox in list(self._mailboxes.values()):
            mailbox.close()


class _Mailbox:
    """Buffers of one push that are to be copied; None: no more will come."""

    def __init__(self) -> None:
        self._delivered: queue.Queue[tuple[BufferHandle, Future[None]] | None] = queue.Queue()

    def close(self) -> None:
        self._delivered.put(None)

    async def deliver(self, handle: BufferHandle) -> None:
        copied: Future[None] = Future()
        self._delivered.put((handle, copied))
        await asyncio.wrap_future(copied)

    def received(self, buckets: Sequence[Bucket], seconds: float) -> Iterator[Filled]:
        flat: torch.Tensor | None = None
        for bucket in buckets:
            try:
                delivered = self._delivered.get(timeout=seconds)
            except queue.Empty:
                raise RuntimeError(f"no bucket of weights came within {seconds:g} s") from None
            if delivered is None:
                raise RuntimeError(STOPPED)
            handle, copied = delivered
            try:
                flat = opened(handle) if flat is None else flat  # one buffer for all buckets
                yield Filled(bucket, flat[: bucket.num_bytes])
                if flat.is_cuda:
                    torch.cuda.synchronize()
            except BaseException as error:
                _settle(copied, RuntimeError(f"the replica cannot take weights: {error!r}"))
                raise
            _settle(copied)


def _settle(copied: Future[None], error: Exception | None = None) -> None:
    """Tell the rank, unless it has given up."""
    if not copied.set_running_or_notify_cancel():
        return
    if error is None:
        copied.set_result(None)
    else:
        copied.set_exception(error)


# --- weights in the object store ------------------------------------------------------------------

# The driver passes references on and never sees a weight. A bucket is one object of up to `BUCKET_BYTES`, so that
# a model larger than half of the object store still passes.


def ship(
    parameters: Iterable[tuple[str, torch.Tensor]], *, bucket_bytes: int = BUCKET_BYTES
) -> list[Any]:
    """Put tensors into the object store; references to their buckets."""
    import ray

    weights = list(parameters)
    buckets = split(specs_of(weights), bucket_bytes=bucket_bytes)
    references = []
    for bucket, flat in fill(
        weights, buckets, torch.empty(buffer_bytes(buckets), dtype=torch.uint8)
    ):
        with full_store_errors(f"{bucket.num_bytes / 1e9:.2g} GB of weights"):
            references.append(ray.put((bucket, flat.numpy())))
    return references


def shipped(buckets: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of buckets, on the CPU and read-only."""
    import ray

    for reference in buckets:
        bucket, data = ray.get(reference)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0)
        yield from tensors([Filled(bucket, flat)])
