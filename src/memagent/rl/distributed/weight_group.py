"""The group of the first rank and the engine replicas, in which weights are broadcast: nccl on GPUs, gloo on CPUs.

    rank 0     store = open_store(host)          group = WeightGroup(spec, 0, store)    group.broadcast(flat)
    replica 1  group = WeightGroup(spec, 1)      group.broadcast(flat)                  # flat has the bytes now

It is beside the group in which the ranks train, and has nothing to do with it. Each broadcast has a limit: where a
member is gone, the others get an error within `seconds`, and the group is of no use any more.
"""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.05
"""How often a member that waits looks whether the group was left."""
LEFT = "the group for weights was left"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
"""With it an operation that takes too long raises an error. Without, it ends the process."""

_place_in_source = re.compile(r"^\[[^]]*\] *")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Name, place and size of a group; the same for all its members."""

    name: str
    meeting: str
    """HOST:PORT of the store of the first rank."""
    size: int
    on_gpu: bool
    seconds: float
    """How long a member may wait for the others in one operation."""


def open_store(host: str) -> TCPStore:
    """Where the members of groups find each other, on a free port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def use_loopback(host: str) -> None:
    """On a cluster of one machine the machine's name may lead nowhere."""
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class WeightGroup:
    """A member of a group; the first one sends."""

    def __init__(self, spec: GroupSpec, rank: int, store: TCPStore | None = None) -> None:
        """The first member has the store. Members meet at their first broadcast."""
        self.spec = spec
        self._rank = rank
        self._store = store
        self._limit = timedelta(seconds=spec.seconds)
        self._group: Any = None
        self._is_left = False

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send the bytes of the first member to all others. Raises RuntimeError where one is gone."""
        sending: Future[None] = Future()
        # in a thread: what nccl and gloo wait for has no limit everywhere, and cannot be interrupted
        threading.Thread(target=self._send, args=(flat, sending), daemon=True).start()
        end = monotonic() + self.spec.seconds
        while not wait([sending], timeout=POLL_SECONDS).done:
            if self._is_left:
                raise RuntimeError(LEFT)
            if monotonic() > end:
                raise RuntimeError(f"a broadcast of weights took over {self.spec.seconds:g} s")
        try:
            sending.result()
        except RuntimeError as error:
            reason = _place_in_source.sub("", str(error))
            raise RuntimeError(f"a member of the group for weights is gone: {reason}") from None

    def close(self) -> None:
        """Leave the group; what waits for it fails, here and elsewhere."""
        self._is_left = True
        group, self._group = self._group, None  # its connections close with the last reference
        if group is not None:
            threading.Thread(target=_abort, args=(group,), daemon=True).start()

    def _send(self, flat: torch.Tensor, sending: Future[None]) -> None:
        try:
            if flat.is_cuda:
                torch.cuda.set_device(flat.device)
            group = self._group
            if group is None:
                group = self._group = self._joined()
            if self._is_left:
                raise RuntimeError(LEFT)
            group.broadcast(flat, 0, self._limit).wait(self._limit)
        except Exception as error:
            sending.set_exception(error.with_traceback(None))
        else:
            sending.set_result(None)

    def _joined(self) -> Any:
        host, _, port = self.spec.meeting.rpartition(":")
        store = self._store
        if store is None:
            store = TCPStore(host, int(port), is_master=False, timeout=self._limit)
        use_loopback(host)
        named = PrefixStore(self.spec.name, store)
        join = _nccl if self.spec.on_gpu else dist.ProcessGroupGloo
        return join(named, self._rank, self.spec.size, self._limit)


def _abort(group: Any) -> None:
    """End a group. gloo waits for an operation in progress."""
    with suppress(RuntimeError):
        group.abort()


def _nccl(store: PrefixStore, rank: int, size: int, limit: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    before = os.environ.get(BLOCKING)
    os.environ[BLOCKING] = "1"  # read when a group is made, so that it holds for this one alone
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[BLOCKING]
        else:
            os.environ[BLOCKING] = before
