"""Optional libraries: an error with the remedy where one is not installed.

require("peft", 'adapters need peft; pip install "memagent[local]"')
"""

from __future__ import annotations

from importlib.util import find_spec

from memagent.errors import ConfigError


def require(library: str, message: str) -> None:
    """Raise a ConfigError with this message if a library is not installed.

    The library is not imported: torch would take seconds before anything else can be checked.
    """
    if find_spec(library) is None:
        raise ConfigError(message)
