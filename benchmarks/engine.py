"""The embedded engine on a GPU, against transformers' generate and against what the hardware allows.

    python -m benchmarks.engine                       # one H200: about 4 minutes
    python -m benchmarks.engine --documents 32        # a smaller load

The load is one step of memory rollouts: every document has a section of 5,000 tokens, and a group of
rollouts reads it, each with a memory of its own and a reply of 128 tokens. Numbers of tokens around
section and memory are those of the default prompts. The model has SmolLM2-135M's shape in bfloat16, with
random weights: the time does not depend on them. Replies end by length, so both sides write the same
number of tokens.

    total      prompts and replies, in tokens, over the time of the whole load
    prefill    computed tokens of prompts over their time; bound: a plain forward pass with SDPA
    decode     bytes that a step must read (weights, and each used slot once) over the step's time;
               bound: the bandwidth of a large copy
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memagent.engines.local.generator import Generator
from memagent.types import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
SECTION, GROUP, REPLY = 5000, 8, 128
BEFORE, AFTER = 100, 140
"""Tokens of the default read prompt in SmolLM2's chat template: before the section, and after it
without the memory."""
MEMORY = (32, 128)
"""Memories have a length between these."""
REPEAT = 2
"""Phases are measured so often, and the best counts."""
DECODE_BATCH_TOKENS = 400_000
"""Where replies alone are measured, prompts are read in a few large steps, so that no reply is far ahead
of the others when the last prompt has been read."""


def load(num_documents: int, *, is_shared: bool = True, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of all rollouts, group by group; without sharing they differ from the first token on."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(SHAPE["vocab_size"]) for _ in range(count)]

    prompts: list[tuple[int, ...]] = []
    for _ in range(num_documents):
        section = some(BEFORE + SECTION)
        for member in range(GROUP):
            first = [] if is_shared else [member]
            prompts.append((*first, *section, *some(rng.randint(*MEMORY) + AFTER)))
    return prompts


def timed(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - started


# --- what the hardware allows ---------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    spent = min(timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.numel() / spent


@torch.inference_mode()
def plain_prefill(model: Any) -> tuple[float, int]:
    """Tokens a second of transformers' own forward pass over sections, and the batch that is best."""
    best = (0.0, 0)
    for batch in (1, 4, 16):
        ids = torch.randint(SHAPE["vocab_size"], (batch, SECTION), device="cuda")
        model.model(ids, use_cache=False)
        spent = min(timed(lambda ids=ids: model.model(ids, use_cache=False)) for _ in range(3))
        best = max(best, (batch * SECTION / spent, batch))
    return best


@torch.inference_mode()
def transformers_generate(
    model: Any, prompts: list[tuple[int, ...]]
) -> Iterator[tuple[int, float]]:
    """Batch sizes, and tokens a second in prompts and replies."""
    for batch in (32, 128, 256, 512, 1024):
        if batch > len(prompts):
            return
        chosen = prompts[:batch]
        longest = max(map(len, chosen))
        ids = torch.zeros(batch, longest, dtype=torch.long)
        mask = torch.zeros(batch, longest, dtype=torch.long)
        for row, prompt in enumerate(chosen):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.cuda(), mask.cuda()

        def generate(count: int, ids: Any = ids, mask: Any = mask) -> None:
            model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0,
                max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
            )  # fmt: skip

        try:
            generate(2)
            spent = timed(lambda: generate(REPLY))
        except torch.OutOfMemoryError:
            return
        finally:
            torch.cuda.empty_cache()
        yield batch, (sum(map(len, chosen)) + batch * REPLY) / spent


# --- the engine -----------------------------------------------------------------------------------


def submit(generator: Generator, prompts: list[tuple[int, ...]], max_tokens: int) -> list[Any]:
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0)
    return [generator.submit(p, sampling, seed=number) for number, p in enumerate(prompts)]


def finish(generator: Generator) -> None:
    while generator.has_work:
        generator.step()


def measure(generator: Generator, prompts: list[tuple[int, ...]], model: Any) -> dict[str, float]:
    """One load: as a whole, its prompts alone, and its replies alone once all prompts are read."""
    result: dict[str, float] = {}
    submit(generator, prompts, 1)
    before = generator.num_computed_tokens
    result["prefill_s"] = timed(lambda: finish(generator))
    result["prefill_tokens"] = generator.num_computed_tokens - before
    generator.weights_changed()
    requests = submit(generator, prompts, REPLY)
    result["total_s"] = timed(lambda: finish(generator))
    result["total_tokens"] = sum(len(r.prompt_ids) + len(r.completion_ids) for r in requests)
    generator.weights_changed()
    usual = generator.scheduler.max_batch_tokens
    generator.scheduler.max_batch_tokens = DECODE_BATCH_TOKENS
    requests = submit(generator, prompts, REPLY)
    while any(not request.completion_ids for request in requests):
        generator.step()
    running = [request for request in requests if not request.finish_reason]
    num_before = sum(len(request.completion_ids) for request in requests)
    num_bytes = _bytes_to_read(running, model)
    result["decode_s"] = timed(lambda: finish(generator))
    result["decode_tokens"] = sum(len(r.completion_ids) for r in requests) - num_before
    result["decode_bytes"] = num_bytes
    generator.weights_changed()
    generator.scheduler.max_batch_tokens = usual
    return result


