"""Damage to JSON: one value replaced, removed or doubled, or bytes of the text changed."""

import copy
import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 10**9, -(10**9), 2**63, 10**30, 0.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "1", "../../x", "\x1b[2J\u202e", "(a+)+$", "é" * 100),
    *([], [[]], [None], [1, "x"], ["x"] * 1000, {}, {"x": 1}, {"": {"": []}}),
)
"""What stands where something else is expected."""


def damaged_json(text: str, rng: random.Random) -> bytes:
    """A JSON text with one to three changes; the same for the same generator."""
    if rng.random() < 0.2:
        return damaged_bytes(text.encode(), rng)
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    return json.dumps(value).encode()


def damaged_bytes(data: bytes, rng: random.Random, *, within: int | None = None) -> bytes:
    """Bytes that are cut, flipped, removed or repeated; with `within`, near the beginning."""
    changed = bytearray(data)
    size = max(min(len(data), within or len(data)), 1)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(size)
        kind = rng.randrange(5)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            changed[place : place + 8] = rng.choice((b"\xff" * 8, b"\x00" * 8, rng.randbytes(8)))
        elif kind == 2:
            del changed[place : place + rng.choice((1, 4, 8, 100))]
        elif kind == 3:
            changed[place:place] = changed[place : place + rng.choice((1, 4, 8, 100))]
        elif rng.random() < 0.3:
            del changed[place:]
    return bytes(changed)


def _changed(value: Any, rng: random.Random) -> Any:
    """A copy with one value changed somewhere; deeper ones more often than their number."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(VALUES))
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    kind = rng.random()
    if kind < 0.15:
        if isinstance(value, dict):
            return {name: value[name] for name in value if name != key}
        return value[:key] + value[key + 1 :]
    if kind < 0.2:
        if isinstance(value, dict):
            return {**value, "x" * rng.choice((1, 1000)): value[key]}
        return value[:key] + [value[key]] * 3 + value[key + 1 :]
    new = _changed(value[key], rng)
    if isinstance(value, dict):
        return {**value, key: new}
    return [*value[:key], new, *value[key + 1 :]]
