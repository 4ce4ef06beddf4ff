"""One step of rollouts in the embedded engine and in vLLM, and what its decoding waits for.

    python -m benchmarks.decoding                       # one H200: about 3 minutes
    python -m benchmarks.decoding --against vllm        # the same loads in vLLM as well, which has to be installed
    python -m benchmarks.decoding --model 1.5b --top-p 0.95
    python -m benchmarks.decoding --smoke               # a tiny model on a CPU: no figures

A load is texts x group: each text has a section of 5,000 tokens, which a group of rollouts reads, each with a memory of its own
and a reply of 128 tokens at temperature 1. Weights are random and bfloat16; the time does not depend on them. Printed are seconds
of the step and of its prompts alone; milliseconds of a token step by the clock while every row replies, of them busy on the
GPU, of them in attention; and the share of the clock in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from memagent.engines.local.generator import Generator
from memagent.types import Sampling

BEFORE, AFTER, MEMORY = 100, 140, (32, 128)
"""Tokens of the default prompt before the section, and after it without the memory; the length of memories."""
ROUNDS = 3
"""Steps that are measured, and rounds of decoding under the profiler; of steps the best counts."""
DECODE_BATCH_TOKENS = 400_000
"""Where replies alone are measured, prompts are read in a few large steps, so that no reply is far ahead of the others."""
BATCH_TOKENS = (16_384, 32_768, 65_536)
"""Of a step of vLLM; the best counts."""


class Load(NamedTuple):
    """Rollouts of one step."""

    texts: int
    group: int
    section: int = 5000
    reply: int = 128

    @property
    def name(self) -> str:
        return f"{self.texts} x {self.group}"

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Prompts group by group."""
        rng = random.Random(0)

        def some(count: int) -> list[int]:
            return [rng.randrange(3, vocabulary) for _ in range(count)]

        prompts: list[tuple[int, ...]] = []
        for _ in range(self.texts):
            section = some(BEFORE + self.section)
            prompts += [(*section, *some(rng.randint(*MEMORY) + AFTER)) for _ in range(self.group)]
        return prompts


class Shape(NamedTuple):
    """A model without weights, and its loads."""

    config: Any
    model: Callable[[Any], Any]
    loads: Sequence[Load]


SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True,
)  # fmt: skip
QWEN = Qwen2Config(
    vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, max_position_embeddings=8192, rope_theta=1e6, tie_word_embeddings=True,
)  # fmt: skip
TINY = LlamaConfig(
    vocab_size=500, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=2048,
)  # fmt: skip
SHAPES = {
    "1.5b": Shape(QWEN, Qwen2ForCausalLM, (Load(16, 8), Load(64, 8), Load(32, 16), Load(128, 1))),
    "135m": Shape(SMOLLM2, LlamaForCausalLM, (Load(64, 8), Load(256, 8), Load(128, 1))),
    "tiny": Shape(TINY, LlamaForCausalLM, (Load(2, 3, section=60, reply=24),)),
}


class Measured(NamedTuple):
    """Of one load; milliseconds are those of a token of every row."""

    seconds: float
    prompt_seconds: float
    clock_ms: float
    gpu_ms: float
    attention_ms: float


def timed(act: Callable[[], Any]) -> float:
    """Seconds that something takes, the GPU's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    act()
    wait()
    return time.perf_counter() - started


class Ours:
    """The embedded engine's generator with one load at a time."""

    def __init__(self, model: Any, load: Load, top_p: float | None) -> None:
        self._prompts = load.prompts(model.config.vocab_size)
        self._load, self._top_p = load, top_p
        each = AFTER + MEMORY[1] + 2 * load.reply + 128
        shared = load.texts * (BEFORE + load.section)
        self._generator = Generator(
            model, num_slots=shared + len(self._prompts) * each, eos_ids=(), max_batch_tokens=32_768,
            max_running=len(self._prompts),
        )  # fmt: skip

    def measure(self) -> Measured:
        """Kernels are compiled and graphs captured first."""
        self._finish(self._submit(2 * 8))
        prompts = min(timed(lambda: self._finish(self._submit(1))) for _ in range(ROUNDS))
        whole = min(
            timed(lambda: self._finish(self._submit(self._load.reply))) for _ in range(ROUNDS)
        )
        clock, gpu, attention = self._decoding()
        return Measured(whole, prompts, clock, gpu, attention)

    def _submit(self, max_tokens: int) -> list[Any]:
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, top_p=self._top_p)
        return [self._generator.submit(p, sampling, seed=n) for n, p in enumerate(self._prompts)]

    def _finish(self, requests: Sequence[Any]) -> None:
        while self._generator.has_work:
            self._generator.step()
        assert all(len(r.completion_ids) == r.sampling.max_tokens for r in requests)
        self._generator.weights_changed()  # the next load computes its prompts again

    def _decoding(self) -> tuple[float, float, float]:
        """Milliseconds of a token step: by the clock, of kernels, of kernels of attention."""
        scheduler = self._generator.scheduler
        usual, scheduler.max_batch_tokens = scheduler.max_batch_tokens, DECODE_BATCH_TOKENS
        requests = self._submit(self._load.reply)
        while any(not request.completion_ids for request in requests):
            self._generator.step()
        scheduler.max_batch_tokens = usual

        def steps() -> int:
            return max(len(request.completion_ids) for request in requests)

        before = steps()
        seconds = timed(lambda: [self._generator.step() for _ in range(ROUNDS)])
        clock = 1000 * seconds / max(steps() - before, 1)
        gpu = attention = 0.0
        if torch.cuda.is_available():
            before = steps()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                timed(lambda: [self._generator.step() for _ in range(ROUNDS)])
            count = max(steps() - before, 1)
            for event in profile.key_averages():
                spent = event.self_device_time_total / 1000 / count
                gpu += spent
                attention += spent if event.key.startswith(("_attend_replies", "_merge")) else 0
        self._finish(requests)
        return clock, gpu, attention