def measure_engine(
    model: Any, prompts: list[tuple[int, ...]], max_batch_tokens: int
) -> dict[str, float]:
    """The best of several measurements, once kernels are compiled and graphs captured."""
    num_documents = len(prompts) // GROUP
    num_slots = num_documents * (SECTION + BEFORE) + len(prompts) * (AFTER + MEMORY[1] + 256)
    generator = Generator(
        model, num_slots=num_slots, eos_ids=(), max_batch_tokens=max_batch_tokens,
        max_running=len(prompts),
    )  # fmt: skip
    submit(generator, prompts, 20)
    finish(generator)
    generator.weights_changed()
    gc.collect()
    gc.freeze()  # as `memagent serve` does: what stands now need not be looked through again
    results = [measure(generator, prompts, model) for _ in range(REPEAT)]
    apart = load(max(num_documents // 8, 1), is_shared=False)
    submit(generator, apart, 1)
    before = generator.num_computed_tokens
    apart_s = timed(lambda: finish(generator))
    best = {
        name: min(each[name] for each in results) if name.endswith("_s") else results[0][name]
        for name in results[0]
    }
    return {**best, "apart_rate": (generator.num_computed_tokens - before) / apart_s}


def _bytes_to_read(running: list[Any], model: Any) -> float:
    """What the steps to the end of these replies have to read: weights and used slots, once a step."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * 2
    total = 0.0
    for step in range(max(request.num_left for request in running)):
        alive = [request for request in running if request.num_left > step]
        sections = {id(path_top(request)) for request in alive}
        own = sum(len(request.prompt_ids) - SECTION - BEFORE for request in alive)
        replies = sum(len(request.completion_ids) + step for request in alive)
        tokens = len(sections) * (SECTION + BEFORE) + own + replies
        total += weights + tokens * per_token
    return total


def path_top(request: Any) -> Any:
    node = request.leaf
    while node.parent is not None and node.parent.tokens:
        node = node.parent
    return node


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int, default=131072)
    parser.add_argument("--without-generate", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    prompts = load(options.documents)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{options.documents} documents x {GROUP}, sections of {SECTION}, replies of {REPLY}")
    bandwidth = copy_bandwidth()
    sdpa, sdpa_batch = plain_prefill(model)
    result = measure_engine(model, prompts, options.max_batch_tokens)
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    best_generate = 0.0
    if not options.without_generate:
        for batch, rate in transformers_generate(model, prompts):
            print(f"transformers generate, batch {batch:4}: {rate / 1e3:8.1f}k tok/s", flush=True)
            best_generate = max(best_generate, rate)
    total = result["total_tokens"] / result["total_s"]
    prefill = result["prefill_tokens"] / result["prefill_s"]
    decode = result["decode_bytes"] / result["decode_s"]
    apart = result["apart_rate"]
    prompt_tokens = sum(map(len, prompts))
    print(f"\n{'':34}{'measured':>14}{'bound':>14}{'of bound':>10}")
    print(
        f"{'prefill, k tok/s computed':34}{prefill / 1e3:14.0f}{sdpa / 1e3:14.0f}{prefill / sdpa:10.0%}"
    )
    print(
        f"{'decode, TB/s':34}{decode / 1e12:14.2f}{bandwidth / 1e12:14.2f}{decode / bandwidth:10.0%}"
    )
    print(f"{'decode, k tok/s':34}{result['decode_tokens'] / result['decode_s'] / 1e3:14.0f}")
    print(
        f"{'prefill without sharing, k tok/s':34}{apart / 1e3:14.0f}{sdpa / 1e3:14.0f}{apart / sdpa:10.0%}"
    )
    print(f"(plain SDPA is best at batch {sdpa_batch})")
    print(
        f"prompts: {prompt_tokens:,} tokens, computed {result['prefill_tokens']:,.0f}: "
        f"{prompt_tokens / result['prefill_tokens']:.2f} times less by sharing"
    )
    print(
        f"whole load: {result['total_tokens']:,.0f} tokens in {result['total_s']:.2f} s = "
        f"{total / 1e3:,.0f}k tok/s (prompts alone {result['prefill_s']:.2f} s, "
        f"replies alone {result['decode_s']:.2f} s)"
    )
    if best_generate:
        print(
            f"transformers generate at its best {best_generate / 1e3:.1f}k tok/s: {total / best_generate:.1f}x"
        )
    print(f"peak GPU memory of ours {peak / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
