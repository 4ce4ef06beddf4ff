"""The engine in llama.cpp beside bare xllamacpp, and a build of llama.cpp where one is named: same file, prompts and threads.

    python -m benchmarks.engine_cpu --model qwen2.5-coder-1.5b                 # six minutes on two cores
    python -m benchmarks.engine_cpu --llama-bench ~/llama.cpp/build/bin/llama-bench

Each case is a prompt of random tokens and 64 new tokens, greedy. `ours` goes through `open_engine`, its process and its
port, all of it timed; `bare` through xllamacpp's server in this process with its own defaults, as llama.cpp times it
itself. The best of several is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import time
from statistics import median
from typing import Any, NamedTuple

NEW_TOKENS = 64
FIRST_TOKEN, LAST_TOKEN = 100, 49_000


class Rates(NamedTuple):
    """Tokens a second."""

    prompt: float
    reply: float


def open_server(path: str, parameters: dict[str, Any], *, threads: int) -> Any:
    """xllamacpp's server in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.verbosity = -1
    params.api_keys = ["benchmark"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    for name, value in parameters.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def timings_of(server: Any, prompt: list[int], num_new: int) -> dict[str, float]:
    """What llama.cpp says of one prompt."""
    body = {"prompt": prompt, "n_predict": num_new, "temperature": 0.0, "ignore_eos": True}
    reply = server.handle_completions({**body, "cache_prompt": False})
    timings: dict[str, float] = reply["timings"]
    return timings


async def compare(model: str, path: str, prompts: list[list[int]]) -> dict[str, list[Rates]]:
    """Rates of both engines. They take turns, so that other work on the machine slows both."""
    from memagent.engines.base import open_engine
    from memagent.engines.llamacpp.engine import LlamaEngine, num_cores
    from memagent.types import Sampling

    found: dict[str, list[Rates]] = {"ours": [], "bare": []}
    bare = open_server(path, {"n_ctx": len(prompts[0]) + NEW_TOKENS + 8}, threads=num_cores())
    async with open_engine(f"local:{model}", runtime="llama.cpp", adapter=None) as engine:
        assert isinstance(engine, LlamaEngine)
        for prompt in prompts:
            started = time.perf_counter()
            await engine.generate(prompt, Sampling(max_tokens=1))
            read = time.perf_counter() - started
            reply = await engine.generate(prompt, Sampling(max_tokens=NEW_TOKENS))
            replied = time.perf_counter() - started - read
            assert reply.usage is not None
            num_new = reply.usage.completion_tokens
            found["ours"].append(Rates(len(prompt) / read, num_new / replied))
            timings = timings_of(bare, prompt, NEW_TOKENS)
            rates = Rates(timings["prompt_per_second"], timings["predicted_per_second"])
            found["bare"].append(rates)
    return found


def llama_bench(program: str, path: str, num_tokens: int) -> str:
    command = [program, "-m", path, "-p", str(num_tokens), "-n", str(NEW_TOKENS), "-r", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="*", default=[500, 2000])
    parser.add_argument("--repeat", type=int, default=3, help="take the best of so many")
    parser.add_argument("--llama-bench", help="program of a build of llama.cpp")
    arguments = parser.parse_args()

    from memagent.engines import store

    path = str(store.locate(arguments.model))
    rng = random.Random(0)
    print(f"{'tokens':>6}  {'engine':6} {'prompt tok/s':>12} {'reply tok/s':>12}")
    for num_tokens in arguments.tokens:
        prompts = [
            [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]
            for _ in range(arguments.repeat)
        ]
        found = asyncio.run(compare(arguments.model, path, prompts))
        for name, rates in found.items():
            prompt, reply = (max(values) for values in zip(*rates, strict=True))
            print(f"{num_tokens:6}  {name:6} {prompt:12.1f} {reply:12.1f}", flush=True)
        shares = [ours.prompt / bare.prompt for ours, bare in zip(*found.values(), strict=True)]
        print(f"        prompt rates, ours to bare: {median(shares):.2f} in the middle")
        if arguments.llama_bench:
            print(llama_bench(arguments.llama_bench, path, num_tokens))


if __name__ == "__main__":
    main()