def ours(shape: Shape, top_p: float | None) -> list[Measured]:
    """All loads in the embedded engine."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = shape.model(shape.config).to(device, dtype).eval()
    found = []
    for load in shape.loads:
        found.append(Ours(model, load, top_p).measure())
        gc.collect()
        torch.cuda.empty_cache()
    return found


def vllm_seconds(shape: Shape, top_p: float | None) -> list[float]:
    """All loads in vLLM, in this process."""
    from vllm import LLM, SamplingParams

    best = [float("inf")] * len(shape.loads)
    with tempfile.TemporaryDirectory() as folder:
        shape.config.architectures = [shape.model.__name__]
        shape.config.save_pretrained(folder)
        for batch_tokens in BATCH_TOKENS:
            engine = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=True,
                max_num_batched_tokens=batch_tokens, max_num_seqs=2048, max_model_len=8192,
                gpu_memory_utilization=0.8, disable_log_stats=True,
            )  # fmt: skip
            for number, load in enumerate(shape.loads):
                prompts = [
                    {"prompt_token_ids": [*ids]} for ids in load.prompts(shape.config.vocab_size)
                ]
                sampling = SamplingParams(
                    max_tokens=load.reply, ignore_eos=True, temperature=1.0, top_p=top_p or 1.0, logprobs=0,
                    detokenize=False,
                )  # fmt: skip
                for _ in range(ROUNDS):
                    engine.reset_prefix_cache()
                    started = time.perf_counter()
                    engine.generate(prompts, sampling, use_tqdm=False)
                    best[number] = min(best[number], time.perf_counter() - started)
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    return best


def in_vllm(name: str, top_p: float | None) -> list[float]:
    """All loads in vLLM, in a process of its own: the GPU's memory is free when it has ended."""
    command = [sys.executable, "-m", "benchmarks.decoding", "--vllm-child", "--model", name]
    command += [] if top_p is None else ["--top-p", str(top_p)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(seconds) for seconds in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=[*SHAPES], action="append", help="by default 1.5b and 135m"
    )
    parser.add_argument("--against", choices=["vllm"], help="measure this engine too")
    parser.add_argument("--top-p", type=float, help="sample so, instead of from all tokens")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--vllm-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.model or ["1.5b", "135m"]
    if arguments.smoke:
        models = ["tiny"]
    elif not torch.cuda.is_available():
        parser.error("needs a GPU; --smoke runs a tiny model on the CPU")
    if arguments.vllm_child:
        print(json.dumps(vllm_seconds(SHAPES[models[0]], arguments.top_p)))
        return
    print(
        "model  load       step s  prompts s  ms: clock   GPU  attention  waiting     vLLM s   ratio"
    )
    for name in models:
        shape = SHAPES[name]
        found = ours(shape, arguments.top_p)
        theirs = in_vllm(name, arguments.top_p) if arguments.against else [None] * len(found)
        for load, one, other in zip(shape.loads, found, theirs, strict=True):
            waiting = 1 - one.gpu_ms / one.clock_ms if one.gpu_ms else 0
            row = f"{name:5}  {load.name:8}  {one.seconds:7.2f}  {one.prompt_seconds:9.2f}  {one.clock_ms:9.2f}"
            row += f"  {one.gpu_ms:4.1f}  {one.attention_ms:9.1f}  {waiting:7.0%}"
            print(
                row + (f"  {other:9.2f}  {other / one.seconds:6.2f}" if other else ""), flush=True
            )


if __name__ == "__main__":
    main()
