"""Damaged model files: GGUF files, Hugging Face folders and adapters with a few changes each.

    python -m tests.hostile.model_files --count 2000 --seed 0

opens each of them and generates two tokens where that works; see `harness.py` for what is wrong.
"""

import asyncio
import json
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memagent.errors import MemagentError
from memagent.types import Sampling
from tests.hostile.harness import Complaint, main, wrong_line
from tests.hostile.json_damage import damaged_bytes, damaged_json

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEMPLATES = (
    "{{ messages[0] }",
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ messages[0].content }}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ messages.nothing.at.all }}",
    "{{ raise_exception('\x1b[2J no') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 1 / 0 }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x'.ljust(10000000000) }}",
)
"""Chat templates that fail, never end or need more memory than there is."""


# --- GGUF files -----------------------------------------------------------------------------------


class _Field(NamedTuple):
    name: bytes
    kind: int
    payload: bytes


class _Tensor(NamedTuple):
    name: bytes
    dims: tuple[int, ...]
    kind: int
    offset: int


class _Gguf(NamedTuple):
    """A GGUF file in parts."""

    fields: list[_Field]
    tensors: list[_Tensor]
    weights: bytes


SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


def _split(data: bytes) -> _Gguf:
    """A GGUF file that is in order, in parts."""
    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    place = 24

    def take(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize("<" + form)
        return int(value)

    def text() -> bytes:
        nonlocal place
        length = take("Q")
        place += length
        return data[place - length : place]

    def skip(kind: int) -> None:
        if kind == STRING:
            text()
        elif kind == ARRAY:
            inner, length = take("I"), take("Q")
            for _ in range(length):
                skip(inner)
        else:
            take(SCALARS[kind])

    fields = []
    for _ in range(num_fields):
        name, kind = text(), take("I")
        start = place
        skip(kind)
        fields.append(_Field(name, kind, data[start:place]))
    tensors = []
    for _ in range(num_tensors):
        name, num_dims = text(), take("I")
        dims = tuple(take("Q") for _ in range(num_dims))
        tensors.append(_Tensor(name, dims, take("I"), take("Q")))
    return _Gguf(fields, tensors, data[place + -place % 32 :])


def _joined(file: _Gguf, *, num_tensors: int | None = None, num_fields: int | None = None) -> bytes:
    num_tensors = len(file.tensors) if num_tensors is None else num_tensors
    num_fields = len(file.fields) if num_fields is None else num_fields
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)
    for field in file.fields:
        head += _string(field.name) + struct.pack("<I", field.kind) + field.payload
    for one in file.tensors:
        dims = struct.pack(f"<I{len(one.dims)}Q", len(one.dims), *one.dims)
        head += _string(one.name) + dims + struct.pack("<IQ", one.kind, one.offset)
    return head + bytes(-len(head) % 32) + file.weights


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _hostile_payload(rng: random.Random) -> tuple[int, bytes]:
    """A field's type and value."""
    numbers = (0, 1, 2, 3, 7, 64, 255, 10**6, 2**31 - 1, 2**32 - 1)
    choices: list[Callable[[], tuple[int, bytes]]] = [
        lambda: (4, struct.pack("<I", rng.choice(numbers))),
        lambda: (5, struct.pack("<i", rng.choice((-1, -(2**31), 5)))),
        lambda: (10, struct.pack("<Q", rng.choice((2**63, 2**64 - 1, 9)))),
        lambda: (6, struct.pack("<f", rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30)))),
        lambda: (7, b"\x01"),
        lambda: (
            STRING,
            _string(rng.choice((b"", b"x", b"\xff\xfe", b"llama", b"gpt2", b"a" * 999))),
        ),
        lambda: (STRING, _string(rng.choice(TEMPLATES).encode())),
        lambda: (
            ARRAY,
            struct.pack("<IQ", rng.choice((4, STRING, ARRAY, 99)), rng.choice((0, 1, 2**40))),
        ),
        lambda: (ARRAY, struct.pack("<IQ", 4, 3) + bytes(12)),
        lambda: (ARRAY, struct.pack("<IQ", STRING, 2) + _string(b"a") * 2),
        lambda: (ARRAY, struct.pack("<IQ", ARRAY, 1) * 3000 + struct.pack("<IQ", 4, 0)),
        lambda: (rng.choice((13, 99, 2**32 - 1)), b""),
    ]
    return rng.choice(choices)()


def _changed_field(file: _Gguf, rng: random.Random) -> bytes:
    fields = list(file.fields)
    place = rng.randrange(len(fields))
    kind = rng.randrange(4)
    if kind == 0:
        del fields[place]
    elif kind == 1:
        fields.insert(place, rng.choice(fields))
    else:
        fields[place] = _Field(fields[place].name, *_hostile_payload(rng))
    return _joined(file._replace(fields=fields))


