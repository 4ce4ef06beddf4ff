"""One update: rollouts that share sections as prefix trees, as packed rows, and in a plain padded loop.

    python -m benchmarks.train_step                   # one H200: about 3 minutes
    python -m benchmarks.train_step --lora            # a 1.5B model with an adapter, groups of 8, replies of 256
    python -m benchmarks.train_step --smoke           # a tiny model on a CPU: seconds; checks, no figures

The load is one optimizer step of memory rollouts: 16 groups of 16, each with a section of 5,000 tokens
that the group shares and 300 tokens of its own (a memory, a request, and a reply that carries loss).
The model has SmolLM2-135M's shape, with `--lora` Qwen2.5-1.5B's, in bfloat16 with random weights: the time does
not depend on them.

    tree      ours; the section is computed once per group
    rows      ours; every row in full, packed one after the other, same attention, same head
    padded    a plain transformers loop: batches of rows, padded, SDPA, logits of all tokens

All three compute the same loss. On a few groups each gradient is compared with that of the padded loop in
float32 with the same weights; ours may not be much further from it than the padded loop in bfloat16 is.
Times are the best of several steps after a warm-up, with the zeroing of gradients and without the
optimizer. Beside each way stands how many times fewer tokens the tree computes, and which share of that its time shows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.attention import Attention
from memagent.rl.update.packing import pack
from memagent.rl.update.policy import Policy, accumulate
from memagent.rl.update.rows import TrainingRow, rows_of

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
TINY: dict[str, Any] = {
    **SMOLLM2, "vocab_size": 500, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6,
}  # fmt: skip
OBJECTIVE = ObjectiveSettings()
WAYS = ("tree", "rows", "padded")
MAX_ERROR = 1.5
"""Tolerated error of our gradient, relative to that of the padded loop in bfloat16."""
LORA_RANK = 16


class Load(NamedTuple):
    """The load of a benchmark."""

    groups: int
    group_size: int
    section: int
    suffix: int
    """Tokens of a row's own: memory and request, and the reply."""
    reply: int
    max_tokens: int
    """Of a packed sequence."""
    padded_rows: int
    """Rows of a batch of the plain loop."""
    repeats: int


FULL = Load(16, 16, 5000, 300, 150, max_tokens=40_000, padded_rows=8, repeats=3)
LORA = Load(16, 8, 5000, 256, 256, max_tokens=32_000, padded_rows=2, repeats=3)
SMOKE = Load(2, 4, 100, 12, 6, max_tokens=300, padded_rows=2, repeats=1)


def make_rows(load: Load, vocabulary: int, *, seed: int = 0) -> tuple[TrainingRow, ...]:
    """Rows of one step. Behaviour is uniform, as a model with random weights nearly is."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    uniform = -torch.tensor(float(vocabulary)).log().item()
    groups = []
    for number in range(load.groups):
        section = some(load.section)
        rollouts = []
        for index in range(load.group_size):
            given = [*section, *some(load.suffix - load.reply)]
            sample = Sample(
                ids=(*given, *some(load.reply)),
                is_sampled=(*[False] * len(given), *[True] * load.reply),
                logprobs=(*[0.0] * len(given), *[uniform] * load.reply),
            )
            rollouts.append(
                Rollout(
                    task_id=str(number), index=index, samples=(sample,), reward=float(index % 2)
                )
            )
        groups.append(Group(task_id=str(number), rollouts=tuple(rollouts)))
    return rows_of(groups, OBJECTIVE).rows


def packed_step(
    model: Any, rows: Sequence[TrainingRow], load: Load, *, share: bool, how: dict[str, Any]
) -> tuple[Callable[[], None], int]:
    """An update over packs, and the tokens that it computes."""
    policy = Policy(model, **how)
    packs = pack(rows, max_tokens=load.max_tokens, share=share)
    num_tokens = sum(one.num_tokens for one in packs)
    return lambda: void(accumulate(policy, packs, OBJECTIVE)), num_tokens


def padded_step(
    model: Any, rows: Sequence[TrainingRow], load: Load
) -> tuple[Callable[[], None], int]:
    """An update as a plain transformers loop does it."""
    device = next(model.parameters()).device
    batches = []
    for first in range(0, len(rows), load.padded_rows):
        some = rows[first : first + load.padded_rows]
        longest = max(len(row.sample.ids) for row in some)

        def padded(values: Sequence[Sequence[float]], longest: int = longest) -> torch.Tensor:
            filled = [[*one, *[0] * (longest - len(one))] for one in values]
            return torch.tensor(filled, device=device)

        batches.append(
            (
                padded([row.sample.ids for row in some]),
                padded([[1] * len(row.sample.ids) for row in some]),
                padded([row.sample.is_sampled for row in some])[:, 1:].bool(),
                padded([row.sample.logprobs for row in some])[:, 1:],
                torch.tensor([[row.advantage] for row in some], device=device),
                torch.tensor([[row.weight] for row in some], device=device),
            )
        )

    def step() -> None:
        for ids, attention, mask, behaviour, advantages, weights in batches:
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            logprobs = logits[:, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]
            ratio = (chosen - behaviour).exp()
            low, high = 1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high
            gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
            floor = (OBJECTIVE.dual_clip or 0.0) * advantages
            gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
            torch.where(mask, -weights * gain, 0.0).sum().backward()

    return step, sum(batch[0].numel() for batch in batches)


def void(value: object) -> None:
    """Free everything but the gradient."""


def step_of(
    name: str, model: Any, rows: Sequence[TrainingRow], load: Load, how: dict[str, Any]
) -> tuple[Callable[[], None], int]:
    """An update in one of the ways, and the tokens that it computes."""
    if name == "padded":
        return padded_step(model, rows, load)
    return packed_step(model, rows, load, share=name == "tree", how=how)


def gradient_errors(
    shape: dict[str, Any], device: str, load: Load, how: dict[str, Any], *, lora: bool
) -> dict[str, float]:
    """How far each way's gradient in bfloat16 is from that in float32, on a small load."""
    rows = make_rows(load, shape["vocab_size"])
    exact_model = build(shape, device, lora=lora).float()
    padded_step(exact_model, rows, load)[0]()
    exact = gradient_of(exact_model)
    del exact_model
    errors = {}
    for name in WAYS:
        model = build(shape, device, lora=lora)
        step_of(name, model, rows, load, how)[0]()
        errors[name] = ((gradient_of(model) - exact).norm() / exact.norm()).item()
    return errors


