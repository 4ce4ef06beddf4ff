"""One step of a transformers causal model over packed tokens and a slot cache.

The model's own modules and parameters are used, adapters included, so weights exist once and a trainer's
updates apply to generation. Only the loop over layers and the attention are implemented here: tokens of
all requests are packed into one row, and attention reads slices of the cache.

    tokens of all pieces ──▶ embed ──▶ [ norm, q k v, rope, write to slots, attend, mlp ] x L ──▶ logits
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from memagent.engines.local.cuda.sizes import free_reserve
from memagent.engines.local.sampling import SampledTokens, sample
from memagent.engines.local.scheduler import GROW_SLOTS, GenerationRequest, Piece, SlotRun


class Batch(NamedTuple):
    """The pieces of one step as tensors."""

    pieces: Sequence[Piece]
    ids_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    """The slot of each token's keys and values."""
    rows: list[tuple[int, int]]
    """The rows of each piece."""
    final_rows: list[int]
    """Rows whose logits are needed."""


def make_batch(pieces: Sequence[Piece], device: torch.device) -> Batch:
    """Pack the pieces of a step."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[tuple[int, int]] = []
    final_rows: list[int] = []
    for piece in pieces:
        first = len(ids)
        ids += piece.request.tokens(piece.start, piece.end)
        positions += range(piece.start, piece.end)
        runs = piece.request.runs(piece.end)
        slots += [slot for run in runs for slot in range(run.start, run.start + run.length)][
            piece.start :
        ]
        rows.append((first, len(ids)))
        if piece.is_last:
            final_rows.append(len(ids) - 1)
    return Batch(
        pieces=pieces,
        ids_N=torch.tensor(ids, device=device),
        positions_N=torch.tensor(positions, device=device),
        slots_N=torch.tensor(slots, device=device),
        rows=rows,
        final_rows=final_rows,
    )


class CachedModel:
    """A transformers Llama, Qwen2 or Qwen3 over a cache of slots."""

    max_steps = 1
    grow_slots = GROW_SLOTS

    def __init__(self, model: Any, num_slots: int) -> None:
        config = model.config
        self._backbone = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._num_kv_heads: int = config.num_key_value_heads
        self._num_heads: int = config.num_attention_heads
        self._head_dim: int = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        shape = (config.num_hidden_layers, 2, self._num_kv_heads, num_slots, self._head_dim)
        # not zeroed: a slot is written before it is read, and untouched pages take no memory
        self.cache = torch.empty(shape, dtype=parameter.dtype, device=self.device)

    def run(
        self, pieces: Sequence[Piece], steps: int = 1
    ) -> list[tuple[GenerationRequest, SampledTokens]]:
        """Compute the pieces, and sample a token for each request whose prompt is complete."""
        requests = [piece.request for piece in pieces if piece.is_last]
        states = [(r.sampling, r.seed, len(r.completion_ids)) for r in requests]
        sampled = sample(self.step(pieces), states)
        pairs = zip(requests, sampled.tokens, sampled.logprobs, strict=True)
        return [(request, SampledTokens([token], [logprob])) for request, token, logprob in pairs]

    def weights_changed(self) -> None:
        """Nothing derived from the weights is cached."""

    def free_memory(self) -> None:
        """Give back memory that torch keeps in reserve."""
        free_reserve(self.device)

    def close(self) -> None:
        """Free the cache; its shape stays known."""
        self.cache = self.cache.to("meta")
        with suppress(torch.AcceleratorError):  # of a GPU that has failed
            self.free_memory()

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Compute the pieces; the logits of the last token of each completed prompt."""
        batch = make_batch(pieces, self.device)
        backbone = self._backbone
        hidden_ND = backbone.embed_tokens(batch.ids_N)
        cosine, sine = backbone.rotary_emb(hidden_ND[None], batch.positions_N[None])
        rotation = (cosine[0][:, None], sine[0][:, None])
        for number, layer in enumerate(backbone.layers):
            attended = self._attention(number, layer, hidden_ND, rotation, batch)
            if number == len(backbone.layers) - 1:  # the other rows are not needed any more
                hidden_ND, attended = hidden_ND[batch.final_rows], attended[batch.final_rows]
            hidden_ND = hidden_ND + attended
            hidden_ND = hidden_ND + layer.mlp(layer.post_attention_layernorm(hidden_ND))
        logits: torch.Tensor = self._head(backbone.norm(hidden_ND))
        return logits

    def _attention(
        self,
        number: int,
        layer: Any,
        hidden_ND: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        attention = layer.self_attn
        x = layer.input_layernorm(hidden_ND)
        queries = attention.q_proj(x).view(-1, self._num_heads, self._head_dim)
        keys = attention.k_proj(x).view(-1, self._num_kv_heads, self._head_dim)
        values = attention.v_proj(x).view(-1, self._num_kv_heads, self._head_dim)
        if hasattr(attention, "q_norm"):  # Qwen3
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys = _rotated(queries, rotation), _rotated(keys, rotation)
        cache_k, cache_v = self.cache[number]
        cache_k.index_copy_(1, batch.slots_N, keys.transpose(0, 1))
        cache_v.index_copy_(1, batch.slots_N, values.transpose(0, 1))
        out = torch.empty_like(queries)
        for piece, (first, end) in zip(batch.pieces, batch.rows, strict=True):
            runs = piece.request.runs(piece.end)
            out[first:end] = self._read(
                queries[first:end], _joined(cache_k, runs), _joined(cache_v, runs), piece.start
            )
        result: torch.Tensor = attention.o_proj(out.flatten(1))
        return result

    def _read(
        self, queries_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Causal attention of tokens from position `start` on, over all tokens up to each."""
        queries = queries_THD.transpose(0, 1)[None]
        num_queries, num_keys = queries.shape[2], keys.shape[1]
        mask = None
        if start > 0:
            position = torch.arange(start, start + num_queries, device=keys.device)
            mask = torch.arange(num_keys, device=keys.device)[None] <= position[:, None]
        out = F.scaled_dot_product_attention(
            queries,
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def _joined(cache: torch.Tensor, runs: Sequence[SlotRun]) -> torch.Tensor:
    """The slots of runs, in order: a view if they are contiguous, else a copy."""
    merged: list[SlotRun] = []
    for run in runs:
        if merged and merged[-1].start + merged[-1].length == run.start:
            merged[-1] = SlotRun(merged[-1].start, merged[-1].length + run.length)
        else:
            merged.append(run)
    parts = [cache[:, run.start : run.start + run.length] for run in merged]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rotated(x_NHD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding, in the half-and-half order of Llama and Qwen."""
    cosine, sine = rotation
    low, high = x_NHD.chunk(2, dim=-1)
    return x_NHD * cosine + torch.cat((-high, low), dim=-1) * sine
