"""Where the time of an update goes, and what would shorten it: attention, kernels, compilation.

    python -m benchmarks.train_step_parts                      # one H200: about 4 minutes
    python -m benchmarks.train_step_parts --only attention
    python -m benchmarks.train_step_parts --smoke              # a tiny model on a CPU; no figures

The load is that of `benchmarks.train_step`.

    steps        whole updates over trees, for each attention, compiled or not
    kernels      what the GPU computes in one such update, the longest first
    attention    attention of one layer and one pack alone, forwards and backwards: FlexAttention with
                 several settings of its kernels, parts of flash kernels, and, as a bound, what kernels of
                 torch take for parts of equal size
    head         log-probabilities of a pack's targets alone, and their gradient
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_step import FULL, OBJECTIVE, SMOKE, SMOLLM2, TINY, Load, build, make_rows
from memagent.rl.update.attention import Attention, attend_in_parts, block_mask, plan_parts
from memagent.rl.update.packing import Pack, pack
from memagent.rl.update.policy import Policy, accumulate

KINDS = ("steps", "kernels", "attention", "head")
FLEX_VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "rows safe": {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True},
    "fwd 128x64, 4 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4},
    "fwd 128x128, 8 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8},
    "fwd 64x64, tma": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_USE_TMA": True},
    "bwd 64x64, 4 warps": {
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4, "bwd_num_stages": 3,
    },
    "bwd 64x128, 4 warps": {"bwd_num_warps": 4, "bwd_num_stages": 3},
    "bwd 64x128, 2 stages": {"bwd_num_warps": 8, "bwd_num_stages": 2},
    "bwd 128x128, 8 warps": {
        "bwd_BLOCK_M1": 128, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 128,
        "bwd_num_warps": 8, "bwd_num_stages": 2,
    },
    "bwd 32x128, 4 warps": {
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32,
        "bwd_num_warps": 4, "bwd_num_stages": 3,
    },
}  # fmt: skip
"""Settings of FlexAttention's kernels, by name."""


