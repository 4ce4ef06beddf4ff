"""The weights of GGUF files as tensors, dequantised by torch on the device that they are for.

    weights = read_weights(path, header, dtype=torch.bfloat16, device=torch.device("cuda"))

A GPU receives the quantised bytes and computes the weights from them. The operations and their order are
those of the gguf library, so the float32 values have the same bits; types that are not in `READERS` are
left to that library. Weights are computed in pieces, so little more than the result is in memory:

    Q4_0, Q4_1, ...    [scale (zero) numbers]                     32 weights
    Q4_K, Q6_K, ...    [factor (factor) scales (zeros) numbers]   256 weights in groups of 16 or 32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from memagent.engines.local.gguf_files import GgufHeader, known_name, stored, unpermuted
from memagent.engines.local.loading import EMBEDDINGS, HEAD
from memagent.errors import ConfigError

Array = np.ndarray[Any, Any]

CPU_PIECE, GPU_PIECE = 1 << 19, 1 << 22
"""Weights that are computed at a time: what fits the caches of a CPU, and enough work for a GPU."""
ROWS_BETWEEN = 16
QUANTISATION_ERROR = 0.15
"""Maximum relative difference of two copies of a matrix; quantisation to four bits causes about 0.08."""


def read_weights(
    path: Path, header: GgufHeader, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The weights under transformers' names.

    Files store the matrix of a tied model twice where the copies are quantised differently. Then the one
    with more bits, the head's, is returned as the embeddings, and there is no head.
    """
    tensors = {known_name(tensor): (tensor, packed) for tensor, packed in stored(path, header)}

    def read(name: str, rows_between: int = 1) -> torch.Tensor:
        tensor, packed = tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        try:
            return dequantised(packed[::rows_between], kind, dtype=dtype, device=device)
        except NotImplementedError:
            raise ConfigError(
                f"{path} stores weights as {kind.name}, which cannot be read"
            ) from None

    with _one_thread() if device.type == "cpu" else nullcontext():
        if HEAD in tensors and _is_same_matrix(
            read(HEAD, ROWS_BETWEEN), read(EMBEDDINGS, ROWS_BETWEEN)
        ):
            tensors[EMBEDDINGS] = tensors.pop(HEAD)
        return {
            name: unpermuted(tensor.name, read(name), header)
            for name, (tensor, _) in tensors.items()
        }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of the CPU: several wait for each other in every operation, for long where cores are busy."""
    num_threads = torch.get_num_threads()
    # torch sets it for this thread and for all that start later, which is undone in a thread of its own
    undo = Thread(target=torch.set_num_threads, args=(num_threads,))
    try:
        torch.set_num_threads(1)
        undo.start()
        undo.join()
        yield
    finally:
        torch.set_num_threads(num_threads)


def dequantised(
    packed: Array, kind: GGMLQuantizationType, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The weights in rows of bytes, computed in float32. NotImplementedError for a type that is not known."""
    if kind not in READERS:
        return torch.from_numpy(dequantize(packed, kind)).to(device, dtype, copy=True)
    num_weights, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = packed.reshape(-1, num_bytes)
    step = max((CPU_PIECE if device.type == "cpu" else GPU_PIECE) // num_weights, 1)
    weights = torch.empty(len(blocks), num_weights, dtype=dtype, device=device)
    for start in range(0, len(blocks), step):
        piece = torch.from_numpy(blocks[start : start + step].copy()).to(device)
        weights[start : start + step] = READERS[kind](piece).view(len(piece), num_weights)
    return weights.view(*packed.shape[:-1], -1)


def _is_same_matrix(head: torch.Tensor, embeddings: torch.Tensor) -> bool:
    """Whether some rows of two matrices differ by no more than quantisation does."""
    head, embeddings = head.float(), embeddings.float()
    return bool((head - embeddings).norm() <= QUANTISATION_ERROR * head.norm())


# --- blocks of 32 weights ---------------------------------------------------------------------------


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(_parts(blocks[:, None, 2:], 4).view(torch.int8) - 8, _halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scaled = _scaled(_parts(blocks[:, None, 4:], 4), _halves(blocks[:, :2]))
    return scaled.add_(_halves(blocks[:, 2:4])[..., None])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    return _scaled(numbers.view(torch.int8) - 16, _halves(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    scaled = _scaled(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _halves(blocks[:, :2]))
    return scaled.add_(_halves(blocks[:, 2:4])[..., None])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2]))


def _five_bits(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Numbers whose highest bits are in a row of 32 bits, the others in pairs with those 16 further on."""
    highest = torch.stack([upper >> place & 1 for place in range(8)], dim=-1)
    return _parts(lower[:, None], 4).flatten(1) | highest.flatten(1) << 4


# --- blocks of 256 weights --------------------------------------------------------------------------


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _halves(blocks[:, 80:82]) * (blocks[:, :16] & 15)
    zeros = _halves(blocks[:, 82:]) * (blocks[:, :16] >> 4)
    return _scaled(_parts(_rows(blocks[:, 16:80], 32), 2), scales).sub_(zeros[..., None])


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _parts(blocks[:, None, 96:104], 4).flatten(1)
    upper = _parts(blocks[:, None, 104:108], 2).flatten(1)
    scales = _halves(blocks[:, 108:]) * ((lower | upper << 4).view(torch.int8) - 32)
    numbers = _parts(_rows(blocks[:, 32:96], 32), 2).flatten(1)
    highest = _parts(blocks[:, None, :32], 1).flatten(1)
    return _scaled((numbers | highest << 2).view(torch.int8) - 4, scales)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, zeros = _scales_and_zeros(blocks)
    return _scaled(_parts(_rows(blocks[:, 16:], 32), 4), scales).sub_(zeros[..., None])


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, zeros = _scales_and_zeros(blocks)
    highest = _parts(blocks[:, None, 16:48], 1).flatten(1)
    numbers = _parts(_rows(blocks[:, 48:], 32), 4).flatten(1) | highest << 4
    return _scaled(numbers, scales).sub_(zeros[..., None])


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _parts(_rows(blocks[:, :128], 64), 4).flatten(1)
    upper = _parts(_rows(blocks[:, 128:192], 32), 2).flatten(1)
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return _scaled((lower | upper << 4).view(torch.int8) - 32, scales)


def _scales_and_zeros(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: two factors, then 8 scales and 8 zeros of 6 bits in 12 bytes."""
    low, middle, last = _rows(blocks[:, 4:16], 4).unbind(1)
    scales = torch.cat([low & 63, last & 15 | low >> 2 & 48], dim=1)
    zeros = torch.cat([middle & 63, last >> 4 | middle >> 2 & 48], dim=1)
    return _halves(blocks[:, :2]) * scales, _halves(blocks[:, 2:4]) * zeros


# --- parts of blocks --------------------------------------------------------------------------------


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Bytes of float16 as float32."""
    return data.contiguous().view(torch.float16).float()


def _rows(data: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return data.view(len(data), -1, num_bytes)


def _parts(rows: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Bytes as several numbers: the lowest bits of all bytes of a row, the next ones, and so on."""
    places = range(0, 8, num_bits)
    return torch.stack([rows >> place & (1 << num_bits) - 1 for place in places], dim=2)


def _scaled(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers in as many groups as there are scales, multiplied by them."""
    return numbers.reshape(*scales.shape, -1).float().mul_(scales[..., None])


READERS: dict[GGMLQuantizationType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLQuantizationType.F32: lambda blocks: blocks.view(torch.float32),
    GGMLQuantizationType.F16: _halves,
    GGMLQuantizationType.BF16: lambda blocks: blocks.view(torch.bfloat16).float(),
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
"""Storage types: blocks of bytes, one in a row, to float32 weights."""
