"""Optional libraries: an error with the remedy where one is not installed.

require("peft", 'adapters need peft; pip install "memagent[local]"')
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from memagent.errors import ConfigError


def require(library: str, message: str) -> None:
    """Raise a ConfigError with this message if a library is not installed.

    The library is not imported: torch would take seconds before anything else can be checked.
    """
    is_there = sys.modules[library] if library in sys.modules else find_spec(library)
    if is_there is None:
        raise ConfigError(message)
