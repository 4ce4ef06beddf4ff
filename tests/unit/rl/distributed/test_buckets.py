"""Weights in flat buckets of a limited size."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from memagent.rl.distributed.weights import (
    Bucket,
    SharedBuffer,
    TensorSpec,
    buffer_bytes,
    fill,
    opened,
    specs_of,
    split,
    tensors,
)

DTYPES = ("float32", "bfloat16", "int8")
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
WEIGHTS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


def named(shapes: list[tuple[tuple[int, ...], str]]) -> list[tuple[str, torch.Tensor]]:
    """Tensors whose values tell them apart."""
    return [
        (f"weight.{number}", _counting(number, shape, getattr(torch, dtype)))
        for number, (shape, dtype) in enumerate(shapes)
    ]


def _counting(start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(math.prod(shape)).add(start) % 100).reshape(shape).to(dtype)


@given(WEIGHTS, st.integers(1, 200))
def test_weights_come_out_of_buckets_as_they_went_in(
    shapes: list[tuple[tuple[int, ...], str]], bucket_bytes: int
) -> None:
    weights = named(shapes)
    buckets = split(specs_of(weights), bucket_bytes=bucket_bytes)
    buffer = torch.empty(buffer_bytes(buckets), dtype=torch.uint8)
    found = [(name, one.clone()) for name, one in tensors(fill(weights, buckets, buffer))]
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (_, one), (_, other) in zip(found, weights, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


@given(WEIGHTS, st.integers(1, 200))
def test_a_bucket_has_one_dtype_and_is_too_large_only_for_one_tensor(
    shapes: list[tuple[tuple[int, ...], str]], bucket_bytes: int
) -> None:
    for bucket in split(specs_of(named(shapes)), bucket_bytes=bucket_bytes):
        assert len({spec.dtype for spec in bucket.specs}) == 1
        assert bucket.num_bytes <= bucket_bytes or bucket.specs[0].num_bytes > bucket_bytes


def test_buckets_are_as_few_as_the_order_allows() -> None:
    specs = [
        TensorSpec(name, "float32", (size,))
        for name, size in (("a", 5), ("b", 5), ("c", 9), ("d", 1))
    ]
    assert split(specs, bucket_bytes=40) == [
        Bucket((specs[0], specs[1])),
        Bucket((specs[2], specs[3])),
    ]


def test_a_shared_buffer_is_the_same_memory_wherever_it_is_opened() -> None:
    buffer: Any = SharedBuffer(64, "cpu")
    there = opened(buffer.handle)
    buffer.flat.fill_(7)
    assert there.tolist() == [7] * 64
    buffer.close()
    assert there.tolist() == [7] * 64, "it lives as long as somebody has it open"
