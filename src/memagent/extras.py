"""Optional libraries: an error with the remedy where one is not installed, and those that must not be loaded.

require("peft", 'adapters need peft; pip install "memagent[gpu]"')

with hidden("jax"):      # what is imported here finds no jax
    import bm25s
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from memagent.errors import ConfigError

_HIDING = threading.RLock()


def require(library: str, message: str) -> None:
    """Raise a ConfigError with this message if a library is not installed.

    The library is not imported: torch would take seconds before anything else can be checked.
    """
    is_there = sys.modules[library] if library in sys.modules else find_spec(library)
    if is_there is None:
        raise ConfigError(message)


@contextmanager
def hidden(library: str) -> Iterator[None]:
    """Inside the block no thread can import a library, as if it were not installed.

    Libraries load jax or TensorFlow if they are there, and these take the memory of a GPU. Modules of the library
    that were loaded before are there again afterwards.
    """
    with _HIDING:
        loaded = _taken_out(library)
        sys.modules[library] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            _taken_out(library)
            sys.modules.update(loaded)


def _taken_out(library: str) -> dict[str, ModuleType]:
    """Remove the modules of a library from those that are loaded."""
    names = [name for name in list(sys.modules) if name.partition(".")[0] == library]
    return {name: sys.modules.pop(name) for name in names}
