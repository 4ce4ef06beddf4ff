"""Tiny models as GGUF files, plain or quantised.

write_gguf(folder, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q4_1)
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoModelForCausalLM

from memagent.engines.local.gguf_files import LAYER_NAMES, OTHER_NAMES
from tests.conftest import CHAT_TEMPLATE

K_KINDS = {
    GGMLQuantizationType.Q4_K: (144, (0, 2), 63 * 15),
    GGMLQuantizationType.Q6_K: (210, (208,), 127 * 32),
}
"""Bytes of 256 weights, where the factors of their scales are, and the largest value times a factor."""
PARTS = {ours: theirs for theirs, ours in {**LAYER_NAMES, **OTHER_NAMES}.items()}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` is `blk.0.ffn_up.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem in PARTS:
        return f"{PARTS[stem]}.{suffix}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{PARTS[part]}.{suffix}"


def permuted(name: str, weight: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter stores the queries and keys of Llama models."""
    if config.model_type != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Blocks of a kind that the gguf library reads but cannot write; the same for the same shape."""
    num_bytes, places, largest = K_KINDS[kind]
    rng = np.random.default_rng(shape)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, num_bytes), dtype=np.uint8)
    for place in places:  # of a scale, as float16
        scales = rng.uniform(0.02, 0.1, blocks.shape[:-1]) / largest
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    architecture: str | None = None,
    pre: str = "gpt-2",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    head_kind: GGMLQuantizationType | None = None,
    **extra: str,
) -> Path:
    """A Hugging Face folder as a GGUF file. With `head_kind` the head of a tied model is stored too.

    Weights of a kind in K_KINDS are random ones.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    writer = GGUFWriter(path, architecture or config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    contents = json.loads((folder / "tokenizer.json").read_text())
    tokens = list(contents["model"]["vocab"])
    special = {entry["content"] for entry in contents["added_tokens"]}
    types = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in contents["model"]["merges"]])
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        is_tied_head = name == "lm_head.weight" and config.tie_word_embeddings
        if is_tied_head and head_kind is None:
            continue
        array = permuted(name, weight.numpy(), config)
        stored = GGMLQuantizationType.F32 if array.ndim == 1 else kind
        stored = head_kind if is_tied_head and head_kind is not None else stored
        blocks = (
            random_blocks(array.shape, stored) if stored in K_KINDS else quantize(array, stored)
        )
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
