"""A transformers causal model on a CPU: replies through a C kernel, prompts through torch.

    pieces ─┬─ single tokens ──▶ decode.c, all layers in one call ──▶ logits
            └─ pieces of prompts ──▶ torch, layer by layer        ──▶ logits

Prompts are large matrix products, where torch reaches the processor's peak. A single token is bound by
reading the weights and by per-operation overhead; there the kernel is faster. It reads the model's own
parameters or, if the model came from a GGUF file, the file's blocks of 4 to 8 bits, which hold the same
values in a sixth of the bytes.

Parameters are authoritative. After a weight update `weights_changed` compares each packed matrix with its
parameter: matrices that differ are dropped and read as float32 from then on; those that are equal, as all
are while only an adapter is trained, are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memagent.engines.local.cpu.native import (
    FLOAT32,
    Kernels,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    StepStruct,
)
from memagent.engines.local.model import CachedModel
from memagent.engines.local.scheduler import Piece, SlotRun

if TYPE_CHECKING:
    from memagent.engines.local.cpu.packing import Packed

PART_SLOTS = 256
"""Slots that one thread reads at a time: enough parts for all cores, each fits L2."""
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention with its log-sum-exp, which the public function does not return."""


class Unsupported(Exception):
    """The kernel cannot run this model; torch can."""


class CpuModel(CachedModel):
    """A transformers Llama, Qwen2 or Qwen3 over a cache of slots, on a CPU."""

    def __init__(
        self, model: Any, num_slots: int, library: Kernels | None, *, gguf: Path | None = None
    ) -> None:
        """`library` None: torch computes everything. `gguf`: the file the weights came from."""
        super().__init__(model, num_slots)
        self._model = model
        self._kernels = library
        self._packed = _read_packed(gguf) if gguf and library else {}
        self._native: _Native | None = None
        self._bind()

    @property
    def num_packed(self) -> int:
        """Matrices that are read in packed form."""
        return len(self._packed)

    def weights_changed(self) -> None:
        """Drop packed matrices whose parameters have changed, and look up all addresses again."""
        self._bind()

    def close(self) -> None:
        """Free the cache and the packed matrices."""
        self._native = None  # it holds the cache
        self._packed = {}
        super().close()

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Compute the pieces; the logits of the last token of each completed prompt."""
        replies = [piece for piece in pieces if piece.length == 1] if self._native else []
        if self._native is None or not replies:
            return super().step(pieces)
        prompts = [piece for piece in pieces if piece.length > 1]
        requests = [piece.request for piece in replies]
        logits = dict(zip(requests, self._native.step(replies), strict=True))
        if prompts:
            requests = [piece.request for piece in prompts if piece.is_last]
            logits |= dict(zip(requests, super().step(prompts), strict=True))
        finals = [logits[piece.request] for piece in pieces if piece.is_last]
        return torch.stack(finals) if finals else torch.empty(0, self._native.vocab_size)

    def _read_prompt(
        self, queries_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Causal attention in two parts without a mask: the preceding tokens, and the piece itself.

        Query heads of a KV head are folded into rows, so their keys are not repeated.
        """
        if start == 0 or queries_THD.dtype != torch.float32:
            return super()._read_prompt(queries_THD, keys, values, start)
        num_tokens, num_heads, dim = queries_THD.shape
        num_kv_heads = len(keys)
        queries = queries_THD.transpose(0, 1).reshape(1, num_kv_heads, -1, dim)
        before, weight_before = FLASH(queries, keys[None, :, :start], values[None, :, :start])
        within, weight_within = FLASH(
            queries.view(1, num_heads, num_tokens, dim),
            _repeated(keys[:, start:], num_heads),
            _repeated(values[:, start:], num_heads),
            is_causal=True,
        )
        before = before.reshape(num_heads, num_tokens, dim)
        weight_before = weight_before.reshape(num_heads, num_tokens)
        share = torch.sigmoid(weight_before - weight_within[0])  # of the softmax denominators
        return torch.lerp(within[0], before, share[..., None]).transpose(0, 1)

    def _bind(self) -> None:
        self._native = None
        if self._kernels is None:
            return
        try:
            self._native = _Native(self._kernels, self._model, self.cache, self._packed)
        except Unsupported:
            return
        self._packed = self._native.packed