def _changed_list(file: _Gguf, rng: random.Random) -> bytes:
    """Tokens, their types or merges: one entry, or the number of entries."""
    lists = [n for n, field in enumerate(file.fields) if field.kind == ARRAY]
    place = rng.choice(lists)
    field = file.fields[place]
    inner, length = struct.unpack_from("<IQ", field.payload)
    body = field.payload[12:]
    kind = rng.randrange(4)
    if kind == 0:
        body = damaged_bytes(body, rng)
    elif kind == 1:
        length = rng.choice((0, length - 1, length + 1, 2**32, 2**64 - 1))
    elif inner == STRING:
        words = (_string(rng.choice((b"", b" ", b"a", b"a b c", b"\xff", b"<|im_end|>"))),)
        body, length = b"".join(rng.choices(words, k=length)), length
    else:
        body = struct.pack("<i", rng.choice((-1, 0, 3, 4, 99))) * length
    fields = list(file.fields)
    fields[place] = _Field(field.name, ARRAY, struct.pack("<IQ", inner, length) + body)
    return _joined(file._replace(fields=fields))


def _changed_tensor(file: _Gguf, rng: random.Random) -> bytes:
    tensors = list(file.tensors)
    place = rng.randrange(len(tensors))
    one = tensors[place]
    kind = rng.randrange(7)
    if kind == 0:
        del tensors[place]
    elif kind == 1:
        tensors.append(one._replace(name=rng.choice((one.name, b"blk.7.attn_q.weight", b"\xff"))))
    elif kind == 2:
        sizes = (0, 1, 31, 32, 33, 2**20, 2**40, 2**63)
        dims = list(one.dims)
        dims[rng.randrange(len(dims))] = rng.choice(sizes)
        tensors[place] = one._replace(dims=tuple(dims))
    elif kind == 3:
        dims = rng.choice(((), (1,), one.dims[::-1], (*one.dims, 1), (1,) * 9, (0, 0)))
        tensors[place] = one._replace(dims=dims)
    elif kind == 4:
        tensors[place] = one._replace(kind=rng.choice((0, 1, 2, 8, 12, 14, 20, 28, 35, 99, 2**31)))
    elif kind == 5:
        tensors[place] = one._replace(offset=rng.choice((0, 1, 32, one.offset + 4, 2**40, 2**63)))
    else:
        other = rng.choice(tensors)
        tensors[place] = one._replace(name=other.name)
    return _joined(file._replace(tensors=tensors))


def _changed_counts(file: _Gguf, rng: random.Random) -> bytes:
    counts = (0, 1, 2**16, 2**32, 2**63, 2**64 - 1)
    if rng.random() < 0.5:
        return _joined(file, num_tensors=rng.choice((*counts, len(file.tensors) - 1)))
    return _joined(file, num_fields=rng.choice((*counts, len(file.fields) - 1)))


