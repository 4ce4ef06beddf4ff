"""Functions in files of the user, named as `path.py:function`. Errors are one line.

    score = load_function("my_reward.py:score", what="reward", parameters=("task", "outcome"))

The file is run once per process, and may import what lies beside it. `portable` makes its functions fit
to be sent to another process, which runs the file itself. Libraries that may be missing are asked for by `require`:

    require("peft", 'adapters need peft; pip install "memagent[gpu]"')
    with hidden("jax"):      # what is imported here finds no jax
        import bm25s
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from memagent.errors import ConfigError
from memagent.names import hint

PREFIX = "memagent_file_"
"""How the modules of such files are called; the rest is their name and a fingerprint of the path."""

_place = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileFunction:
    """A function of a file, by name: as small as that when it is sent to another process."""

    path: str
    name: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(load_file(Path(self.path), "a file"), self.name)(*arguments, **options)


def is_file_spec(spec: str) -> bool:
    """Whether a name means a function in a file."""
    return spec.partition(":")[0].endswith(".py")


def code_file(spec: str) -> str:
    """The absolute path of the file in `path.py:function`."""
    return str(Path(spec.partition(":")[0]).expanduser().resolve())


def load_function(spec: str, *, what: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function that `path.py:function` names, taking these parameters by position.

    Messages call it `what`. Further parameters are fine if they have defaults.
    """
    path, colon, name = spec.partition(":")
    if not colon or not path.endswith(".py") or not name:
        raise ConfigError(f"name the {what} as path.py:function, not {spec!r}")
    module = load_file(Path(path), what)
    found = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if is_own_function(value, module)]
        listed = f"it has {', '.join(own) or 'no functions'}"
        raise ConfigError(f"{path} has no {name}; {hint(name, own, otherwise=listed)}")
    if not inspect.isfunction(found):
        raise ConfigError(
            f"{spec} is no function; the {what} is def {name}({', '.join(parameters)})"
        )
    try:
        inspect.signature(found).bind(*parameters)
    except TypeError:
        raise ConfigError(
            f"{spec} takes {inspect.signature(found)}; the {what} is called with "
            f"({', '.join(parameters)})"
        ) from None
    function: Callable[..., Any] = found
    return function


def load_file(path: Path, what: str) -> ModuleType:
    """The module in a file; run once per process."""
    resolved = path.expanduser().resolve()
    name = f"{PREFIX}{resolved.stem}_{sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise ConfigError(f"there is no file {path} with the {what}; check its path")
    spec = spec_from_file_location(name, resolved)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    module = module_from_spec(spec)
    if str(resolved.parent) not in sys.path:
        sys.path.append(
            str(resolved.parent)
        )  # as for a script: what lies beside it can be imported
    sys.modules[name] = module  # dataclasses look for their module while the file runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{path} does not run: {error_line(error)}") from None
    return module


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in a form that can be sent to another process."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = getattr(function, "__qualname__", "")
    if module is None or not module.__name__.startswith(PREFIX) or not name.isidentifier():
        return function
    return FileFunction(str(module.__file__), name)


def error_line(error: BaseException) -> str:
    """An error in one line: its kind, its message, and the last line of code that is the user's own."""
    message = " ".join(str(error).split()) or "no message"
    frames = [
        (frame.filename, str(frame.lineno)) for frame in traceback.extract_tb(error.__traceback__)
    ]
    frames += _place.findall(str(error.__cause__))  # as text, if it comes from another process
    # not of memagent, of the standard library or of installed packages
    others = (str(Path(__file__).parent), sys.base_prefix, sys.prefix, "<")
    theirs = [
        frame
        for frame in frames
        if not frame[0].startswith(others) and "site-packages" not in frame[0]
    ]
    where = f" ({Path(theirs[-1][0]).name}, line {theirs[-1][1]})" if theirs else ""
    return f"{type(error).__name__}: {message}{where}"


def is_failure(error: BaseException) -> bool:
    """Whether code that the current task runs has failed; False where the task itself is being cancelled."""
    task = asyncio.current_task()
    return not isinstance(error, asyncio.CancelledError) or task is None or not task.cancelling()


def is_own_function(value: object, module: ModuleType) -> bool:
    """Whether a name of a module stands for a function that was written there."""
    return inspect.isfunction(value) and value.__module__ == module.__name__


# --- optional libraries ---------------------------------------------------------------------------

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
