"""API keys: who may use a server, and how much.

    store = KeyStore(path)
    key = store.add("anna", KeyLimits(max_cost=5.0))     # shown once; the file has its hash only
    store.holder_of(key)                                 # KeyHolder(id="key-5f...", name="anna", ...)

Keys are random and long, so a plain hash of one does not tell it. Once the file exists a key is needed, even
when all have been removed. The file is read again when it changes, so a removed key stops working at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from filelock import FileLock
from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import Headers

from memagent.config import FileRecord, KeyLimits
from memagent.errors import ConfigError
from memagent.files import make_folders, reason_of, write_atomically
from memagent.names import hint
from memagent.serve.wire import ApiError

KEY_PREFIX = "mem-"
KEY_BYTES = 24
MAX_NAME = 64
"""Characters of a key's name."""
log = logging.getLogger(__name__)
ANYONE = "anyone"
"""Id of the holder where no key is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """Who sends a request."""

    id: str = ANYONE
    """What is stored of the holder: files and readings belong to it."""
    name: str = ANYONE
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def cache_salt(self) -> str | None:
        """Keeps what engines cache of the holder's prompts apart from that of others; None where no key is needed."""
        return None if self.id == ANYONE else self.id


class StoredKey(FileRecord):
    """A key as the file has it."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: str
    limits: KeyLimits = KeyLimits()

    @property
    def holder(self) -> KeyHolder:
        return KeyHolder(id=f"key-{self.sha256[:16]}", name=self.name, limits=self.limits)


class KeyCheck(Protocol):
    """Decides who sends a request."""

    def holder_of(self, key: str | None) -> KeyHolder | None:
        """The holder of a key, or of no key; None where the request is to be refused."""
        ...


class OneKey:
    """A single key, or none at all."""

    def __init__(self, key: str | None) -> None:
        self._key = key

    def holder_of(self, key: str | None) -> KeyHolder | None:
        if self._key is None:
            return KeyHolder()
        is_right = secrets.compare_digest((key or "").encode(), self._key.encode())
        return KeyHolder(id="key", name="key") if is_right else None


class KeyStore:
    """The keys in a file, which need not exist yet."""

    def __init__(self, path: Path, *, without_file: KeyCheck | None = None) -> None:
        """`without_file` decides until there is a file, also one that is written later."""
        self._path = path
        self._without_file = without_file
        self._read: tuple[tuple[int, int, int] | None, dict[str, StoredKey]] = (None, {})
        """The state of the file when it was read, and its keys by hash."""

    @property
    def exists(self) -> bool:
        """Whether the file does: then every request needs a key."""
        return self._state() is not None

    def holder_of(self, key: str | None) -> KeyHolder | None:
        """The holder of a key; None for an unknown one."""
        if self._without_file is not None:
            if not self.exists:
                return self._without_file.holder_of(key)
            self._without_file = None  # for good: deleting the file opens no door
        found = self._keys().get(_hash(key)) if key else None
        return found.holder if found else None

    def list(self) -> list[StoredKey]:
        """All keys, in the order in which they were added."""
        return list(self._keys().values())

    def add(self, name: str, limits: KeyLimits | None = None) -> str:
        """A new key. This is the only time that it is shown."""
        name = name.strip()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise ConfigError(f"a name has 1 to {MAX_NAME} visible characters, not {name[:80]!r}")
        with self._changing() as keys:
            if any(stored.name == name for stored in keys.values()):
                raise ConfigError(f"there is a key {name!r} already; remove it first")
            key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
            stored = StoredKey(
                name=name,
                sha256=_hash(key),
                created=datetime.now().astimezone().isoformat(timespec="seconds"),
                limits=limits or KeyLimits(),
            )
            keys[stored.sha256] = stored
        return key

    def remove(self, name: str) -> None:
        """Remove a key by its name."""
        with self._changing() as keys:
            found = [digest for digest, stored in keys.items() if stored.name == name]
            if not found:
                names = [stored.name for stored in keys.values()]
                raise ConfigError(f"there is no key {name!r}; {hint(name, names)}")
            del keys[found[0]]

    @contextmanager
    def _changing(self) -> Iterator[dict[str, StoredKey]]:
        """The keys, written back if the block succeeds; one process at a time."""
        try:
            make_folders(self._path.parent, mode=0o700)
            with FileLock(self._path.with_name(f".{self._path.name}.lock"), mode=0o600):
                keys = dict(self._keys())
                yield keys
                values = [stored.model_dump(exclude_none=True) for stored in keys.values()]
                write_atomically(self._path, f"{json.dumps(values, indent=2)}\n".encode())
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {reason_of(error)}") from None

    def _keys(self) -> dict[str, StoredKey]:
        state = self._state()
        if state is None:
            return {}
        if self._read[0] != state:
            self._read = (state, {stored.sha256: stored for stored in _stored(self._path)})
        return self._read[1]

    def _state(self) -> tuple[int, int, int] | None:
        """What changes with the file; None where there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {reason_of(error)}") from None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


_keys_in_file = TypeAdapter(list[StoredKey])


def _stored(path: Path) -> list[StoredKey]:
    try:
        return _keys_in_file.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None
    except ValidationError:
        raise ConfigError(
            f"{path} is not a file of keys; remove it, or name another `state_dir`"
        ) from None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_in(headers: Headers) -> str | None:
    """The key that a request carries."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def checked_holder(keys: KeyCheck, headers: Headers) -> KeyHolder:
    """Who sends a request. Raises ApiError 401 without a valid key."""
    try:
        holder = keys.holder_of(key_in(headers))
    except ConfigError as error:
        log.error("%s", error)
        raise ApiError(503, "the keys of the server cannot be read; see its log") from None
    if holder is None:
        raise ApiError(
            401,
            "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
        )
    return holder
