"""Optional libraries: an error with the remedy where one is not installed.

require("peft", 'adapters need peft; pip install "memagent[local]"')
"""

from __future__ import annotations

from importlib import import_module

from memagent.errors import ConfigError


def require(library: str, message: str) -> None:
    """Raise a ConfigError with this message if a library is not installed.

    A library that is there but lacks one of its own dependencies keeps its error.
    """
    try:
        import_module(library)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ConfigError(message) from None
