"""What computes a local model: llama.cpp in a process of its own, or torch in this one.

local:reader.gguf ──┬─ no NVIDIA GPU ──▶ llama.cpp     `runtime=llama.cpp`
local:my-folder   ──┴─ otherwise ──────▶ torch         `runtime=torch`
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from memagent.config import LocalConfig, LocalRuntime
from memagent.engines import store
from memagent.engines.base import BaseEngine
from memagent.engines.vllm.servers import visible_gpus
from memagent.errors import ConfigError

LIBRARIES: dict[LocalRuntime, tuple[str, ...]] = {
    "llama.cpp": ("xllamacpp",),
    "torch": ("torch", "transformers"),
}
REMEDIES: dict[LocalRuntime, str] = {
    "llama.cpp": 'pip install "memagent[local]", or, where there is no wheel of it for this machine, name an '
    "endpoint with `base_url`",
    "torch": 'pip install "memagent[gpu]", or name an endpoint with `base_url`',
}


def open_local(model: str, **settings: Any) -> BaseEngine:
    """An engine for a model on this machine: a pulled one by name, a folder, or a GGUF file."""
    if not model:
        raise ConfigError("no model named; use local:NAME, or local:PATH of a folder or GGUF file")
    config = LocalConfig.parse(settings)
    runtime = runtime_of(model, config)
    check_runtime(runtime)
    if runtime == "torch":
        from memagent.engines.local.engine import open_torch

        return open_torch(model, config)
    from memagent.engines.llamacpp.engine import open_llama

    return open_llama(model, config)


def runtime_of(model: str, config: LocalConfig) -> LocalRuntime:
    """What computes a model, which must be on this machine, by these settings."""
    if config.runtime is not None:
        return config.runtime
    is_for_gpu = config.device not in (None, "cpu") or (
        config.device is None and _is_usable("torch") and bool(visible_gpus(os.environ))
    )
    is_file = store.locate(model).is_file()
    return "llama.cpp" if is_file and not is_for_gpu and _is_usable("llama.cpp") else "torch"


def check_runtime(runtime: LocalRuntime) -> None:
    """Raise ConfigError where the libraries of a runtime are not installed."""
    missing = [library for library in LIBRARIES[runtime] if find_spec(library) is None]
    if missing:
        raise ConfigError(f"a local model in {runtime} needs {missing[0]}; {REMEDIES[runtime]}")


def local_runtimes() -> str:
    """What runs local models here, in words."""
    found = []
    is_default = not (_is_usable("torch") and visible_gpus(os.environ))
    if _is_usable("llama.cpp"):
        found.append("llama.cpp runs GGUF files" + ("" if is_default else ", where it is set"))
    if _is_usable("torch"):
        from memagent.engines.local.loading import device_names

        others = "other models" if found and is_default else "models"
        found.append(f"torch runs {others} on {', '.join(device_names())}")
    return "; ".join(found)


def _is_usable(runtime: LocalRuntime) -> bool:
    return all(find_spec(library) for library in LIBRARIES[runtime])
