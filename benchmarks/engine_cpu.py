"""The engine in llama.cpp beside bare xllamacpp, and a build of llama.cpp where one is named: same file, prompts and threads.

    python -m benchmarks.engine_cpu --model qwen2.5-coder-1.5b                 # six minutes on two cores
    python -m benchmarks.engine_cpu --llama-bench ~/llama.cpp/build/bin/llama-bench

Each case is a prompt of random tokens and 64 new tokens, greedy, as llama.cpp times them itself. `ours` goes through
`open_engine`, its process and its port, `bare` through xllamacpp's server in this process with its own defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import time
from typing import Any

NEW_TOKENS = 64
FIRST_TOKEN, LAST_TOKEN = 100, 49_000


def open_server(path: str, parameters: dict[str, Any]) -> Any:
    """xllamacpp's server in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.verbosity = -1
    params.api_keys = ["benchmark"]
    if t := __import__("os").environ.get("T"):
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(t)
    for name, value in parameters.items():
        setattr(params, name, value)
    return xllamacpp.Server(params)


def timings_of(server: Any, prompt: list[int], num_new: int) -> dict[str, float]:
    """What llama.cpp says of one prompt."""
    body = {"prompt": prompt, "n_predict": num_new, "temperature": 0.0, "ignore_eos": True}
    reply = server.handle_completions({**body, "cache_prompt": False})
    timings: dict[str, float] = reply["timings"]
    return timings


async def ours_of(model: str, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Prompt and reply rates of the engine, calls, port and parsing included."""
    from memagent.engines.base import open_engine
    from memagent.engines.llamacpp.engine import LlamaEngine
    from memagent.types import Sampling

    found = []
    async with open_engine(f"local:{model}", runtime="llama.cpp", adapter=None) as engine:
        assert isinstance(engine, LlamaEngine)
        for prompt in prompts:
            started = time.perf_counter()
            await engine.generate(prompt, Sampling(max_tokens=1))
            read = time.perf_counter() - started
            reply = await engine.generate(prompt, Sampling(max_tokens=NEW_TOKENS))
            assert reply.usage is not None
            again = time.perf_counter() - started - read
            found.append((len(prompt) / read, reply.usage.completion_tokens / again))
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
        found = asyncio.run(ours_of(arguments.model, prompts))
        _report(num_tokens, "ours", found)
        server = open_server(path, {"n_ctx": num_tokens + NEW_TOKENS + 8})
        timings = [timings_of(server, prompt, NEW_TOKENS) for prompt in prompts]
        del server
        rates = [(one["prompt_per_second"], one["predicted_per_second"]) for one in timings]
        _report(num_tokens, "bare", rates)
        if arguments.llama_bench:
            print(llama_bench(arguments.llama_bench, path, num_tokens))


def _report(num_tokens: int, name: str, rates: list[tuple[float, float]]) -> None:
    """The best of repeated measurements: others may use the machine, nothing makes it faster."""
    prompt, reply = (max(values) for values in zip(*rates, strict=True))
    print(f"{num_tokens:6}  {name:6} {prompt:12.1f} {reply:12.1f}", flush=True)


if __name__ == "__main__":
    main()
