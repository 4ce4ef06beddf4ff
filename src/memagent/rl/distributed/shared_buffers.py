"""A buffer that two processes of one machine see: CUDA IPC on a GPU that they share, shared memory on CPUs.

    rank     buffer = SharedBuffer(num_bytes, "cuda")     replica.deliver(push, buffer.handle)   # until it has copied
    replica  flat = opened(handle)                        the same memory, without a copy

A buffer is handed out once and opened once in each push: torch counts both, and frees the memory when they are even. It must
live in the rank until the replica has copied the last bucket.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

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
