"""Sizes of models: by name, from a config.json, of random weights."""

import json
from pathlib import Path

import pytest

from memagent.errors import ConfigError
from memagent.rl.settings import ScratchSettings
from memagent.rl.sizes import SHAPES, find_shape, scratch_shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-3b", 3.086),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("llama-3.1-8b", 8.03),
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, billions: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_an_adapter_has_the_parameters_that_the_run_reported() -> None:
    assert SHAPES["qwen2.5-1.5b"].lora_parameters(16) / 1e6 == pytest.approx(18.5, abs=0.05)
    assert SHAPES["smollm2-135m"].lora_parameters(16) / 1e6 == pytest.approx(4.9, abs=0.05)


def test_a_token_of_qwen_1_5b_takes_29_kb_of_cache() -> None:
    assert SHAPES["qwen2.5-1.5b"].kv_bytes == 28_672


@pytest.mark.parametrize(
    "name", ["Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "./models/Qwen2.5-7B"]
)
def test_a_model_is_known_by_its_name(name: str) -> None:
    assert find_shape(name) == SHAPES["qwen2.5-7b"]


def test_variants_are_the_model_they_are_made_from() -> None:
    assert find_shape("Qwen2.5-Coder-1.5B-Instruct") == SHAPES["qwen2.5-1.5b"]
    assert find_shape("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf") == SHAPES["qwen2.5-1.5b"]


def test_a_folder_is_read(tmp_path: Path) -> None:
    values = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = find_shape(str(tmp_path))
    assert (shape.num_kv_heads, shape.head_size, shape.is_tied) == (2, 16, True)


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"hidden_size": "wide"}'])
def test_a_damaged_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="does not describe a decoder"):
        find_shape(str(tmp_path))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sizes of the model Qwen2.5-8B are not known"):
        find_shape("Qwen2.5-8B")


def test_random_weights_have_the_size_that_training_reports() -> None:
    tiny = ScratchSettings(vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, window=256)
    assert scratch_shape(tiny).num_parameters / 1e6 == pytest.approx(0.4, abs=0.06)
