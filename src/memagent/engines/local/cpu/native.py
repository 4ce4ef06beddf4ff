"""The kernel in `decode.c`: compiled once per machine, and its structures for ctypes.

    decode.c ──▶ cc -O3 -march=native ──▶ ~/.cache/memagent/kernels/<fingerprint>.so ──▶ ctypes

Without a C compiler `kernels()` is None and torch computes everything. The fingerprint covers the source,
the compiler and the instruction set, so machines may share a home folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from platformdirs import user_cache_path

from memagent.files import replacing

Flags = tuple[str, ...]

SOURCE = Path(__file__).with_name("decode.c")
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 120
FLAGS = ("-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")
WAYS: tuple[tuple[Flags, Flags], ...] = (
    (("-march=native", "-fopenmp"), ()),
    (("-march=native", "-fopenmp"), ("-fopenmp",)),
    (("-march=native",), ()),
    ((), ()),
)
"""Flags to compile and to link with, best first. The first leaves OpenMP to the copy that torch has loaded:
two thread pools would compete for the cores."""

FLOAT32, FOUR_BITS, EIGHT_BITS, SIX_BITS = 0, 1, 2, 3
"""Storage types of a matrix; the same numbers as in decode.c."""
TILE, GROUP = 16, 32
"""Outputs in a tile, and inputs that share a scale."""


def _fields(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    return tuple((name, kind) for name in names)


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "kind", "num_outputs", "num_inputs"),
        *_fields(ctypes.c_void_p, "weights", "scales", "bias", "lora_a", "lora_b"),
        ("rank", ctypes.c_int64),
        ("lora_scale", ctypes.c_float),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "input_norm", "post_norm", "query_norm", "key_norm"),
        *_fields(MatrixStruct, "query", "key", "value", "output", "gate", "up", "down"),
    )


class ModelStruct(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_layers", "width", "inner", "num_heads", "num_kv_heads"),
        *_fields(ctypes.c_int64, "head_dim", "num_slots"),
        *_fields(ctypes.c_float, "epsilon", "scaling"),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("head", MatrixStruct),
        ("cache", ctypes.c_void_p),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "num_threads", "num_rows"),
        *_fields(ctypes.c_void_p, "hidden", "cosine", "sine", "slots"),
        ("num_parts", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "part_starts", "part_lengths", "first_readers", "readers"),
        ("logits", ctypes.c_void_p),
    )


class Kernels:
    """The compiled functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode_step = library.decode_step
        self._decode_step.argtypes = (ctypes.POINTER(ModelStruct), ctypes.POINTER(StepStruct))
        self._same_weights = library.same_weights
        self._same_weights.argtypes = (
            ctypes.POINTER(MatrixStruct),
            ctypes.c_void_p,
            ctypes.c_int64,
        )

    def decode_step(self, model: ModelStruct, step: StepStruct) -> None:
        """One token for each row. Releases the GIL."""
        if self._decode_step(ctypes.byref(model), ctypes.byref(step)):
            raise MemoryError("not enough memory for one step")

    def same_weights(self, packed: MatrixStruct, address: int, num_threads: int) -> bool:
        """Whether a packed matrix equals the float32 values at `address`, up to rounding."""
        return bool(self._same_weights(ctypes.byref(packed), address, num_threads))


@cache
def kernels() -> Kernels | None:
    """The kernels, compiled on first use; None where that is not possible."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return build(compiler, user_cache_path("memagent", appauthor=False) / "kernels")


def build(
    compiler: str | None, folder: Path, ways: tuple[tuple[Flags, Flags], ...] = WAYS
) -> Kernels | None:
    """Compile into `folder`, or load the library there. None without a compiler."""
    if compiler is None or platform.system() == "Windows":
        return None
    for compile_flags, link_flags in ways:
        path = folder / f"{_fingerprint(compiler, *compile_flags, '|', *link_flags)}.so"
        with suppress(OSError, subprocess.SubprocessError, AttributeError):
            if not path.is_file():
                _compile(compiler, compile_flags, link_flags, path)
            return Kernels(ctypes.CDLL(str(path)))
    return None


def _compile(compiler: str, compile_flags: Flags, link_flags: Flags, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path, sync=False) as library, TemporaryDirectory() as folder:
        object_file = str(Path(folder) / "decode.o")
        _call(compiler, *FLAGS, *compile_flags, "-c", str(SOURCE), "-o", object_file)
        _call(compiler, "-shared", *link_flags, object_file, "-o", str(library), "-lm")


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)


def _fingerprint(compiler: str, *flags: str) -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    parts = (os.path.realpath(compiler), platform.machine(), _instructions(), *FLAGS, *flags)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _instructions() -> str:
    """The processor's instruction set as Linux lists it; elsewhere its name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
