"""What can be chosen about the server."""

from __future__ import annotations

from pydantic import Field, SecretStr

from memagent.config import Settings


class ServeConfig(Settings):
    """Where the server listens, who may ask it, and how much at once."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine can ask the default one."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    api_key: SecretStr | None = None
    """Key that requests must carry. Prefer MEMAGENT_API_KEY in the environment to this option."""
    max_concurrency: int = Field(default=256, ge=1)
    """Requests under way at once, at most; further ones are answered with 429."""
    max_request_bytes: int = Field(default=16_000_000, ge=1000)
    """Size of a request, at most; larger ones are answered with 413."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish when the server is stopped."""
