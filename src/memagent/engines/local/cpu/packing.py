"""Weights of a GGUF file in the order in which the kernel reads them, 4, 6 or 8 bits each.

A new token reads every weight, so fewer bytes are faster. The blocks of a file are 16 or 32 weights with
one scale; they are only reordered, so nothing is rounded again:

    file     output 0: [scale q0 q1 ... q31] [scale q32 ...] ...    output 1: ...
    packed   outputs 0-15: q0 of all 16, q1 of all 16, ...          one vector holds one input's weights

    Q4_0, Q4_1, Q4_K   (q - 8) * scale + zero   two inputs, j and j + 16 of a group, share a byte
    Q6_K               (q - 32) * scale         so do their lower 4 bits; the upper bits of j, j + 8,
                                                j + 16 and j + 24 share a byte; a scale for each 16
    Q8_0               q * scale

Q4_K and Q6_K store the scales of 256 weights as integers with a common factor; they are multiplied here.

Other types stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from memagent.engines.local import gguf_files
from memagent.engines.local.cpu.native import (
    EIGHT_BITS,
    FOUR_BITS,
    GROUP,
    SIX_BITS,
    TILE,
    MatrixStruct,
)

Bytes = np.ndarray[Any, Any]
Q4_K_BYTES, Q6_K_BYTES = 144, 210
"""Of 256 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix in the kernel's order."""

    kind: int
    num_outputs: int
    num_inputs: int
    weights: torch.Tensor
    """Tiles x groups x (16, 24 or 32) x 16 lanes, in bytes."""
    scales: torch.Tensor
    """Tiles x groups x (scale and zero, two scales, or one) x 16 lanes, float32."""

    def matrix(self) -> MatrixStruct:
        """The kernel's view. It holds addresses: keep `self` alive while it is used."""
        return MatrixStruct(
            kind=self.kind,
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            weights=self.weights.data_ptr(),
            scales=self.scales.data_ptr(),
        )


def read_packed(path: Path, header: gguf_files.GgufHeader) -> dict[str, Packed]:
    """The matrices of a file that can be packed, by transformers' names."""
    return {
        name: PACKERS[kind](raw)
        for name, kind, raw in gguf_files.matrices(path, header)
        if kind in PACKERS
    }


def _pack_q4_0(raw: Bytes) -> Packed:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP // 2)
    scale = _halves(blocks[..., :2])
    return _four_bits(blocks[..., 2:], scale, np.zeros_like(scale))


def _pack_q4_1(raw: Bytes) -> Packed:
    blocks = raw.reshape(len(raw), -1, 4 + GROUP // 2)
    scale, lowest = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _four_bits(blocks[..., 4:], scale, lowest + 8 * scale)


def _pack_q4_k(raw: Bytes) -> Packed:
    """Blocks of 256: scale, scale of zeros, 8 scales and zeros of 6 bits, 4 x 32 bytes of two groups."""
    blocks = raw.reshape(len(raw), -1, Q4_K_BYTES)
    small = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, last = small[..., 0, :], small[..., 1, :], small[..., 2, :]
    steps = np.concatenate([low & 63, last & 15 | low >> 2 & 48], axis=-1)
    zeros = np.concatenate([middle & 63, last >> 4 | middle >> 2 & 48], axis=-1)
    scale = _halves(blocks[..., :2])[..., None] * steps
    zero = _halves(blocks[..., 2:4])[..., None] * zeros
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], -1, GROUP)
    groups = _grouped(np.stack([pairs & 15, pairs >> 4], axis=-2), len(raw))
    nibbles = groups[..., :16] | groups[..., 16:] << 4
    flat = (len(raw), -1)
    return _four_bits(nibbles, scale.reshape(flat), (8 * scale - zero).reshape(flat))


def _pack_q6_k(raw: Bytes) -> Packed:
    """Blocks of 256: 2 x 64 bytes of lower bits, 2 x 32 of upper bits, 16 scales of 8 bits, their scale."""
    blocks = raw.reshape(len(raw), -1, Q6_K_BYTES)
    lower = blocks[..., :128].reshape(*blocks.shape[:2], -1, 64)
    lower = _grouped(np.stack([lower & 15, lower >> 4], axis=-2), len(raw))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:2], -1, GROUP)
    upper = _grouped(np.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2), len(raw))
    nibbles = lower[..., :16] | lower[..., 16:] << 4
    tops = np.zeros_like(upper[..., :8])
    for quarter in range(4):
        tops |= upper[..., 8 * quarter : 8 * quarter + 8] << 2 * quarter
    steps = blocks[..., 192:208].view(np.int8)
    scales = _halves(blocks[..., 208:])[..., None] * steps
    quants = np.concatenate([nibbles, tops], axis=-1)
    return _packed(SIX_BITS, quants, scales.reshape(len(raw), -1, 2))


def _grouped(values: Bytes, num_outputs: int) -> Bytes:
    return values.reshape(num_outputs, -1, GROUP)


def _four_bits(nibbles: Bytes, scale: Bytes, zero: Bytes) -> Packed:
    return _packed(FOUR_BITS, nibbles, np.stack([scale, zero], axis=-1))


def _pack_q8_0(raw: Bytes) -> Packed:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP)
    return _packed(EIGHT_BITS, blocks[..., 2:], _halves(blocks[..., :2])[..., None])


PACKERS: dict[GGMLQuantizationType, Callable[[Bytes], Packed]] = {
    GGMLQuantizationType.Q4_0: _pack_q4_0,
    GGMLQuantizationType.Q4_1: _pack_q4_1,
    GGMLQuantizationType.Q4_K: _pack_q4_k,
    GGMLQuantizationType.Q6_K: _pack_q6_k,
    GGMLQuantizationType.Q8_0: _pack_q8_0,
}
"""From the blocks of a file (outputs x bytes) to the kernel's order."""


def _halves(two_bytes: Bytes) -> Bytes:
    """Float16 values as float32: outputs x groups."""
    values: Bytes = np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].astype(np.float32)
    return values


def _packed(kind: int, quants: Bytes, scales: Bytes) -> Packed:
    num_outputs, num_groups = quants.shape[:2]
    return Packed(
        kind=kind,
        num_outputs=num_outputs,
        num_inputs=num_groups * GROUP,
        weights=torch.from_numpy(_in_tiles(quants)),
        scales=torch.from_numpy(_in_tiles(scales)),
    )


def _in_tiles(values: Bytes) -> Bytes:
    """Outputs x groups x n becomes tiles x groups x n x 16; missing outputs are zero."""
    missing = -len(values) % TILE
    padded = np.pad(values, ((0, missing), (0, 0), (0, 0))) if missing else values
    tiles = padded.reshape(-1, TILE, *values.shape[1:])
    return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1))
