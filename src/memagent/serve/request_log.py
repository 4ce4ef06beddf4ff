"""What the server reports of each request: who asked for what, the status, tokens and time; never text.

    127.0.0.1 POST /v1/chat/completions 200, 31 + 10 tokens, 0.42 s, req_5f0c...

Successful requests for /health and /metrics, which monitors send all the time, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope

from memagent.types import Usage

PROBES = ("/health", "/metrics")
MAX_PATH = 200
"""Characters of a path that a line shows; clients choose them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended."""

    client: str
    method: str
    path: str
    """As it was sent, percent-encoded."""
    status: int
    seconds: float
    usage: Usage
    """Tokens of the replies that were completed."""
    request_id: str
    """As the client gets it in the header `x-request-id`."""
    is_cut: bool
    """True if the shutdown of the server ended it."""

    @property
    def is_probe(self) -> bool:
        """Whether it is a monitor's request, and succeeded."""
        return self.path in PROBES and self.status == 200

    def __str__(self) -> str:
        path = self.path if len(self.path) <= MAX_PATH else f"{self.path[:MAX_PATH]}..."
        used = self.usage
        tokens = f", {used.prompt_tokens:,} + {used.completion_tokens:,} tokens"
        cut = ", cut off by the shutdown" if self.is_cut else ""
        return (
            f"{self.client} {self.method} {path} {self.status}{tokens if used.calls else ''}, "
            f"{self.seconds:.2f} s, {self.request_id}{cut}"
        )


OnRequest = Callable[[RequestRecord], None]


def path_of(scope: Scope) -> str:
    """The path of a request as it was sent, in visible ASCII."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in raw)


def client_of(scope: Scope) -> str:
    """The address of the client."""
    client = scope.get("client")
    return str(client[0]) if client else "-"
