"""llama.cpp's server with the parameters of one model. It is started by `engine.py`, and ends with its parent.

    MEMAGENT_LLAMA_KEY=... python -m memagent.engines.llamacpp '{"model.path": "m.gguf", "n_ctx": 8192, ...}'

Parameters are those of xllamacpp, parts of them with a dot. When it answers it prints `ready PORT`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import reduce
from typing import Any

KEY_VARIABLE = "MEMAGENT_LLAMA_KEY"
POLL_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    """Serve until the parent has ended."""
    import xllamacpp

    parent = os.getppid()
    params = xllamacpp.CommonParams()
    values: dict[str, Any] = json.loads(arguments[0])
    adapter: str | None = values.pop("adapter", None)
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    for name, value in values.items():
        *parts, last = name.split(".")
        setattr(reduce(getattr, parts, params), last, value)
    params.api_keys = [os.environ[KEY_VARIABLE]]
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        return 1  # llama.cpp has told why
    sys.stdout.write(f"ready {server.listening_address.rpartition(':')[2]}\n")
    sys.stdout.flush()
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status == 0:
        os._exit(0)  # without waiting for what is computed
    sys.exit(status)  # with all that llama.cpp has told, which a thread of it writes
