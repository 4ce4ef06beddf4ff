"""New weights for engine replicas: in buckets, straight from the ranks or through the object store.

    broadcast   rank 0 ── WeightGroup (nccl, gloo) ──▶ all replicas              replicas have their own GPUs
    ipc         rank i ── SharedBuffer, `deliver` ──▶ the replica beside it      each shares the GPU of a rank
    store       rank 0 ── ship ──▶ Ray ── shipped ──▶ all replicas               where a direct push cannot be, or failed

    specs    name, dtype, shape of every weight              known to both sides, without a gather
    split    a few hundred MB each, of one dtype             the same on both sides
    fill     gathered tensors ──▶ buffer                     in a rank, one bucket after the other
    tensors  buffer ──▶ views by name                        in a replica

    rank     WeightSender.send(weights, buckets, route, device)       gathers with the other ranks, and sends
    replica  WeightReceiver.received(route, buckets, device)          yields what arrives
    driver   DirectTransfer(ranks, "broadcast").send({0: actor, 1: actor}, 12)     tells both sides their routes

A side that fails says why, within the seconds of its route; whoever had begun to take weights then needs all of them
again. The first rank and the replicas make a new group when one of them is another than the last time, or when the last
push failed. After `MAX_FAILURES` failures in a row the direct way is given up.

A tensor larger than a bucket has one of its own, so the buffer takes as much as the largest tensor at least. A bucket
has one dtype: its tensors lie behind each other without gaps, as vLLM wants them.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from memagent.cluster import full_store_errors
from memagent.engines.replicas import first_line
from memagent.errors import ClusterError
from memagent.rl.settings import TrainConfig

if TYPE_CHECKING:
    from memagent.rl.distributed.ranks import RankGroup

BUCKET_BYTES = 256 * 2**20


class TensorSpec(NamedTuple):
    """A weight without its values."""

    name: str
    dtype: str
    """Such as bfloat16."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class Bucket(NamedTuple):
    """Weights that travel together."""

    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all its tensors."""
        return sum(spec.num_bytes for spec in self.specs)


class Filled(NamedTuple):
    """A bucket and its bytes, which are those of the next one as soon as that is asked for."""

    bucket: Bucket
    flat: torch.Tensor


def specs_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """What tensors are; sharded ones have the shape of the whole."""
    return [
        TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in parameters
    ]


def split(specs: Sequence[TensorSpec], *, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Weights in their order, in buckets of up to `bucket_bytes`."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not buckets or spec.num_bytes > room or spec.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return [Bucket(tuple(one)) for one in buckets]


def buffer_bytes(buckets: Sequence[Bucket]) -> int:
    """The size of a buffer that each of them fits into."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


def fill(
    weights: Iterable[tuple[str, torch.Tensor]], buckets: Sequence[Bucket], buffer: torch.Tensor
) -> Iterator[Filled]:
    """Copy tensors into a buffer of bytes, bucket by bucket. They come in the order of the buckets."""
    coming = iter(weights)
    for bucket in buckets:
        start = 0
        for spec in bucket.specs:
            name, value = next(coming)
            assert name == spec.name, f"{name} comes where {spec.name} was announced"
            end = start + spec.num_bytes
            buffer[start:end].copy_(value.detach().contiguous().reshape(-1).view(torch.uint8))
            start = end
        yield Filled(bucket, buffer[:start])


