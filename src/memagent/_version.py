"""The version of this package; the only place it is written."""

__version__ = "0.1.0.dev0"
