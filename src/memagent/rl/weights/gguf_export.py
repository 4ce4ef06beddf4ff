"""A trained model as one GGUF file, for llama.cpp: header and tokenizer of the file it was trained from, new weights.

    write_gguf(loaded, Path("out.gguf"), source=Path("model.gguf"), kind="q8_0")

Matrices are stored in 16 bits or in 8 and a scale for each 32 weights, vectors in 32 bits. The head of a tied model is
left out: it is the matrix of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    quant_shape_to_byte_shape,
    quantize,
)

from memagent.engines.local import gguf_files
from memagent.engines.local.gguf_files import GgufHeader
from memagent.engines.local.loading import HEAD, LoadedModel, loading
from memagent.files import replacing

GgufKind = Literal["f16", "q8_0"]
KINDS: dict[GgufKind, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""How matrices are stored, and what the header calls the file."""
OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields of the source that the new file has of its own."""
QUANTISATION_VERSION = 2


def write_gguf(loaded: LoadedModel, out: Path, *, source: Path, kind: GgufKind) -> None:
    """Write the weights of a model, with all other contents of the GGUF file that it is made from."""
    header = gguf_files.open_header(source)
    stored, file_type = KINDS[kind]
    weights = _weights(loaded, header, stored)
    with loading(source, source.stat().st_size), replacing(out) as part:
        writer = GGUFWriter(part, header.architecture)
        _copy_fields(GGUFReader(source), writer)
        writer.add_file_type(file_type)
        writer.add_quantization_version(QUANTISATION_VERSION)
        for one in weights:
            writer.add_tensor_info(
                one.name, one.byte_shape, one.dtype, one.num_bytes, raw_dtype=one.kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in _arrays(weights, header):
            writer.write_tensor_data(array)
        writer.close()


class _Weight(NamedTuple):
    """A weight, its name in the file, and how it is stored."""

    name: str
    value: Any
    kind: GGMLQuantizationType

    @property
    def is_quantised(self) -> bool:
        return self.kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.is_quantised:
            return np.dtype(np.uint8)
        is_whole = self.kind == GGMLQuantizationType.F32
        return np.dtype(np.float32 if is_whole else np.float16)

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of the stored array; of a quantised one in bytes."""
        shape = tuple(self.value.shape)
        return quant_shape_to_byte_shape(shape, self.kind) if self.is_quantised else shape

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.byte_shape)) * self.dtype.itemsize


def _weights(
    loaded: LoadedModel, header: GgufHeader, stored: GGMLQuantizationType
) -> list[_Weight]:
    """The weights in the order of the source."""
    values = loaded.model.state_dict()
    is_tied = bool(loaded.model.config.tie_word_embeddings)
    return [
        _Weight(
            tensor.name, values[name], stored if len(tensor.shape) > 1 else GGMLQuantizationType.F32
        )
        for tensor in header.tensors
        if not ((name := gguf_files.known_name(tensor)) == HEAD and is_tied)
    ]


def _arrays(weights: list[_Weight], header: GgufHeader) -> Iterator[np.ndarray[Any, Any]]:
    """One after the other, so that not all are in memory twice."""
    for one in weights:
        array = one.value.float().numpy()
        order = gguf_files.row_order(one.name, len(array), header)
        array = array if order is None else array[order]
        yield quantize(array, one.kind) if one.is_quantised else array.astype(one.dtype)


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Copy the header of a file, but for what the new one has of its own."""
    for name, field in reader.fields.items():
        if name.startswith(OWN_FIELDS):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
