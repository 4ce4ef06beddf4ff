"""A transformers causal model on a GPU: prompts packed, replies as captured graphs.

One round of the engine has two parts that run on the GPU without waiting for the host:

    replies   `steps` times: embed ─▶ layers ─▶ logits ─▶ sample ─▶ the tokens are the next input
    prompts   one packed pass over pieces of prompts ─▶ logits of their last tokens ─▶ sample

The part for replies is captured once per number of rows (rounded up) and replayed. Inputs that change
every round (tokens, slots, which rows attend to which run) are copied into fixed buffers.

The model's own modules and parameters are used, adapters included, so weights exist once. Captured graphs
hold addresses of parameters: they may change in place; if they are replaced, `weights_changed` captures
the graphs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from memagent.engines.local.cuda.layout import (
    ITEM_FIELDS,
    PromptLayout,
    ReplyInputs,
    ReplyLayout,
    prompt_layout,
    reply_inputs,
    reply_layout,
)
from memagent.engines.local.cuda.sizes import Heads, Parts, free_reserve, free_workspaces
from memagent.engines.local.sampling import (
    SampledTokens,
    has_filter,
    sample,
    temperature_of,
    uniforms,
)
from memagent.engines.local.scheduler import GenerationRequest, Piece

MAX_STEPS = 8
"""Tokens of a reply that are sampled per round. Tokens after the end of a reply are wasted, so this is
small."""
PROMPT_TILE, REPLY_TILE = 128, 32
"""Rows of an attention tile, heads folded in; as in the kernels."""
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Captured numbers of rows."""
PARTS_PER_ROW = 8


def supports(model: Any) -> bool:
    """Whether the kernels support this model: head size and activation."""
    head_dim = _head_dim(model.config)
    is_even = head_dim & (head_dim - 1) == 0 and 16 <= head_dim <= 256
    return is_even and model.config.hidden_act == "silu" and _heads(model).group <= REPLY_TILE


_Graph = tuple[torch.cuda.CUDAGraph, torch.Tensor]


