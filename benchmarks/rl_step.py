"""A whole step of reinforcement learning: rollouts and the update on them, ours and a plain loop.

    python -m benchmarks.rl_step                      # one H200: about 3 minutes
    python -m benchmarks.rl_step --smoke              # a tiny model on a CPU: seconds; no figures
    python -m benchmarks.rl_step --model MODEL --adapter FOLDER     # a reader's step: see `benchmarks.reader_step`

The load is that of `benchmarks.train_step`: 16 groups of 16 rollouts. A prompt has a section of 5,000
shared tokens and 150 tokens of the rollout; a reply always has 150 tokens. Both sides have SmolLM2-135M's shape in bfloat16 with the same random weights, and sample from
the whole distribution.

    ours      replies by the embedded engine, update over prefix trees, AdamW with float32 masters, and
              the engine drops its cache; one step after the other on one model
    theirs    replies by transformers' `generate`, in static batches of the best size; update over
              padded batches, logits of all tokens; AdamW on the bfloat16 weights

For each batch size of `generate` one batch is measured, and multiplied by the number of batches.
The time of both updates includes building rows from tokens. Our figure is the best of several whole steps
after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch

from benchmarks.reader_step import SIGNALS, SMALL, ReaderLoad, measure, report, timed
from benchmarks.train_step import (
    FULL,
    OBJECTIVE,
    SMOKE,
    SMOLLM2,
    TINY,
    Load,
    build,
    make_rows,
    padded_step,
)
from memagent.engines.local.generator import Generator
from memagent.rl.settings import ModelSettings, OptimSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.attention import Attention
from memagent.rl.update.loss import summary
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import pack
from memagent.rl.update.policy import Policy, accumulate
from memagent.rl.update.rows import TrainingRow, rows_of
from memagent.types import Sampling

BATCHES = (64, 128, 256)
"""Batch sizes to try with `generate`."""
LR = 1e-6


class Times(NamedTuple):
    """Seconds and peak memory of a step."""

    rollouts: float
    update: float
    peak_gib: float

    @property
    def total(self) -> float:
        """Of the whole step."""
        return self.rollouts + self.update


def prompts_of(rows: Sequence[TrainingRow]) -> list[tuple[int, ...]]:
    """The prompt of each row."""
    return [row.sample.ids[: row.sample.is_sampled.index(True)] for row in rows]


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def clear_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- ours -----------------------------------------------------------------------------------------


class Ours:
    """One model that samples and is trained."""

    def __init__(self, model: Any, load: Load, reply: int, how: dict[str, Any]) -> None:
        self._load, self._reply = load, reply
        num_rows = load.groups * load.group_size
        self._generator = Generator(
            model,
            num_slots=load.groups * load.section + num_rows * (load.suffix + 256),
            eos_ids=(),
            max_batch_tokens=131072,
            max_running=num_rows,
        )
        self._policy = Policy(model, **how)
        self._optimizer = Optimizer(model.named_parameters(), OptimSettings(lr=LR), num_steps=100)

    def step(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Times, dict[str, float]]:
        """One step; its times and metrics."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        rollouts_s, groups = timed(lambda: self._rollouts(prompts))
        update_s, metrics = timed(lambda: self._update(groups))
        return Times(rollouts_s, update_s, peak_gib()), metrics

    def _rollouts(self, prompts: Sequence[tuple[int, ...]]) -> list[Group]:
        sampling = Sampling(max_tokens=self._reply, temperature=1.0)
        requests = [self._generator.submit(p, sampling, seed=n) for n, p in enumerate(prompts)]
        while self._generator.has_work:
            self._generator.step()
        rollouts = []
        for number, request in enumerate(requests):
            given, sampled = len(request.prompt_ids), len(request.completion_ids)
            sample = Sample(
                ids=(*request.prompt_ids, *request.completion_ids),
                is_sampled=(*[False] * given, *[True] * sampled),
                logprobs=(*[0.0] * given, *request.logprobs),
            )
            group, index = divmod(number, self._load.group_size)
            rollouts.append(
                Rollout(task_id=str(group), index=index, samples=(sample,), reward=index % 2)
            )
        size = self._load.group_size
        return [
            Group(task_id=rollouts[first].task_id, rollouts=tuple(rollouts[first : first + size]))
            for first in range(0, len(rollouts), size)
        ]

    def _update(self, groups: Sequence[Group]) -> dict[str, float]:
        packs = pack(rows_of(groups, OBJECTIVE).rows, max_tokens=self._load.max_tokens)
        stats = accumulate(self._policy, packs, OBJECTIVE)
        self._optimizer.step()
        self._generator.weights_changed()
        return summary(stats)