def best_ms(act: Callable[[], Any], device: str, repeats: int) -> float:
    """Best time in milliseconds, after a warm-up."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    act()
    times = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        act()
        wait()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


def report(name: str, act: Callable[[], str]) -> None:
    """Print a measurement, or why it failed: not every setting fits every kernel."""
    try:
        result = act()
    except Exception as error:
        result = f"cannot: {' '.join(str(error).split())[:100]}"
    print(f"{name:32} {result}", flush=True)


# --- whole steps ----------------------------------------------------------------------------------


def step_of(
    shape: dict[str, Any], device: str, packs: list[Pack], attention: Attention, compiled: bool
) -> Callable[[], None]:
    model = build(shape, device)
    policy = Policy(model, attention=attention, compiled=compiled)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        accumulate(policy, packs, OBJECTIVE)

    return step


def measure_steps(shape: dict[str, Any], device: str, packs: list[Pack], load: Load) -> None:
    for attention, compiled in ways(device):

        def act(attention: Attention = attention, compiled: bool = compiled) -> str:
            step = step_of(shape, device, packs, attention, compiled)
            return f"{best_ms(step, device, load.repeats):9.1f} ms"

        report(f"step, {attention}{', compiled' if compiled else ''}", act)


def ways(device: str) -> Iterator[tuple[Attention, bool]]:
    """Attention and compilation; FlexAttention has no gradient on a CPU."""
    for attention in get_args(Attention):
        if device == "cuda":
            yield attention, False
            yield attention, True
        elif attention == "parts":
            yield attention, False


def show_kernels(shape: dict[str, Any], device: str, packs: list[Pack]) -> None:
    """The longest kernels of a step, without and with compilation."""
    for attention, compiled in ways(device):
        step = step_of(shape, device, packs[:1], attention, compiled)
        step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step()
        rows = [row for row in found.key_averages() if row.self_device_time_total > 0]
        rows.sort(key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        print(f"kernels of one pack, {attention}, compiled={compiled}: {total / 1e3:.1f} ms")
        for row in rows[:9]:
            spent = row.self_device_time_total
            print(f"  {spent / 1e3:7.1f} ms {spent / total:4.0%} {row.count:5}x {row.key[:60]}")


# --- attention alone ------------------------------------------------------------------------------


def measure_attention(shape: dict[str, Any], device: str, one: Pack, load: Load) -> None:
    block = 128
    until = np.concatenate([one.until, np.arange(1, 1 + -len(one.until) % (2 * block))])
    until[len(one.until) :] += len(one.until)
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape["hidden_size"] // heads
    tensors = [
        torch.randn(1, len(until), some, dim, device=device, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for some in (heads, kv_heads, kv_heads)
    ]
    operations = 4 * heads * dim * float((until - np.arange(len(until))).sum())
    plan = plan_parts(until).to(device)

    def in_parts() -> torch.Tensor:
        by_token = [one.transpose(1, 2)[0] for one in tensors]
        return attend_in_parts(*by_token, plan, scale=dim**-0.5)

    report("attention, parts", lambda: both_ways(in_parts, tensors, operations, device))
    if device == "cuda":
        until_N = torch.from_numpy(until).to(device)
        for name, options in FLEX_VARIANTS.items():
            act = flex(tensors, until_N, block, options)
            report(f"flex, {name}", lambda act=act: both_ways(act, tensors, operations, device))
        act = flex(tensors, until_N, 2 * block, {})
        report("flex, blocks of 256", lambda: both_ways(act, tensors, operations, device))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            measure_bound(backend, load, heads, kv_heads, dim)
        for some in (kv_heads, heads):
            report(
                f"cudnn as a part, {some} kv heads",
                lambda some=some: cudnn_as_a_part(load, heads, some, dim),
            )


def flex(
    tensors: list[torch.Tensor], until_N: torch.Tensor, block: int, options: dict[str, Any]
) -> Callable[[], torch.Tensor]:
    """FlexAttention with settings of its kernels, compiled separately."""
    torch._dynamo.reset()
    mask = block_mask(until_N, block=block)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*tensors, block_mask=mask, enable_gqa=True, kernel_options=options)


def measure_bound(backend: SDPBackend, load: Load, heads: int, kv_heads: int, dim: int) -> None:
    """Sections over themselves and what follows over sections, all of one length."""
    num_trees = load.max_tokens // (load.section + load.group_size * load.suffix)
    for name, num_q, is_causal in (
        ("section", load.section, True),
        ("rest over section", load.group_size * load.suffix, False),
    ):
        tensors = [
            torch.randn(num_trees, length, some, dim, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for length, some in ((num_q, heads), (load.section, kv_heads), (load.section, kv_heads))
        ]
        pairs = num_trees * num_q * load.section / (2 if is_causal else 1)

        def act(tensors: Any = tensors, is_causal: bool = is_causal) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    *tensors, is_causal=is_causal, enable_gqa=True
                )

        operations = 4 * heads * dim * pairs
        report(
            f"{backend.name[:5].lower()}, {name}",
            lambda act=act, tensors=tensors, n=operations: both_ways(act, tensors, n, "cuda"),
        )


def cudnn_as_a_part(load: Load, heads: int, kv_heads: int, dim: int) -> str:
    """Whether a kernel of cuDNN can be one part of an attention: its share of the gradient, its time."""

    def some(num_heads: int, length: int) -> torch.Tensor:
        return torch.randn(
            1, length, num_heads, dim, device="cuda", dtype=torch.bfloat16
        ).transpose(1, 2)

    num_keys = load.section // 512 * 512
    query, grad = (some(heads, load.group_size * load.suffix) for _ in range(2))
    key, value = some(kv_heads, load.section), some(kv_heads, load.section)
    wanted = [one.detach().float().requires_grad_() for one in (query, key, value)]
    exact = F.scaled_dot_product_attention(*wanted, enable_gqa=True)
    expected = torch.autograd.grad(exact, wanted, grad.float())[1][:, :, :num_keys]
    spread = [part.repeat_interleave(heads // kv_heads, dim=1).float() for part in (key, value)]
    total = (query.float() @ spread[0].transpose(2, 3) * dim**-0.5).logsumexp(-1)
    first = key[:, :, :num_keys], value[:, :, :num_keys]
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention
    forward = best_ms(lambda: operation(query, *first, None, True), "cuda", 5)
    _, part_total, bounds_q, bounds_k, max_q, max_k, seed, offset, _ = operation(
        query, *first, None, True
    )

    def backward() -> Any:
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, *first, exact.detach().bfloat16(), total.reshape(part_total.shape),
            seed, offset, None, bounds_q, bounds_k, max_q, max_k, 0.0, False,
        )  # fmt: skip

    error = (backward()[1].float() - expected).norm() / expected.norm()
    spent = best_ms(backward, "cuda", 5)
    operations = 4 * heads * dim * query.shape[2] * num_keys / 1e9
    return (
        f"forward {operations / forward:4.0f} TFLOP/s  backward {2.5 * operations / spent:4.0f} "
        f"TFLOP/s  error {error:.1e}  sums as {tuple(part_total.shape)}"
    )


def both_ways(
    act: Callable[[], torch.Tensor], tensors: list[torch.Tensor], operations: float, device: str
) -> str:
    """Times of forward and backward, and operations a second."""
    forward = best_ms(act, device, 5)
    out = act()
    grad = torch.randn_like(out)
    backward = best_ms(
        lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True), device, 5
    )
    rates = [share * operations / spent / 1e9 for share, spent in ((1, forward), (2.5, backward))]
    return (
        f"forward {forward:6.2f} ms ({rates[0]:4.0f} TFLOP/s)  "
        f"backward {backward:6.2f} ms ({rates[1]:4.0f} TFLOP/s)"
    )


# --- the head -------------------------------------------------------------------------------------


def measure_head(shape: dict[str, Any], device: str, one: Pack) -> None:
    model = build(shape, device)
    hidden = torch.randn(
        one.num_tokens, shape["hidden_size"], device=device, dtype=torch.bfloat16
    ).requires_grad_()
    for compiled in (False, True) if device == "cuda" else (False,):
        policy = Policy(model, compiled=compiled)

        def act(policy: Policy = policy) -> str:
            def step() -> None:
                policy.scores_of(hidden, one).logprobs.sum().backward()

            return f"{best_ms(step, device, 3):9.2f} ms"

        report(f"head{', compiled' if compiled else ''}", act)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="what is measured")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("needs a GPU; --smoke runs a tiny one on the CPU")
    load, shape, device = (SMOKE, TINY, "cpu") if arguments.smoke else (FULL, SMOLLM2, "cuda")
    packs = pack(make_rows(load, shape["vocab_size"]), max_tokens=load.max_tokens)
    if "steps" in arguments.only:
        measure_steps(shape, device, packs, load)
    if "kernels" in arguments.only and device == "cuda":
        show_kernels(shape, device, packs)
    if "head" in arguments.only:
        measure_head(shape, device, packs[0])
    if "attention" in arguments.only:
        measure_attention(shape, device, packs[0], load)


if __name__ == "__main__":
    main()