def damaged_gguf(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file with a few changes; the same for the same generator."""
    file = _split(data)
    num_header = len(data) - len(file.weights)
    changes: list[Callable[[], bytes]] = [
        lambda: damaged_bytes(data, rng, within=num_header),
        lambda: damaged_bytes(data, rng),
        lambda: _changed_field(file, rng),
        lambda: _changed_field(file, rng),
        lambda: _changed_list(file, rng),
        lambda: _changed_tensor(file, rng),
        lambda: _changed_tensor(file, rng),
        lambda: _changed_counts(file, rng),
        lambda: data[: rng.randrange(len(data))],
    ]
    return rng.choice(changes)()


# --- folders --------------------------------------------------------------------------------------


def _damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    kind = rng.randrange(4)
    if kind == 0:
        return damaged_bytes(data, rng, within=8 + length)
    if kind == 1:
        return rng.choice((0, 1, length + 9, 2**40, 2**63)).to_bytes(8, "little") + data[8:]
    header = damaged_json(data[8 : 8 + length].decode(), rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damaged_folder(folder: Path, rng: random.Random) -> None:
    """Change one file of a model's or an adapter's folder."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    data = path.read_bytes()
    if rng.random() < 0.05:
        path.unlink()
    elif path.suffix == ".safetensors":
        path.write_bytes(_damaged_safetensors(data, rng))
    elif path.suffix == ".jinja":
        path.write_text(rng.choice(TEMPLATES))
    elif path.suffix == ".json":
        path.write_bytes(damaged_json(data.decode(), rng))
    else:
        path.write_bytes(damaged_bytes(data, rng))


ENDLESS = r"(.|..|...)*(?<=[^\w.])"
PATTERNS = (
    ENDLESS,
    "(a|a?)+(.*.*)*x",
    "(.*)*(.*)*(.*)*y",
    "(([a-z_.0-9])+)+!",
    "(",
    "[",
    "\\",
    "*",
    "(?R)",
)
"""Regular expressions that never end, or are none."""


def damaged_adapter(folder: Path, rng: random.Random) -> None:
    """Change one file of an adapter, or a pattern in its configuration."""
    if rng.random() < 0.6:
        damaged_folder(folder, rng)
        return
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    pattern = rng.choice(PATTERNS)
    changes: list[dict[str, Any]] = [
        {"target_modules": pattern},
        {"exclude_modules": pattern},
        {"rank_pattern": {pattern: 2}},
        {"alpha_pattern": {pattern: 2}},
        {"layers_to_transform": [0], "layers_pattern": pattern},
        {"layers_to_transform": list(range(10**5))},
        {"layer_replication": [[0, 2]] * 10**5},
        {"r": rng.choice((0, -1, 3, 10**6, 10**9))},
        {"rank_pattern": {"q_proj": rng.choice((0, -1, 10**9))}},
        {"modules_to_save": rng.choice((["embed_tokens"], ["x"], "x", pattern))},
        {"peft_type": rng.choice(("IA3", "x", None, 7, "PREFIX_TUNING", "LOHA"))},
        {"task_type": rng.choice(("x", None, 7))},
        {"auto_mapping": {"parent_library": "os", "base_model_class": "system"}},
        {"init_lora_weights": rng.choice(("pissa", "corda", "eva", "x", 7))},
        {"loftq_config": {"loftq_bits": 4}, "init_lora_weights": "loftq"},
        {"megatron_config": {"a": 1}, "megatron_core": "os"},
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        {"use_dora": True},
        {"lora_alpha": rng.choice(("x", None, 1e308, []))},
    ]
    path.write_text(json.dumps({**config, **rng.choice(changes)}))


# --- opening them -----------------------------------------------------------------------------------


class Originals(NamedTuple):
    """Small models that are in order."""

    gguf: bytes
    folder: Path
    adapter: Path


def make_originals(folder: Path) -> Originals:
    """Write small models: a file, a folder and an adapter for the folder."""
    from gguf import GGMLQuantizationType

    from tests.support.tiny_gguf import write_gguf
    from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

    model = make_tiny_model(folder / "model", "llama", **TINY)
    adapter = make_tiny_adapter(model, folder / "adapter")
    (adapter / "README.md").unlink(missing_ok=True)
    gguf = write_gguf(model, folder / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    return Originals(gguf.read_bytes(), model, adapter)


RUNTIMES = ("torch", "llama.cpp")


class Damaged(NamedTuple):
    """A model that somebody changed."""

    model: Path
    adapter: Path | None


def make_damaged(originals: Originals, folder: Path, seed: str) -> Damaged:
    """Write a damaged model into an empty folder; the same for the same seed."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.6:
        path = folder / "damaged.gguf"
        path.write_bytes(damaged_gguf(originals.gguf, rng))
        return Damaged(path, None)
    if kind < 0.8:
        shutil.copytree(originals.folder, folder / "damaged")
        damaged_folder(folder / "damaged", rng)
        return Damaged(folder / "damaged", None)
    shutil.copytree(originals.adapter, folder / "damaged")
    damaged_adapter(folder / "damaged", rng)
    return Damaged(originals.folder, folder / "damaged")


def wrong_with(damaged: Damaged, *, name: str = "damaged") -> str | None:
    """What is wrong with how a model is opened and used; None if nothing is.

    `name` stands in every error.
    """
    for runtime in RUNTIMES if damaged.model.is_file() else RUNTIMES[:1]:
        try:
            asyncio.run(_generate(damaged, runtime))
        except MemagentError as error:
            if (wrong := wrong_line(error, name)) is not None:
                return wrong
    return None


async def _generate(damaged: Damaged, runtime: str) -> None:
    from memagent.engines.base import open_local

    adapter = None if damaged.adapter is None else str(damaged.adapter)
    with_adapter = {"adapter": adapter} if adapter else {}
    async with open_local(
        str(damaged.model), cache_gb=0.001, device="cpu", runtime=runtime, **with_adapter
    ) as engine:
        await engine.complete([{"role": "user", "content": "Hi."}], Sampling(max_tokens=2))


def warm_up(originals: Originals) -> None:
    """Import what opening models imports: it may take longer than a model may."""
    asyncio.run(_generate(Damaged(originals.folder, originals.adapter), RUNTIMES[0]))


def complaint_of(originals: Originals) -> Complaint:
    """Tries models that are made from these."""

    def complaint(number: int, seed: int) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            return wrong_with(make_damaged(originals, Path(folder), f"{seed} {number}"))

    return complaint


def _own_complaint(number: int, seed: int) -> str | None:
    return _of_own_originals()(number, seed)


@cache
def _of_own_originals() -> Complaint:
    originals = make_originals(Path(_running.enter_context(tempfile.TemporaryDirectory())))
    warm_up(originals)
    return complaint_of(originals)


_running = ExitStack()

if __name__ == "__main__":
    code = main("tests.hostile.model_files", _own_complaint, count=2000, what="damaged model files")
    _running.close()
    sys.exit(code)
