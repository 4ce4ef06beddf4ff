"""Replies from merged weights are those of the adapter, before and after updates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import ConfigError
from memagent.rl.settings import RolloutSettings
from memagent.rl.update.policy import Policy
from memagent.rl.weights.models import MergedCopy, Trained, open_merged, open_rollout_engine
from memagent.rl.weights.sync import open_sync
from memagent.types import Sampling
from tests.support.tiny_models import KINDS, Kind, make_tiny_adapter, make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the ledger?"}]
SAMPLING = Sampling(max_tokens=24, temperature=1.0, seed=3)


def adapted(folder: Path, kind: Kind, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = make_tiny_model(folder / "model", kind)
    adapter = make_tiny_adapter(model, folder / "adapter")
    return load(str(model), adapter=str(adapter), dtype=dtype)


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = loaded.model(torch.arange(5, 45)[None]).logits[0]
    return found


def disturb(loaded: LoadedModel) -> None:
    """As an update does: in place."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_copy_computes_what_the_adapter_does_and_follows_it(
    tmp_path: Path, kind: Kind
) -> None:
    loaded = adapted(tmp_path, kind)
    merged = MergedCopy(loaded)
    assert not any("lora_" in name for name, _ in merged.loaded.model.named_parameters())
    before = logits(loaded)
    torch.testing.assert_close(logits(merged.loaded), before, rtol=1e-4, atol=1e-4)
    addresses = [one.data_ptr() for one in merged.loaded.model.parameters()]
    disturb(loaded)
    assert not torch.allclose(logits(loaded), before, atol=1e-2)
    torch.testing.assert_close(logits(merged.loaded), before, rtol=1e-4, atol=1e-4)
    merged.refresh()
    torch.testing.assert_close(logits(merged.loaded), logits(loaded), rtol=1e-4, atol=1e-4)
    assert [one.data_ptr() for one in merged.loaded.model.parameters()] == addresses


def test_only_matrices_with_an_adapter_exist_twice(tmp_path: Path) -> None:
    loaded = adapted(tmp_path, "qwen2")
    merged = MergedCopy(loaded)
    own = {name: one.data_ptr() for name, one in loaded.model.named_parameters()}
    for name, one in merged.loaded.model.named_parameters():
        base = name.replace("_proj.", "_proj.base_layer.")
        is_copied = name.endswith("_proj.weight")
        assert (own[base] != one.data_ptr()) == is_copied, name


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    loaded = adapted(tmp_path, "llama", dtype=torch.bfloat16)
    layer: Any = loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    down, up = (one["default"].weight.double() for one in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.double() + layer.scaling["default"] * (up @ down)
    found: Any = MergedCopy(loaded).loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    assert found.weight.dtype == torch.bfloat16
    share = (found.weight == exact.to(torch.bfloat16)).float().mean()
    assert share > 0.999


async def test_the_engine_replies_from_the_merged_copy_and_gets_new_weights(tmp_path: Path) -> None:
    loaded = adapted(tmp_path, "qwen2")
    Policy(loaded.model, checkpointing=True)  # the copy is of the model without training hooks
    trained = Trained(loaded=loaded, parameters=(), has_adapter=True)
    settings = RolloutSettings(merged=True)
    merged = open_merged(settings, trained)
    assert merged is not None
    engine = open_rollout_engine(settings, trained, merged=merged)
    plain = LocalEngine(loaded, LocalConfig())
    sync = open_sync(settings, engine, trained, tmp_path, merged=merged)
    try:
        for version in (0, 1):
            if version:
                disturb(loaded)
            await sync.push(version)
            plain.weights_changed(version)
            reply = await engine.complete(MESSAGES, SAMPLING)
            expected = await plain.complete(MESSAGES, SAMPLING)
            assert reply.completion_ids == expected.completion_ids
            assert reply.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert reply.policy_version == version
    finally:
        await engine.aclose()
        await plain.aclose()


def test_only_an_adapter_in_this_process_gets_a_merged_copy(tmp_path: Path) -> None:
    loaded = adapted(tmp_path, "llama")
    trained = Trained(loaded=loaded, parameters=(), has_adapter=True)
    assert open_merged(RolloutSettings(), trained) is None, "not on a CPU by default"
    assert open_merged(RolloutSettings(merged=False), trained) is None
    assert open_merged(RolloutSettings(engine="openai:x"), trained) is None
    whole = Trained(loaded=loaded, parameters=(), has_adapter=False)
    assert open_merged(RolloutSettings(merged=True), whole) is None


@pytest.mark.parametrize("more", ["use_dora", "lora_bias"])
def test_an_adapter_that_cannot_be_merged_is_refused(more: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    loaded = load(str(make_tiny_model(tmp_path / "model", "qwen2")))
    model: Any = loaded.model
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], **{more: True}))
    with pytest.raises(ConfigError, match=r"q_proj cannot be merged .* `rollout\.merged=false"):
        MergedCopy(loaded)