def _repeated(heads_KTD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """KV heads, repeated for each of their query heads."""
    return heads_KTD.repeat_interleave(num_heads // len(heads_KTD), dim=0)[None]


def _read_packed(gguf: Path) -> dict[str, Packed]:
    from memagent.engines.local.cpu.packing import read_packed
    from memagent.engines.local.gguf_files import open_header

    return read_packed(gguf, open_header(gguf))


class _Native:
    """The kernel's view of the model: addresses of parameters, packed matrices and the cache."""

    def __init__(
        self, library: Kernels, model: Any, cache: torch.Tensor, packed: Mapping[str, Packed]
    ) -> None:
        self._library = library
        self._backbone = model.get_decoder()
        self._cache = cache
        self._kept: list[torch.Tensor] = []
        """Keeps tensors alive whose addresses the kernel holds."""
        self.packed: dict[str, Packed] = {}
        """Packed matrices that equal their parameters."""
        config = model.config
        head = model.get_output_embeddings()
        is_tied = head.weight is model.get_input_embeddings().weight
        # a file may hold a tied matrix twice; the head's copy was loaded
        is_embedding = is_tied and "lm_head.weight" not in packed
        head_name = "model.embed_tokens" if is_embedding else "lm_head"
        layers = [
            self._layer(f"model.layers.{number}", layer, packed)
            for number, layer in enumerate(self._backbone.layers)
        ]
        self._layers = (LayerStruct * len(layers))(*layers)
        attention = self._backbone.layers[0].self_attn
        self.vocab_size = int(head.weight.shape[0])
        self._model = ModelStruct(
            num_layers=len(layers),
            width=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=cache.shape[-1],
            num_slots=cache.shape[-2],
            epsilon=config.rms_norm_eps,
            scaling=attention.scaling,
            layers=self._layers,
            norm=self._address(self._backbone.norm.weight),
            head=self._matrix(head_name, head, packed),
            cache=self._address(cache),
        )
        if config.hidden_act != "silu":
            raise Unsupported

    def step(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """The logits of single tokens; writes their keys and values to the cache."""
        ids_R = torch.tensor([piece.request.tokens(piece.start, piece.end)[0] for piece in pieces])
        positions_R = torch.tensor([piece.start for piece in pieces])
        hidden_RD = self._backbone.embed_tokens(ids_R)
        cosine, sine = (part[0].contiguous() for part in self._rotation(hidden_RD, positions_R))
        runs_R = [piece.request.runs(piece.end) for piece in pieces]
        slots_R = torch.tensor([runs[-1].start + runs[-1].length - 1 for runs in runs_R])
        starts, lengths, firsts, readers = _parts(runs_R)
        logits_RV = torch.empty(len(pieces), self.vocab_size)
        self._library.decode_step(
            self._model,
            StepStruct(
                num_threads=torch.get_num_threads(),
                num_rows=len(pieces),
                hidden=hidden_RD.data_ptr(),
                cosine=cosine.data_ptr(),
                sine=sine.data_ptr(),
                slots=slots_R.data_ptr(),
                num_parts=len(starts),
                part_starts=starts.data_ptr(),
                part_lengths=lengths.data_ptr(),
                first_readers=firsts.data_ptr(),
                readers=readers.data_ptr(),
                logits=logits_RV.data_ptr(),
            ),
        )
        return logits_RV

    def _rotation(self, hidden_RD: torch.Tensor, positions_R: torch.Tensor) -> Any:
        return self._backbone.rotary_emb(hidden_RD[None], positions_R[None])

    def _layer(self, name: str, layer: Any, packed: Mapping[str, Packed]) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = hasattr(attention, "q_norm")  # Qwen3

        def matrix(part: str, module: Any) -> MatrixStruct:
            return self._matrix(f"{name}.{part}", module, packed)

        return LayerStruct(
            input_norm=self._address(layer.input_layernorm.weight),
            post_norm=self._address(layer.post_attention_layernorm.weight),
            query_norm=self._address(attention.q_norm.weight) if has_norms else None,
            key_norm=self._address(attention.k_norm.weight) if has_norms else None,
            query=matrix("self_attn.q_proj", attention.q_proj),
            key=matrix("self_attn.k_proj", attention.k_proj),
            value=matrix("self_attn.v_proj", attention.v_proj),
            output=matrix("self_attn.o_proj", attention.o_proj),
            gate=matrix("mlp.gate_proj", mlp.gate_proj),
            up=matrix("mlp.up_proj", mlp.up_proj),
            down=matrix("mlp.down_proj", mlp.down_proj),
        )

    def _matrix(self, name: str, module: Any, packed: Mapping[str, Packed]) -> MatrixStruct:
        base = getattr(module, "base_layer", module)
        if type(base) is not torch.nn.Linear:
            raise Unsupported
        address = self._address(base.weight)
        num_outputs, num_inputs = base.weight.shape
        matrix = MatrixStruct(
            kind=FLOAT32, num_outputs=num_outputs, num_inputs=num_inputs, weights=address
        )
        if stored := packed.get(f"{name}.weight"):
            candidate = stored.matrix()
            has_shape = (stored.num_outputs, stored.num_inputs) == (num_outputs, num_inputs)
            if has_shape and self._library.same_weights(
                candidate, address, torch.get_num_threads()
            ):
                self.packed[f"{name}.weight"] = stored
                matrix = candidate
        if base.bias is not None:
            matrix.bias = self._address(base.bias)
        if base is not module:
            self._add_lora(matrix, module)
        return matrix

    def _add_lora(self, matrix: MatrixStruct, module: Any) -> None:
        """The active adapter of a peft layer. Anything but plain LoRA is left to torch."""
        from peft.tuners.lora import Linear

        is_lora: bool = type(module) is Linear
        if not is_lora:
            raise Unsupported
        if module.disable_adapters:
            return
        names = [name for name in module.active_adapters if name in module.lora_A]
        is_plain = all(type(module.lora_B[name]) is torch.nn.Linear for name in names) and not any(
            module.lora_variant.get(name) or module.lora_bias.get(name) for name in names
        )
        if module.merged or len(names) > 1 or not is_plain:
            raise Unsupported
        for name in names:
            matrix.lora_a = self._address(module.lora_A[name].weight)
            matrix.lora_b = self._address(module.lora_B[name].weight)
            matrix.rank = module.lora_A[name].weight.shape[0]
            matrix.lora_scale = module.scaling[name]

    def _address(self, tensor: torch.Tensor) -> int:
        tensor = tensor.detach()
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.is_meta:
            raise Unsupported
        self._kept.append(tensor)
        return tensor.data_ptr()


def _parts(
    runs_R: Sequence[Sequence[SlotRun]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Spans of slots with the rows that read them: starts, lengths, first readers, readers.

    A run shared by several rows is one span, so its slots are read from memory once.
    """
    rows_of: dict[SlotRun, list[int]] = {}
    for row, runs in enumerate(runs_R):
        for run in runs:
            rows_of.setdefault(run, []).append(row)
    starts: list[int] = []
    lengths: list[int] = []
    firsts, readers = [0], []
    for run, rows in rows_of.items():
        for begin in range(0, run.length, PART_SLOTS):
            starts.append(run.start + begin)
            lengths.append(min(PART_SLOTS, run.length - begin))
            readers += rows
            firsts.append(len(readers))
    return torch.tensor(starts), torch.tensor(lengths), torch.tensor(firsts), torch.tensor(readers)
