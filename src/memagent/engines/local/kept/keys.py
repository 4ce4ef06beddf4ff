"""The fingerprint of a model as it computes: kept keys and values are valid for exactly one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


def weights_key(model: Any) -> str:
    """A fingerprint of all parameters, adapters included, and of every setting that changes keys and values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            state = (name, dict(module.scaling), list(module.active_adapters), module.merged)
            digest.update(repr((*state, module.disable_adapters)).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        values = parameter.detach().to("cpu").contiguous().flatten()
        digest.update(memoryview(values.view(torch.uint8).numpy()))
    return digest.hexdigest()