def tensors(filled: Iterable[Filled]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in buckets by name, as views of the buffer."""
    for bucket, flat in filled:
        start = 0
        for spec in bucket.specs:
            end = start + spec.num_bytes
            dtype: torch.dtype = getattr(torch, spec.dtype)
            yield spec.name, flat[start:end].view(dtype).reshape(spec.shape)
            start = end


# --- buffers that two processes see ---------------------------------------------------------------

# A buffer is handed out once and opened once in each push: torch counts both, and frees the memory when they are even. It must
# live in the rank until the replica has copied the last bucket.


DEVICE_INDEX = 6
"""Place of the device in what torch makes of a CUDA tensor; it has another number in another process."""


class BufferHandle(NamedTuple):
    """How another process opens a buffer."""

    on_gpu: bool
    arguments: tuple[Any, ...]


class SharedBuffer:
    """A buffer of bytes; `handle` opens it elsewhere."""

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        self._file: int | None = None
        if torch.device(device).type == "cuda":
            self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.handle = cuda_handle(self.flat)
            return
        # no name in a file system: it is gone with the last process that has it
        self._file = os.memfd_create("memagent-weights")
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.handle = BufferHandle(on_gpu=False, arguments=(path, num_bytes))
        self.flat = _mapped(path, num_bytes)

    def close(self) -> None:
        """Free the memory, once nobody else has it open."""
        del self.flat
        if self._file is not None:
            os.close(self._file)
            self._file = None
        else:
            torch.cuda.ipc_collect()


def cuda_handle(flat: torch.Tensor) -> BufferHandle:
    """How another process opens a tensor on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
    return BufferHandle(on_gpu=True, arguments=tuple(arguments))


def opened(handle: BufferHandle) -> torch.Tensor:
    """The bytes of another process. They stay open as long as the tensor lives."""
    if not handle.on_gpu:
        return _mapped(*handle.arguments)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle.arguments)
    arguments[DEVICE_INDEX] = torch.cuda.current_device()
    flat: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return flat


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


# --- a group of the first rank and the replicas ---------------------------------------------------

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


# --- bucket by bucket, without the object store ---------------------------------------------------

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


class _Member:
    """A process that may be in a group."""

    _group: WeightGroup | None = None

    def _joined(self, route: BroadcastRoute, store: TCPStore | None = None) -> WeightGroup:
        """The group of a route: that of the last push, or a new one in its place."""
        if self._group is None or self._group.spec != route.group:
            self._leave()
            self._group = WeightGroup(route.group, route.member, store)
        return self._group

    def _leave(self) -> None:
        """Leave the group; the others notice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


# --- in a rank ------------------------------------------------------------------------------------


class WeightSender(_Member):
    """A rank that sends weights, or only gathers them for those that do."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

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
        reason: str | None = None
        send: Callable[[torch.Tensor], None] | None = None
        coming: Iterable[Any] = weights
        with ExitStack() as stack:
            if route is not None:
                try:
                    link = self._link(route, buffer_bytes(buckets), device)
                    buffer, send = stack.enter_context(link)
                    coming = fill(weights, buckets, buffer)
                except Exception as error:
                    reason = first_line(error)
            for one in coming:
                if send is not None and reason is None:
                    try:
                        send(one.flat)
                    except Exception as error:
                        reason = first_line(error)
        if reason is not None:
            self._leave()
        return reason

    @contextmanager
    def _link(
        self, route: Route, num_bytes: int, device: torch.device | str
    ) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
        """A buffer, and what sends a part of it."""
        if isinstance(route, BroadcastRoute):
            group = self._joined(route, self._store)
            yield torch.empty(num_bytes, dtype=torch.uint8, device=device), group.broadcast
            return
        shared = SharedBuffer(num_bytes, device)
        try:
            yield shared.flat, partial(_deliver, route, shared.handle)
        finally:
            shared.close()


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


class WeightReceiver(_Member):
    """Takes buckets that ranks send."""

    def __init__(self) -> None:
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
        group = self._joined(route)
        buffer = torch.empty(buffer_bytes(buckets), dtype=torch.uint8, device=device)
        try:
            for bucket in buckets:
                flat = buffer[: bucket.num_bytes]
                group.broadcast(flat)
                yield Filled(bucket, flat)
        except BaseException:
            self._leave()
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
        self._leave()
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


# --- a push, as the driver directs it -------------------------------------------------------------

DirectWay = Literal["broadcast", "ipc"]
MAX_FAILURES = 3
"""Pushes that fail one after the other before the object store is used for good."""


