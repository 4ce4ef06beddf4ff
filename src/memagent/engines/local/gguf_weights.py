"""The weights of GGUF files as tensors, dequantised by the gguf library, several at a time.

weights = read_weights(path, header, dtype=torch.bfloat16, device=torch.device("cuda"))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from memagent.engines.local.gguf_files import GgufHeader, known_name, unpermuted
from memagent.engines.local.loading import EMBEDDINGS, HEAD
from memagent.errors import ConfigError
from memagent.gguf_format import GgufTensor

MAX_THREADS = 16
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
            with np.errstate(all="ignore"):
                weights = torch.from_numpy(dequantize(packed[::rows_between], kind).copy())
        except NotImplementedError:
            raise ConfigError(
                f"{path} stores weights as {kind.name}, which cannot be read"
            ) from None
        if rows_between == 1:
            weights = unpermuted(tensor.name, weights, header)
        return weights.to(device, dtype)

    if HEAD in tensors and _is_same_matrix(
        read(HEAD, ROWS_BETWEEN), read(EMBEDDINGS, ROWS_BETWEEN)
    ):
        tensors[EMBEDDINGS] = tensors.pop(HEAD)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        return dict(zip(tensors, pool.map(read, tensors), strict=True))


def stored(path: Path, header: GgufHeader) -> Iterator[tuple[GgufTensor, np.ndarray[Any, Any]]]:
    """Weights as the bytes of their rows, which are read from the file when they are used."""
    contents = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
    for tensor in header.tensors:
        packed = contents[tensor.offset : tensor.offset + tensor.num_bytes]
        yield tensor, packed.reshape(*tensor.shape[:-1], -1)


def _is_same_matrix(head: torch.Tensor, embeddings: torch.Tensor) -> bool:
    """Whether some rows of two matrices differ by no more than quantisation does."""
    head, embeddings = head.float(), embeddings.float()
    return bool((head - embeddings).norm() <= QUANTISATION_ERROR * head.norm())
