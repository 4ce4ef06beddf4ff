"""Weights of GGUF files: those of their blocks, and errors of one line."""

import struct
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import LlamaForCausalLM

from memagent.engines.local.loading import load
from memagent.errors import ConfigError
from memagent.gguf_format import BLOCKS
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model

KINDS = GGMLQuantizationType
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return make_tiny_model(folder, "llama", hidden_size=256, intermediate_size=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_put_together_as_transformers_does_it(
    tiny: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=KINDS.Q8_0)
    ours = load(str(path), dtype=dtype).model
    theirs = LlamaForCausalLM.from_pretrained(
        None, config=ours.config, state_dict=ours.state_dict(), dtype=dtype
    )
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() == dict(ours.named_parameters()).keys()
    assert all(torch.equal(parameters[name], one) for name, one in ours.named_parameters())
    assert ours.dtype == dtype
    assert ours.training is theirs.training is False
    assert all(one.requires_grad for one in ours.parameters())
    buffers = dict(theirs.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    assert all(torch.equal(buffers[name], one) for name, one in ours.named_buffers())


# --- damaged files ----------------------------------------------------------------------------------


def test_a_type_that_is_not_known_is_named(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf")
    write_as_i32(path, b"blk.1.ffn_up.weight")
    message = r"model\.gguf stores weights as I32, which cannot be read$"
    with pytest.raises(ConfigError, match=message):
        load(str(path))


def write_as_i32(path: Path, name: bytes) -> None:
    """Say in the header of a file that a matrix of float32 has integers."""
    data = bytearray(path.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of sizes and the sizes
    assert struct.unpack_from("<I", data, place) == (KINDS.F32,)
    struct.pack_into("<I", data, place, KINDS.I32)
    path.write_bytes(data)


def test_the_blocks_of_all_types_are_known() -> None:
    assert {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()} == BLOCKS
