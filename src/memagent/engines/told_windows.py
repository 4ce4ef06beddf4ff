"""What servers tell of their window beside OpenAI's API, which has no place for it.

Ollama loads a model with the first call for it, and with another window where the last call set one. So it is asked to
load the model as a call would have it, which the first call needs anyway. Its /v1 takes no window (`num_ctx`): a
model that was loaded with one is loaded again without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Page = Callable[..., Awaitable[Any]]
"""A page of the server by method, path and body, parsed; an empty object where there is none."""


async def told_window(page: Page, model: str) -> int | None:
    """Tokens that the server says a prompt and its reply may have; None where it says nothing."""
    llama_cpp, lm_studio, ollama = await asyncio.gather(
        page("GET", "/props"), page("GET", "/api/v0/models"), page("GET", "/api/ps")
    )
    try:
        if "models" in ollama:
            await page("POST", "/api/generate", {"model": model})
            ollama = await page("GET", "/api/ps")
        told = [llama_cpp.get("default_generation_settings", {}).get("n_ctx")]
        for entry in [*lm_studio.get("data", ()), *ollama.get("models", ())]:
            if {model, f"{model}:latest"} & {entry.get("id"), entry.get("name")}:
                told += [entry.get("loaded_context_length"), entry.get("context_length")]
    except (AttributeError, TypeError):  # another server, with pages of its own
        return None
    return next((window for window in told if type(window) is int and window > 0), None)
