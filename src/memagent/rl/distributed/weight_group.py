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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.001
LEFT = "the group for weights was left"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
"""With it an operation that takes too long raises an error. Without, it ends the process."""

_place_in_source = re.compile(r"^\[[^]]*\] *")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group, as all members are told of it."""

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
        """Wait for the others. The first member has the store."""
        self.spec = spec
        self._limit = timedelta(seconds=spec.seconds)
        host, _, port = spec.meeting.rpartition(":")
        if store is None:
            store = TCPStore(host, int(port), is_master=False, timeout=self._limit)
        use_loopback(host)
        named = PrefixStore(spec.name, store)
        self._sending: Any = None
        """The operation in progress."""
        self._group: Any = (_nccl if spec.on_gpu else _gloo)(named, rank, spec.size, self._limit)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send the bytes of the first member to all others. Raises RuntimeError where one is gone."""
        group, end = self._group, monotonic() + self.spec.seconds
        if group is None:
            raise RuntimeError(LEFT)
        sending = self._sending = group.broadcast(flat, 0, self._limit)
        while not sending.is_completed():
            if self._group is None:  # another thread has left it, which does not wake this one
                raise RuntimeError(LEFT)
            if monotonic() > end:
                raise RuntimeError(f"a broadcast of weights took over {self.spec.seconds:g} s")
            sleep(POLL_SECONDS)
        try:
            sending.wait()
        except RuntimeError as error:
            reason = _place_in_source.sub("", str(error))
            raise RuntimeError(f"a member of the group for weights is gone: {reason}") from None
        finally:
            self._sending = None

    def close(self) -> None:
        """Leave the group; what waits for it fails, here and elsewhere."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_abort, args=(group, self._sending), daemon=True).start()


def _abort(group: Any, sending: Any) -> None:
    """End a group. Whoever drops an operation in progress last waits for its end: this thread."""
    for end in (group.abort, *(() if sending is None else (sending.wait,))):
        with suppress(RuntimeError):
            end()


def _gloo(store: PrefixStore, rank: int, size: int, limit: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, limit)


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
