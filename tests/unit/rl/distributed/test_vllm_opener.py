"""vLLM replicas: what is known before their server starts, and what ends it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memagent.engines.vllm.engine import CONTROL_VARIABLES, HANDLE_VARIABLES
from memagent.errors import ConfigError, EngineError
from memagent.rl.distributed.vllm_replica import VllmReplica, peft_name
from memagent.rl.distributed.weights import Bucket, Filled, TensorSpec
from tests.support import fake_vllm


def test_tied_embeddings_cannot_change_in_vllm_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(ConfigError, match=r"whose embeddings are tied; train an adapter"):
        VllmReplica(model=str(tmp_path))()


async def test_a_server_that_got_only_some_of_the_weights_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(tmp_path / "site", monkeypatch)
    for name in ("CUDA_VISIBLE_DEVICES", *CONTROL_VARIABLES, *HANDLE_VARIABLES):
        monkeypatch.setenv(name, "")
    settings = {
        "vllm_python": sys.executable,
        "vllm_args": f"--fake-token-seconds 0.01 --fake-notes {tmp_path}",
        "vllm_log_dir": str(tmp_path / "logs"),
        "start_seconds": 60,
    }
    replica = VllmReplica(model="some/model", takes_buckets=True, engine_settings=settings)()
    (note,) = tmp_path.glob("*.json")
    arguments = json.loads(note.read_text())["argv"]
    assert "--weight-transfer-config.backend" in arguments
    assert "memagent_route_guard.RouteGuard" in arguments

    def ending() -> Iterator[Filled]:
        raise RuntimeError("the rank has ended")
        yield

    bucket = Bucket((TensorSpec("norm", "float32", (4,)),))
    filled = Filled(bucket, torch.zeros(bucket.num_bytes, dtype=torch.uint8))
    try:
        with pytest.raises(RuntimeError, match="the rank has ended"):
            await replica.receive(ending(), 5)
        assert replica.is_alive, "it got nothing"
        with pytest.raises(EngineError, match="IPC handle not found for GPU"):
            await replica.receive(iter([filled]), 5)
        assert not replica.is_alive
    finally:
        await replica.aclose()


def test_parameters_of_an_adapter_have_the_names_of_peft() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert peft_name(name) == "model.layers.0.self_attn.q_proj.lora_A.weight"