def gradient_of(model: Any) -> torch.Tensor:
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.cat([one.grad.detach().float().flatten().cpu() for one in trained])


def measured(model: Any, step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Seconds and peak memory of a step, after a warm-up."""
    on_gpu = next(model.parameters()).is_cuda
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        model.zero_grad(set_to_none=True)
        step()
        wait()
        times.append(time.perf_counter() - started)
    model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {"seconds": min(times), "peak_gib": peak}


def build(shape: dict[str, Any], device: str, *, lora: bool = False) -> Any:
    """The model in bfloat16, every time with the same weights; with `lora` only an adapter is trained."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape)
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(
            r=LORA_RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, settings)
    return model.to(device=device, dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--lora", action="store_true", help="train an adapter of a 1.5B model, groups of 8"
    )
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="compile layers of tree and rows; the default on a GPU",
    )
    parser.add_argument("--attention", choices=get_args(Attention), help="of tree and rows")
    parser.add_argument("--groups", type=int, help="groups of the step")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("needs a GPU; --smoke runs a tiny one on the CPU")
    lora = arguments.lora
    load, shape, device = (LORA, QWEN, "cuda") if lora else (FULL, SMOLLM2, "cuda")
    if arguments.smoke:
        load, shape, device = SMOKE, TINY, "cpu"
    if arguments.groups:
        load = load._replace(groups=arguments.groups)
    compiled = not arguments.smoke if arguments.compiled is None else arguments.compiled
    how = {"compiled": compiled, "attention": arguments.attention}
    few = load._replace(groups=2, group_size=4, padded_rows=2)
    errors = gradient_errors(shape, device, few, how, lora=lora)
    for name, error in errors.items():
        print(f"{name:8} gradient in bfloat16 is {error:.2e} from that in float32")
    rows = make_rows(load, shape["vocab_size"])
    results: dict[str, dict[str, float]] = {}
    for name in WAYS:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        model = build(shape, device, lora=lora)
        step, num_tokens = step_of(name, model, rows, load, how)
        results[name] = {"tokens": num_tokens, **measured(model, step, load.repeats)}
        del model, step
        result, tree = results[name], results["tree"]
        gained, possible = (result[key] / tree[key] for key in ("seconds", "tokens"))
        result["share_of_possible"] = gained / possible
        print(
            f"{name:8} {result['seconds'] * 1e3:9.1f} ms  {num_tokens:8d} tokens  "
            f"{gained:5.2f}x the tree's time, {possible:5.2f}x its tokens: {gained / possible:4.0%}  "
            f"peak {result['peak_gib']:.1f} GiB",
            flush=True,
        )
    result = {"load": load._asdict(), "lora": lora, **how, "errors": errors, **results}
    print(json.dumps(result))
    for name, error in errors.items():
        assert error <= MAX_ERROR * errors["padded"], f"{name} computes another gradient"


if __name__ == "__main__":
    main()
