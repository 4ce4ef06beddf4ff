"""Weights in the object store of a cluster: written once, read by every engine replica.

    buckets = ship(trained.parameters)            # in the process that has the weights: a rank or the trainer
    for name, tensor in shipped(buckets): ...     # in a replica, bucket by bucket, without a copy

The driver passes references on and never sees a weight. A bucket is one object of up to `BUCKET_BYTES`, so that
a model larger than half of the object store still passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memagent.cluster import full_store_errors

BUCKET_BYTES = 256 * 2**20


class _Packed(NamedTuple):
    """A tensor as plain bytes: numpy has no bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


def ship(
    parameters: Iterable[tuple[str, torch.Tensor]], *, bucket_bytes: int = BUCKET_BYTES
) -> list[Any]:
    """Put tensors into the object store; references to their buckets."""
    references: list[Any] = []
    bucket: list[_Packed] = []
    size = 0
    for name, parameter in parameters:
        packed = _packed(name, parameter)
        if bucket and size + packed.data.nbytes > bucket_bytes:
            references.append(_put(bucket))
            bucket, size = [], 0
        bucket.append(packed)
        size += packed.data.nbytes
    return [*references, _put(bucket)]


def shipped(buckets: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of buckets, on the CPU and read-only."""
    import ray

    for reference in buckets:
        for packed in ray.get(reference):
            yield packed.name, _unpacked(packed)


def _put(bucket: list[_Packed]) -> Any:
    import ray

    size = sum(packed.data.nbytes for packed in bucket)
    with full_store_errors(f"{size / 1e9:.2g} GB of weights"):
        return ray.put(bucket)


def _packed(name: str, parameter: torch.Tensor) -> _Packed:
    value = parameter.detach().contiguous().cpu()
    data = value.reshape(-1).view(torch.uint8).numpy()
    return _Packed(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def _unpacked(packed: _Packed) -> torch.Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.data.nbytes:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.frombuffer(packed.data, dtype=dtype).reshape(packed.shape)
