"""The kernel in `decode.c`: compiled once on this machine, and its structures as Python sees them.

    decode.c ──▶ cc -O3 -march=native ──▶ ~/.cache/memagent/kernels/<fingerprint>.so ──▶ ctypes

`kernels()` is None where there is no C compiler; torch alone computes then. The fingerprint covers the
source, the compiler and the instructions of the processor, so a home folder shared by different machines
is safe.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

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
"""Flags to compile and to link with, the best way first. The first leaves OpenMP to be found in the
process, where torch has it: two copies of its threads would fight for the cores."""

FLOAT32, FOUR_BITS, EIGHT_BITS = 0, 1, 2
"""How a matrix is stored; the same numbers as in decode.c."""
TILE, GROUP = 16, 32
"""Outputs in a tile, and inputs that share a scale."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("lora_a", ctypes.c_void_p),
        ("lora_b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("lora_scale", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("input_norm", "post_norm", "query_norm", "key_norm")
        ),
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("head", Matrix),
        ("cache", ctypes.c_void_p),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("num_threads", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("part_starts", ctypes.c_void_p),
        ("part_lengths", ctypes.c_void_p),
        ("first_readers", ctypes.c_void_p),
        ("readers", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class Kernels:
    """The compiled functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode_step = library.decode_step
        self._decode_step.argtypes = (ctypes.POINTER(Model), ctypes.POINTER(Step))
        self._same_weights = library.same_weights
        self._same_weights.argtypes = (ctypes.POINTER(Matrix), ctypes.c_void_p, ctypes.c_int64)

    def decode_step(self, model: Model, step: Step) -> None:
        """One token for each row; other Python threads go on meanwhile."""
        if self._decode_step(ctypes.byref(model), ctypes.byref(step)):
            raise MemoryError("not enough memory for one step")

    def same_weights(self, packed: Matrix, address: int, num_threads: int) -> bool:
        """Whether a packed matrix holds the float32 values at `address`, rounding aside."""
        return bool(self._same_weights(ctypes.byref(packed), address, num_threads))


@cache
def kernels() -> Kernels | None:
    """The kernels, compiled the first time; None where that is not possible."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return build(compiler, user_cache_path("memagent", appauthor=False) / "kernels")


def build(
    compiler: str | None, folder: Path, ways: tuple[tuple[Flags, Flags], ...] = WAYS
) -> Kernels | None:
    """Compile into `folder`, or take what is there. Without a compiler nothing is taken either."""
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
    """Under another name first: a half-written library must never be found."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    object_file = path.with_name(f"{path.stem}-{mark}.o")
    library = path.with_name(f"{path.stem}-{mark}.so")
    try:
        _call(compiler, *FLAGS, *compile_flags, "-c", str(SOURCE), "-o", str(object_file))
        _call(compiler, "-shared", *link_flags, str(object_file), "-o", str(library), "-lm")
        os.replace(library, path)
    finally:
        object_file.unlink(missing_ok=True)
        library.unlink(missing_ok=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)


def _fingerprint(compiler: str, *flags: str) -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    parts = (os.path.realpath(compiler), platform.machine(), _instructions(), *FLAGS, *flags)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _instructions() -> str:
    """What the processor can do, as Linux lists it; elsewhere its name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
