"""Kept texts on disk: a folder for each text and model, a file for each section, within a budget.

    texts/TEXT-MODEL/text.json            source, owner, sizes, model; its time says when the text was last used
    texts/TEXT-MODEL/SECTION.safetensors  token ids, keys and values of a prompt up to the section's end

A file is named by the fingerprint of weights, adapter, owner and token ids, and holds them; what does not
match them in full is not used. Texts of an owner are in folders of their own, TEXT-MODEL-OWNER. When the budget
is reached, texts that were not used for longest are dropped. Listing and dropping texts needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from memagent.files import replacing, write_atomically

if TYPE_CHECKING:
    import torch

ABOUT = "text.json"
SPARE_BYTES = 2**30
"""Room that is left on the disk whatever the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptText:
    """A text on disk."""

    text: str
    """SHA-256 of the text."""
    source: str
    """Its name."""
    model: str
    key: str
    """Fingerprint of weights and adapter."""
    owner: str = ""
    """Whose questions may use it; empty for the user of this machine."""
    num_tokens: int = 0
    num_bytes: int = 0
    num_sections: int = 0
    last_used: float = 0.0
    """Unix time."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        folder = f"{self.text[:16]}-{self.key[:16]}"
        return f"{folder}-{_digest(self.owner)}" if self.owner else folder

    @property
    def stamp(self) -> str:
        """What every file of it carries: weights, adapter and owner."""
        return f"{self.key} {self.owner}".rstrip()


class TextFiles:
    """Keys and values of texts on disk."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        max_bytes: int,
        on_drop: Callable[[KeptText], None] = lambda text: None,
    ) -> None:
        self.root = root or default_root()
        self._max_bytes = max_bytes
        self.on_drop = on_drop

    def texts(self) -> list[KeptText]:
        """All texts, the most recently used first."""
        found = [text for text in map(_about, _folders(self.root)) if text is not None]
        return sorted(found, key=lambda text: -text.last_used)

    def drop(self, text: KeptText) -> None:
        """Remove a text."""
        shutil.rmtree(self.root / text.folder, ignore_errors=True)

    def load(self, text: KeptText, ids: Sequence[int]) -> torch.Tensor | None:
        """The keys and values of a prefix; None where they are not here. A damaged file is removed."""
        from safetensors import SafetensorError, safe_open

        path = self._path(text, ids)
        try:
            with safe_open(path, framework="pt") as file:
                has_key = (file.metadata() or {}).get("key") == text.stamp
                stored: list[int] = file.get_tensor("ids").tolist()
                values: torch.Tensor = file.get_tensor("keys_values")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError):
            path.unlink(missing_ok=True)
            return None
        if not has_key or stored != list(ids):
            return None
        with contextlib.suppress(OSError):
            os.utime(self.root / text.folder / ABOUT)
        return values

    def save(self, text: KeptText, ids: Sequence[int], values: torch.Tensor) -> bool:
        """Put a prefix on disk, dropping other texts to make room; whether there was room."""
        import torch
        from safetensors.torch import save_file

        path = self._path(text, ids)
        if path.exists():
            return True
        num_bytes = values.numel() * values.element_size()
        try:
            if not self._has_room(text, num_bytes):
                return False
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            tensors = {"keys_values": values.contiguous(), "ids": torch.tensor(list(ids))}
            with replacing(path, sync=False) as part:
                save_file(tensors, part, metadata={"key": text.stamp})
            self._describe(text, len(ids), num_bytes)
        except OSError:
            return False  # the disk is full, or may not be written
        return True

    def _path(self, text: KeptText, ids: Sequence[int]) -> Path:
        digest = hashlib.blake2b(text.stamp.encode(), digest_size=16)
        digest.update(array("q", ids).tobytes())
        return self.root / text.folder / f"{digest.hexdigest()}.safetensors"

    def _has_room(self, text: KeptText, num_bytes: int) -> bool:
        used = {one.folder: one.num_bytes for one in self.texts()}
        others = [one for one in reversed(self.texts()) if one.folder != text.folder]
        while sum(used.values()) + num_bytes > self._max_bytes and others:
            least_used = others.pop(0)
            del used[least_used.folder]
            self.drop(least_used)
            self.on_drop(least_used)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_free = shutil.disk_usage(self.root).free > num_bytes + SPARE_BYTES
        return is_free and sum(used.values()) + num_bytes <= self._max_bytes

    def _describe(self, text: KeptText, num_tokens: int, num_bytes: int) -> None:
        """Count a new file in the description of its text."""
        folder = self.root / text.folder
        before = _about(folder) or text
        values = asdict(before) | {
            "num_tokens": before.num_tokens + num_tokens,
            "num_bytes": before.num_bytes + num_bytes,
            "num_sections": before.num_sections + 1,
        }
        del values["last_used"]
        write_atomically(folder / ABOUT, json.dumps(values).encode())


def _digest(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()


def default_root() -> Path:
    """Where texts are kept on this machine."""
    return user_cache_path("memagent", appauthor=False) / "texts"


def _folders(root: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in root.iterdir() if path.is_dir())


def _about(folder: Path) -> KeptText | None:
    """The text in a folder; None where its description is missing or damaged."""
    path = folder / ABOUT
    try:
        values = json.loads(path.read_bytes())
        text = KeptText(**values, last_used=path.stat().st_mtime)
    except (OSError, ValueError, TypeError):
        return None
    sizes = (text.num_tokens, text.num_bytes, text.num_sections)
    names = (text.text, text.key, text.owner)
    is_sound = all(isinstance(size, int) for size in sizes)
    is_sound = is_sound and all(isinstance(name, str) for name in names)
    return text if is_sound and text.folder == folder.name else None
