"""Random models of architectures that only llama.cpp runs: Gemma 3 (sliding windows) and LFM2 (convolutions).

write_gemma3(path)     sentence pieces with scores
write_lfm2(path)       keys and values in every second layer only
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

from tests.conftest import CHAT_TEMPLATE

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 128, 4, 4, 2, 16
WINDOW = 512
WORDS = ("the", "ledger", "is", "in", "cellar", "key", "where", "user", "assistant")


def pieces() -> tuple[list[str], list[float], list[TokenType]]:
    """A vocabulary of sentence pieces: control tokens, bytes, characters and what they are merged to."""
    control = ["<|im_start|>", "<|im_end|>"]
    tokens = ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    merged = [word[:end] for word in WORDS for end in range(2, len(word) + 1)]
    characters = [chr(code) for code in range(33, 127)] + ["\n", "\u2581"]
    normal = list(dict.fromkeys([*characters, *merged, *(f"\u2581{one}" for one in merged)]))
    scores = [*[0.0] * len(tokens), *(-float(number) for number in range(len(normal)))]
    return [*tokens, *normal], scores, [*kinds, *[TokenType.NORMAL] * len(normal)]


class Weights:
    """Random weights for a writer."""

    def __init__(self, writer: GGUFWriter) -> None:
        self._writer = writer
        self._random = np.random.default_rng(0)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self._random.normal(0, 0.2, (rows, columns)).astype(np.float32)
        self._writer.add_tensor(f"{name}.weight", values)

    def ones(self, name: str, size: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def attention(self, block: str) -> None:
        self.matrix(f"{block}.attn_q", HEADS * HEAD, WIDTH)
        self.matrix(f"{block}.attn_k", KV_HEADS * HEAD, WIDTH)
        self.matrix(f"{block}.attn_v", KV_HEADS * HEAD, WIDTH)
        self.matrix(f"{block}.attn_output", WIDTH, HEADS * HEAD)
        self.ones(f"{block}.attn_q_norm", HEAD)
        self.ones(f"{block}.attn_k_norm", HEAD)

    def feed_forward(self, block: str) -> None:
        self.matrix(f"{block}.ffn_gate", INNER, WIDTH)
        self.matrix(f"{block}.ffn_up", INNER, WIDTH)
        self.matrix(f"{block}.ffn_down", WIDTH, INNER)
        self.ones(f"{block}.ffn_norm", WIDTH)


def write_gemma3(path: Path) -> Path:
    writer, weights = _begun(path, "gemma3", [KV_HEADS])
    writer.add_sliding_window(64)
    for number in range(LAYERS):
        block = f"blk.{number}"
        weights.attention(block)
        weights.feed_forward(block)
        for name in ("attn_norm", "post_attention_norm", "post_ffw_norm"):
            weights.ones(f"{block}.{name}", WIDTH)
    weights.ones("output_norm", WIDTH)
    return _written(writer, path)


def write_lfm2(path: Path) -> Path:
    kv_heads = [KV_HEADS * (number % 2) for number in range(LAYERS)]
    writer, weights = _begun(path, "lfm2", kv_heads)
    writer.add_uint32("lfm2.shortconv.l_cache", 3)
    for number in range(LAYERS):
        block = f"blk.{number}"
        if kv_heads[number]:
            weights.attention(block)
        else:
            weights.matrix(f"{block}.shortconv.conv", WIDTH, 3)
            weights.matrix(f"{block}.shortconv.in_proj", 3 * WIDTH, WIDTH)
            weights.matrix(f"{block}.shortconv.out_proj", WIDTH, WIDTH)
        weights.feed_forward(block)
        weights.ones(f"{block}.attn_norm", WIDTH)
    weights.ones("token_embd_norm", WIDTH)
    return _written(writer, path)


def _begun(path: Path, architecture: str, kv_heads: list[int]) -> tuple[GGUFWriter, Weights]:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads if len(kv_heads) > 1 else kv_heads[0])
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    tokens, scores, kinds = pieces()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    weights = Weights(writer)
    weights.matrix("token_embd", len(tokens), WIDTH)
    return writer, weights


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
