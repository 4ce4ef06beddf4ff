"""Read text of any length with a language model whose window is small and fixed.

from memagent import Document, Reader, open_engine

engine = open_engine("openai:my-model", base_url="http://localhost:8000/v1")
trace = Reader(engine).ask("Who inherits the house?", Document.load("novel.txt"))
print(trace.answer)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memagent._version import __version__

if TYPE_CHECKING:
    from memagent.agent.reader import Reader
    from memagent.agent.trace import Step, Trace
    from memagent.documents.document import Chunk, Document
    from memagent.engines.base import open_engine
    from memagent.errors import MemagentError

_HOMES = {
    "Chunk": "memagent.documents.document",
    "Document": "memagent.documents.document",
    "MemagentError": "memagent.errors",
    "Reader": "memagent.agent.reader",
    "Step": "memagent.agent.trace",
    "Trace": "memagent.agent.trace",
    "open_engine": "memagent.engines.base",
}

__all__ = [
    "Chunk",
    "Document",
    "MemagentError",
    "Reader",
    "Step",
    "Trace",
    "__version__",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    """Public names load their module when first used, so that `import memagent` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'memagent' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
