"""What is known of a vLLM replica before its server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from memagent.errors import ConfigError
from memagent.rl.distributed.vllm_replica import VllmReplica, peft_name


def test_tied_embeddings_cannot_change_in_vllm_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(ConfigError, match=r"whose embeddings are tied; train an adapter"):
        VllmReplica(model=str(tmp_path))()


def test_parameters_of_an_adapter_have_the_names_of_peft() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert peft_name(name) == "model.layers.0.self_attn.q_proj.lora_A.weight"