class GpuModel:
    """A transformers Llama, Qwen2 or Qwen3 over a cache of slots, on a GPU."""

    max_steps = MAX_STEPS
    grow_slots = 256

    def __init__(self, model: Any, num_slots: int, *, max_running: int) -> None:
        self._model = model
        self._backbone = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._heads = _heads(model)
        parameter = next(model.parameters())
        self.device: torch.device = parameter.device
        self._ops, self._num_processors = _kernels_for(self.device)
        shape = (model.config.num_hidden_layers, 2, self._heads.kv_heads, num_slots + 1)
        self.cache = torch.zeros(
            (*shape, self._heads.dim), dtype=parameter.dtype, device=self.device
        )
        self._padding_slot = num_slots
        """Padding rows write their keys and values here; no request owns it."""
        self._replies = _Buffers(self._heads, max_running, self.device)
        self._layout: ReplyLayout | None = None
        """The layout of the previous round."""
        self._graphs: dict[int, _Graph] = {}
        self._graph_pool: Any = None
        self._warm_up_stream: torch.cuda.Stream | None = None
        self._addresses = self._parameter_addresses()

    @torch.inference_mode()
    def run(
        self, pieces: Sequence[Piece], steps: int
    ) -> list[tuple[GenerationRequest, SampledTokens]]:
        """Compute the pieces, `steps` tokens of each reply; the tokens sampled for each request."""
        replying = {piece.request for piece in pieces if piece.is_reply}
        reading = [piece for piece in pieces if not piece.is_reply]
        layout = self._prepare(replying, steps) if replying else None
        prompts = self._upload(reading) if reading else None
        if layout:
            self._generate(layout, replying, steps)
        logits = self._read(prompts) if prompts else None
        sampled: list[tuple[GenerationRequest, SampledTokens]] = []
        if logits is not None and len(logits):
            finals = [piece.request for piece in reading if piece.is_last]
            sampled += zip(finals, self._sample(logits, finals), strict=True)
        if layout:
            tokens = self._replies.tokens[:steps, : len(layout.order)].t().tolist()
            logprobs = self._replies.logprobs[:steps, : len(layout.order)].t().tolist()
            for request, some, theirs in zip(layout.order, tokens, logprobs, strict=True):
                if request in replying:
                    sampled.append((request, SampledTokens(some, theirs)))
        return sampled

    def weights_changed(self) -> None:
        """Capture again if parameters were replaced; changes in place need nothing."""
        addresses = self._parameter_addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._forget_graphs()

    def free_memory(self) -> None:
        """Drop the captured graphs, and give memory that torch holds in reserve back."""
        self._layout = None  # it may not have reached the buffers
        self._forget_graphs()
        free_reserve(self.device)

    def close(self) -> None:
        """Free the cache, the buffers and the graphs; their shapes stay known."""
        self.cache = self.cache.to("meta")
        self._replies = _Buffers(self._heads, 1, torch.device("meta"))
        with suppress(torch.AcceleratorError):  # of a GPU that has failed
            self.free_memory()

    # --- prompts -------------------------------------------------------------------------------

    def _upload(self, pieces: Sequence[Piece]) -> _Prompts:
        layout = prompt_layout(pieces, tile_rows=PROMPT_TILE // self._heads.group)
        return _Prompts(*(_on(self.device, array) for array in layout))

    def _read(self, prompts: _Prompts) -> torch.Tensor:
        """The logits of the last tokens of completed prompts."""

        def attend(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self._ops.attend_prompts(
                self._heads, query, cache, prompts.positions, prompts.tiles, prompts.runs
            )
            return out

        hidden, delta = self._layers(prompts.ids, prompts.positions, prompts.slots, attend)
        rows = prompts.final_rows
        return self._logits(hidden[rows], delta[rows])

    def _sample(
        self, logits: torch.Tensor, requests: Sequence[GenerationRequest]
    ) -> list[SampledTokens]:
        if any(has_filter(request.sampling) for request in requests):
            states = [(r.sampling, r.seed, len(r.completion_ids)) for r in requests]
            sampled = sample(logits, states)
            return [
                SampledTokens([t], [p])
                for t, p in zip(sampled.tokens, sampled.logprobs, strict=True)
            ]
        tokens = torch.empty(len(requests), dtype=torch.int32, device=self.device)
        logprobs = torch.empty(len(requests), dtype=torch.float32, device=self.device)
        temperatures, chances = _sampling_of(requests, steps=1)
        self._ops.sample(
            logits, _on(self.device, temperatures), _on(self.device, chances[0]), tokens, logprobs
        )
        pairs = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [SampledTokens([token], [logprob]) for token, logprob in pairs]

    # --- replies -------------------------------------------------------------------------------

    def _prepare(self, requests: set[GenerationRequest], steps: int) -> ReplyLayout:
        """Fill the buffers of the replies. The layout of the previous round is reused if it serves."""
        if not (self._layout and self._layout.serves(requests)):
            self._layout = reply_layout(
                requests,
                tile_rows=REPLY_TILE // self._heads.group,
                num_processors=self._num_processors,
            )
            if not self._replies.holds(self._layout):
                self._forget_graphs()  # they hold the old buffers
                self._replies.grow(self._layout)
            self._replies.fill_layout(self._layout, _bucket(len(self._layout.order)))
        order = self._layout.order
        inputs = reply_inputs(order, requests, steps=steps, padding_slot=self._padding_slot)
        self._replies.fill_inputs(inputs, *_sampling_of(order, steps=steps), self._padding_slot)
        return self._layout

    def _generate(self, layout: ReplyLayout, requests: set[GenerationRequest], steps: int) -> None:
        rows = _bucket(len(layout.order))
        if self.device.type == "cuda":
            graph, logits = self._graphs.get(rows) or self._captured(rows)
            for _ in range(steps):
                graph.replay()
        else:
            for _ in range(steps - 1):
                self._reply_step(rows)
            logits = self._reply_step(rows)
        filtered = [
            (row, request)
            for row, request in enumerate(layout.order)
            if request in requests and has_filter(request.sampling)
        ]
        if filtered:
            assert steps == 1, "replies with top-k or top-p are sampled one token at a time"
            self._sample_filtered(logits, *zip(*filtered, strict=True))

    def _sample_filtered(
        self, logits: torch.Tensor, rows: Sequence[int], requests: Sequence[GenerationRequest]
    ) -> None:
        """Sample again for rows with top-k or top-p, which the kernel does not support."""
        index = torch.tensor(rows, device=self.device)
        sampled = self._sample(logits[index], requests)
        tokens = torch.tensor([some.tokens[0] for some in sampled], dtype=torch.int32)
        logprobs = torch.tensor([some.logprobs[0] for some in sampled])
        self._replies.tokens[0, index] = tokens.to(self.device)
        self._replies.logprobs[0, index] = logprobs.to(self.device)

    def _captured(self, rows: int) -> _Graph:
        """The graph of one step of `rows` rows, and its logits.

        The first passes compile kernels; their effects on the buffers are undone.
        """
        buffers = self._replies
        kept = (buffers.ids.clone(), buffers.positions.clone(), buffers.step.clone())
        # always the same one: torch holds memory in reserve for each
        stream = self._warm_up_stream = self._warm_up_stream or torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._reply_step(rows)
                buffers.restore(*kept)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        free_workspaces(self.device)  # so that the graph has one in its own pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            logits = self._reply_step(rows)
        free_workspaces(self.device)  # that one is freed with the pool
        self._graph_pool = self._graph_pool or graph.pool()
        self._graphs[rows] = (graph, logits)
        return graph, logits

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._graph_pool = None  # freed with the last graph that uses it

    def _reply_step(self, rows: int) -> torch.Tensor:
        """One token of `rows` rows, from buffers into buffers; returns the logits."""
        buffers = self._replies
        positions = buffers.positions[:rows]

        def attend(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self._ops.attend_replies(
                self._heads,
                query,
                cache,
                positions,
                buffers.items,
                buffers.counts,
                buffers.first_parts[: rows + 1],
                buffers.parts,
                self._num_processors,
            )
            return out

        slots = buffers.slots[:, :rows].index_select(0, buffers.step)[0]
        chances = buffers.chances[:, :rows].index_select(0, buffers.step)[0]
        logits = self._logits(*self._layers(buffers.ids[:rows], positions, slots, attend))
        tokens, logprobs = buffers.ids[:rows], buffers.logprob[:rows]
        self._ops.sample(logits, buffers.temperatures[:rows], chances, tokens, logprobs)
        buffers.tokens[:, :rows].index_copy_(0, buffers.step, tokens[None])
        buffers.logprobs[:, :rows].index_copy_(0, buffers.step, logprobs[None])
        positions += 1
        buffers.step += 1
        return logits

    # --- the model -----------------------------------------------------------------------------

    def _layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states after all layers, and the last residual, which the final norm adds."""
        ops, heads, backbone = self._ops, self._heads, self._backbone
        hidden = backbone.embed_tokens(ids)
        cosine, sine = backbone.rotary_emb(hidden[None], positions[None])
        cosine, sine = cosine[0].contiguous(), sine[0].contiguous()
        delta: torch.Tensor | None = None
        for number, layer in enumerate(backbone.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x = ops.add_norm(hidden, delta, layer.input_layernorm)
            query = attention.q_proj(x).view(-1, heads.heads, heads.dim)
            key = attention.k_proj(x).view(-1, heads.kv_heads, heads.dim)
            value = attention.v_proj(x).view(-1, heads.kv_heads, heads.dim)
            if hasattr(attention, "q_norm"):  # Qwen3
                query, key = attention.q_norm(query), attention.k_norm(key)
            ops.rotate_and_store(heads, query, key, value, cosine, sine, slots, self.cache[number])
            attended = attend(query, self.cache[number])
            x = ops.add_norm(
                hidden, attention.o_proj(attended.flatten(1)), layer.post_attention_layernorm
            )
            delta = mlp.down_proj(ops.gated(mlp.gate_proj(x), mlp.up_proj(x)))
        assert delta is not None
        return hidden, delta

    def _logits(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(self._ops.add_norm(hidden, delta, self._backbone.norm))
        return logits

    def _parameter_addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._model.parameters())


class _Prompts(NamedTuple):
    """A PromptLayout on the GPU."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    runs: torch.Tensor
    final_rows: torch.Tensor


assert _Prompts._fields == PromptLayout._fields


class _Buffers:
    """Inputs and outputs of the captured graphs, at fixed addresses."""

    def __init__(self, heads: Heads, max_rows: int, device: torch.device) -> None:
        self._heads = heads
        self._device = device
        rows = _bucket(max_rows)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.ids, self.positions = ints(rows), ints(rows)
        self.slots = ints(MAX_STEPS, rows)
        self.chances = torch.zeros((MAX_STEPS, rows), dtype=torch.float64, device=device)
        self.temperatures = torch.zeros(rows, device=device)
        self.first_parts = ints(rows + 1)
        self.counts = ints(3)
        self.items = ints(PARTS_PER_ROW * max(rows, 512), ITEM_FIELDS)
        self.parts = Parts(heads, PARTS_PER_ROW * max(rows, 512), device)
        self.tokens = ints(MAX_STEPS, rows)
        self.logprob = torch.zeros(rows, device=device)
        self.logprobs = torch.zeros((MAX_STEPS, rows), device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)

    def holds(self, layout: ReplyLayout) -> bool:
        num_parts = int(layout.first_parts[-1])
        return len(layout.items) <= len(self.items) and num_parts <= self.parts.num_parts

    def grow(self, layout: ReplyLayout) -> None:
        """Allocate more items and parts. Graphs that hold the old buffers must be captured again."""
        if len(layout.items) > len(self.items):
            shape = (2 * len(layout.items), ITEM_FIELDS)
            self.items = torch.zeros(shape, dtype=torch.int32, device=self._device)
        if (num_parts := int(layout.first_parts[-1])) > self.parts.num_parts:
            self.parts = Parts(self._heads, 2 * num_parts, self._device)

    def fill_layout(self, layout: ReplyLayout, rows: int) -> None:
        """Copy a layout in; rows beyond it have no parts."""
        count = len(layout.order)
        self.items[: len(layout.items)] = _on(self._device, layout.items)
        counts = np.array([0, layout.num_shared_items, len(layout.items)], dtype=np.int32)
        self.counts.copy_(_on(self._device, counts))
        self.first_parts[: count + 1] = _on(self._device, layout.first_parts)
        self.first_parts[count + 1 : rows + 1] = int(layout.first_parts[-1])

    def fill_inputs(
        self,
        inputs: ReplyInputs,
        temperatures: np.ndarray[Any, Any],
        chances: np.ndarray[Any, Any],
        padding_slot: int,
    ) -> None:
        """Copy the inputs of a round in; rows beyond them write to the padding slot."""
        steps, count = inputs.slots.shape
        rows = _bucket(count)
        self.ids[:count] = _on(self._device, inputs.ids)
        self.ids[count:rows] = 0
        self.positions[:count] = _on(self._device, inputs.positions)
        self.positions[count:rows] = -1
        self.slots[:steps, :count] = _on(self._device, inputs.slots)
        self.slots[:steps, count:rows] = padding_slot
        self.chances[:steps, :count] = _on(self._device, chances)
        self.temperatures[:count] = _on(self._device, temperatures)
        self.temperatures[count:rows] = 0
        self.step.zero_()

    def restore(self, ids: torch.Tensor, positions: torch.Tensor, step: torch.Tensor) -> None:
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.step.copy_(step)


def _sampling_of(
    requests: Sequence[GenerationRequest], *, steps: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Temperatures of requests, and their random numbers for the next steps (steps, requests)."""
    temperatures = np.array([temperature_of(r.sampling) for r in requests], dtype=np.float32)
    seeds = [request.seed for request in requests]
    starts = [len(request.completion_ids) for request in requests]
    return temperatures, uniforms(seeds, starts, steps)


def _bucket(rows: int) -> int:
    for size in BUCKETS:
        if rows <= size:
            return size
    return -(-rows // 512) * 512


def _on(device: torch.device, array: np.ndarray[Any, Any]) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _heads(model: Any) -> Heads:
    config = model.config
    return Heads(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=_head_dim(config),
        scale=model.get_decoder().layers[0].self_attn.scaling,
    )


def _kernels_for(device: torch.device) -> tuple[ModuleType, int]:
    """The kernels and the number of multiprocessors; plain torch where there is no GPU."""
    if device.type == "cuda":
        from memagent.engines.local.cuda import kernels

        count = torch.cuda.get_device_properties(device).multi_processor_count
        return kernels, count
    from memagent.engines.local.cuda import reference

    return reference, 1