# --- theirs ---------------------------------------------------------------------------------------


@torch.inference_mode()
def generate_seconds(
    model: Any, prompts: Sequence[tuple[int, ...]], batch: int, reply: int
) -> float:
    """Seconds of all replies by `generate` with one batch size, measured on one batch."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts[:batch], device=model.device)

    def generate(count: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
        )  # fmt: skip

    generate(2)
    return timed(lambda: generate(reply))[0] * len(prompts) / batch


def best_generate(model: Any, prompts: Sequence[tuple[int, ...]], reply: int) -> float:
    """Seconds of all replies with the best batch size that fits."""
    found = []
    for batch in [size for size in BATCHES if size <= len(prompts)] or [len(prompts)]:
        try:
            found.append(generate_seconds(model, prompts, batch, reply))
        except torch.OutOfMemoryError:
            break
        print(f"generate, batches of {batch:4}: {found[-1]:.2f} s for all", flush=True)
    return min(found)


def their_step(
    model: Any,
    rows: Sequence[TrainingRow],
    prompts: Sequence[tuple[int, ...]],
    load: Load,
    reply: int,
) -> Times:
    """A step of the plain loop, trained on other random replies of the same length."""
    clear_memory()
    rollouts_s = best_generate(model, prompts, reply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        padded_step(model, rows, load)[0]()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    update()
    return Times(rollouts_s, timed(update)[0], peak_gib())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        help="compile layers of our update; the default on a GPU",
    )
    parser.add_argument("--attention", choices=get_args(Attention), help="of our update")
    parser.add_argument("--model", help="measure a step of this model and an adapter instead")
    parser.add_argument("--adapter", help="its folder; a new one of rank 16 when not given")
    parser.add_argument(
        "--signal",
        type=float,
        nargs="+",
        default=SIGNALS,
        help="shares of groups whose rewards differ, each with an update of its own",
    )
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("needs a GPU; --smoke runs a tiny one on the CPU")
    load, shape, device = (SMOKE, TINY, "cpu") if arguments.smoke else (FULL, SMOLLM2, "cuda")
    compiled = not arguments.smoke if arguments.compiled is None else arguments.compiled
    if arguments.model:
        rank = None if arguments.adapter else 16
        model = ModelSettings(source=arguments.model, adapter=arguments.adapter, lora_rank=rank)
        reader = SMALL if arguments.smoke else ReaderLoad()
        measured = measure(model, reader, signals=arguments.signal, compiled=compiled)
        print(json.dumps(report(measured, reader)))
        return
    how = {"compiled": compiled, "attention": arguments.attention}
    rows = make_rows(load, shape["vocab_size"])
    prompts = prompts_of(rows)
    reply = len(rows[0].sample.ids) - len(prompts[0])
    ours = Ours(build(shape, device), load, reply, how)
    ours.step(prompts)
    steps = [ours.step(prompts) for _ in range(load.repeats)]
    best, metrics = min(steps, key=lambda step: step[0].total)
    assert metrics["num_tokens"] == len(prompts) * reply
    del ours
    clear_memory()
    theirs = their_step(build(shape, device), rows, prompts, load, reply)
    for name, times in (("ours", best), ("theirs", theirs)):
        print(
            f"{name:8} {times.total:7.2f} s   rollouts {times.rollouts:6.2f} s   "
            f"update {times.update:6.2f} s   peak {times.peak_gib:.1f} GiB"
        )
    print(
        f"{theirs.total / best.total:.1f}x; mismatch of engine and trainer {metrics['mismatch_kl']:.1e}"
    )
    result = {"load": load._asdict(), "ours": best._asdict(), "theirs": theirs._asdict()}
    print(json.dumps({**result, **how, "metrics": metrics}))


if __name__ == "__main__":
    main()