def direct_way(config: TrainConfig, *, on_gpu: bool) -> DirectWay | None:
    """How weights get to the replicas of a run; None: through the object store."""
    assert config.cluster is not None
    is_vllm = config.rollout.engine is not None
    if not config.has_replicas or (is_vllm and (config.has_adapter or not on_gpu)):
        return None  # vLLM reads its adapters, and on CPUs its weights, from files
    return "ipc" if config.cluster.placement == "colocated" else "broadcast"


class TransferResult(NamedTuple):
    """What became of a push."""

    reason: str | None
    """Why the ranks could not send everything."""
    received: Sequence[Received | BaseException]
    """By replica, in the order they were given."""


class DirectTransfer:
    """The direct way of a run."""

    def __init__(
        self,
        ranks: RankGroup,
        way: DirectWay,
        *,
        seconds: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`seconds` is how long one side may wait for the other with a bucket."""
        self._ranks = ranks
        self._way = way
        self._seconds = seconds
        self._bucket_bytes = bucket_bytes
        self._members: list[Any] = []
        """The first rank and the replicas of the group that is there."""
        self._meeting = ""
        self._buckets: list[Bucket] = []
        self._name = ""
        self._num_sent: int | None = None
        """Changes of the weights that were in them when they were sent."""
        self._num_failures = 0

    @property
    def is_usable(self) -> bool:
        """Whether it is worth trying."""
        return self._num_failures < MAX_FAILURES

    async def send(self, replicas: Mapping[int, Any], policy_version: int) -> TransferResult:
        """Send the weights of the ranks to replicas, and wait until both sides are done."""
        ranks, actors = self._ranks.actors, list(replicas.values())
        members = [ranks[0], *actors]
        if list(map(id, self._members)) != list(map(id, members)):  # else the old group is there
            self._meeting, specs = await self._ranks.announce()
            self._buckets = split(specs, bucket_bytes=self._bucket_bytes)
            self._members, self._name = members, secrets.token_hex(8)
        self._num_sent = self._ranks.num_changes
        sending, to = self._routes(replicas)
        receiving = [
            actor.receive.remote(route, self._buckets, policy_version)
            for actor, route in zip(actors, to, strict=True)
        ]
        reason: str | None = "the ranks have ended"
        received: Sequence[Received | BaseException] = ()
        try:
            reason = await self._ranks.send(sending, self._buckets)
        finally:
            if reason is not None:
                self._members = []
                for actor in actors:
                    actor.abandon.remote(to[0].key)
            received = await asyncio.gather(*receiving, return_exceptions=True)
        is_taken = (isinstance(one, Received) and one.error is None for one in received)
        if reason is None and all(is_taken):
            self._num_failures = 0
        else:
            self._num_failures += 1
            self._members = []
        return TransferResult(reason, received)

    def _routes(self, replicas: Mapping[int, Any]) -> tuple[list[Route | None], list[Route]]:
        """What each rank and each replica does."""
        num = len(self._ranks.actors)
        if self._way == "ipc":
            one = IpcRoute(push=secrets.token_hex(8), seconds=self._seconds)
            beside = [replicas.get(rank) for rank in range(num)]
            sending: list[Route | None] = [
                None if it is None else replace(one, replica=it) for it in beside
            ]
            return sending, [one] * len(replicas)
        group = GroupSpec(
            name=self._name,
            meeting=self._meeting,
            size=len(self._members),
            on_gpu=self._ranks.on_gpu,
            seconds=self._seconds,
        )
        first, *others = (
            BroadcastRoute(group=group, member=number) for number in range(group.size)
        )
        return [first, *[None] * (num - 1)], [*others]

    async def ship_again(self) -> list[Any] | None:
        """The weights that were sent last, in the object store; None if the ranks have others by now."""
        if self._num_sent != self._ranks.num_changes:
            return None
        try:
            return await self._ranks.ship()
        except ClusterError:  # the ranks are gone: new ones push again
            return None
