"""GGUF files on a GPU: the weights that a CPU computes, bit by bit.

Skipped without a GPU. Those of a CPU are compared with the gguf library, see
tests/unit/engines/local/test_gguf_weights.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from memagent.engines.local.gguf_weights import READERS, dequantised
from memagent.engines.local.loading import load
from tests.support.tiny_gguf import blocks_of_any_bytes, write_gguf
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(READERS), ids=lambda kind: kind.name)
def test_weights_are_those_that_a_cpu_computes(
    kind: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    packed = blocks_of_any_bytes(kind, num_rows=64, num_blocks=300)
    ours = dequantised(packed, kind, dtype=dtype, device=GPU)
    assert ours.is_cuda
    theirs = dequantised(packed, kind, dtype=dtype, device=CPU)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def test_a_model_and_its_adapter_are_those_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    folder = make_tiny_model(tmp_path / "llama", "llama", **sizes)
    adapter = str(make_tiny_adapter(folder, tmp_path / "lora"))
    kind = GGMLQuantizationType.Q4_K
    path = str(write_gguf(folder, tmp_path / "model.gguf", kind=kind))
    ours = load(path, adapter=adapter, device="cuda", dtype=torch.bfloat16).model
    theirs = load(path, adapter=adapter, dtype=torch.bfloat16).model
    assert {one.device.type for one in (*ours.parameters(), *ours.buffers())} == {"cuda"}
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.cpu(), other)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(one.cpu(), other)
