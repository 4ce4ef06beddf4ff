"""Weights of a GGUF file in the order in which the kernel reads them, 4 or 8 bits each.

A new token reads every weight, so fewer bytes are faster. The blocks of a file are 32 weights with one
scale; they are only reordered, so nothing is rounded again:

    file     output 0: [scale q0 q1 ... q31] [scale q32 ...] ...    output 1: ...
    packed   outputs 0-15: q0 of all 16, q1 of all 16, ...          one vector holds one input's weights

    Q4_0, Q4_1   (q - 8) * scale + zero    two inputs, j and j + 16 of a group, share a byte
    Q8_0         q * scale

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
from memagent.engines.local.cpu.native import EIGHT_BITS, FOUR_BITS, GROUP, TILE, MatrixStruct

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix in the kernel's order."""

    kind: int
    num_outputs: int
    num_inputs: int
    weights: torch.Tensor
    """Tiles x groups x 16 or 32 x 16 lanes, in bytes."""
    scales: torch.Tensor
    """Tiles x groups x (scale and zero, or scale only) x 16 lanes, float32."""

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


def _four_bits(nibbles: Bytes, scale: Bytes, zero: Bytes) -> Packed:
    return _packed(FOUR_BITS, nibbles, np.stack([scale, zero], axis=-1))


def _pack_q8_0(raw: Bytes) -> Packed:
    blocks = raw.reshape(len(raw), -1, 2 + GROUP)
    return _packed(EIGHT_BITS, blocks[..., 2:], _halves(blocks[..., :2])[..., None])


PACKERS: dict[GGMLQuantizationType, Callable[[Bytes], Packed]] = {
    GGMLQuantizationType.Q4_0: _pack_q4_0,
    GGMLQuantizationType.Q4_1: _pack_q4_1,
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
