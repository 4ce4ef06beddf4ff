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
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
            buffer[start:end].copy_(_bytes(value))
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


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
