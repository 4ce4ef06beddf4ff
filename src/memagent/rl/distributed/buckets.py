"""Weights as flat buckets: how tensors that follow each other share one buffer of a limited size.

    specs    name, dtype, shape of every weight              known to both sides, without a gather
    split    a few hundred MB each, of one dtype             the same on both sides
    fill     gathered tensors ──▶ buffer                     in a rank, one bucket after the other
    tensors  buffer ──▶ views by name                        in a replica

A tensor larger than a bucket has one of its own, so the buffer takes as much as the largest tensor at least. A bucket
has one dtype: its tensors lie behind each other without gaps, as vLLM wants them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

BUCKET_BYTES = 256 * 2**20


class TensorSpec(NamedTuple):
    """A weight without its values."""

    name: str
    dtype: str
    """Such as bfloat16."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


class Bucket(NamedTuple):
    """Weights that travel together."""

    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
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
