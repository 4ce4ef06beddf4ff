"""The embedded engine on a CPU beside llama.cpp and transformers: same file, prompts and threads.

    memagent models pull smollm2-135m
    python3 -m venv .venv-llama && .venv-llama/bin/pip install -r benchmarks/requirements-llama.txt
    python -m benchmarks.engine_cpu                             # a quarter of an hour on two cores
    python -m benchmarks.engine_cpu --tokens 1000 --repeat 3    # six minutes

Each case is a batch of different prompts of random tokens and 64 new tokens, greedy. Every engine runs
in a process of its own, one after the other. `total` is from the first prompt token to the last new one;
`decode` counts new tokens once the prompts are read. llama.cpp takes the settings that were the fastest
of LLAMA_SETTINGS on prompts of TRIAL_TOKENS; a batch goes through it as sequences of one context.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LLAMA_PYTHON = Path(__file__).parents[1] / ".venv-llama" / "bin" / "python"
NEW_TOKENS = 64
TRIAL_TOKENS = 1000
FIRST_TOKEN, LAST_TOKEN = 100, 49_000
LLAMA_SETTINGS: tuple[dict[str, Any], ...] = (
    {"n_ubatch": 512, "flash": False, "unified": False},
    {"n_ubatch": 512, "flash": True, "unified": False},
    {"n_ubatch": 512, "flash": True, "unified": True},
    {"n_ubatch": 128, "flash": True, "unified": False},
    {"n_ubatch": 2048, "flash": True, "unified": False},
)


def prompts_of(case: dict[str, Any]) -> list[list[int]]:
    """Different prompts, the same for every engine."""
    rng = random.Random(case["tokens"])
    return [
        [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(case["tokens"])]
        for _ in range(case["batch"])
    ]


# --- engines: each yields one result per case -----------------------------------------------------


def run_ours(job: dict[str, Any]) -> Iterable[dict[str, Any]]:
    from dataclasses import replace

    import torch

    from memagent.config import LocalConfig
    from memagent.engines.local.engine import LocalEngine
    from memagent.engines.local.loading import load
    from memagent.types import Sampling

    torch.set_num_threads(job["threads"])
    loaded = replace(load(job["model"]), eos_ids=())
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0)
    for case in job["cases"]:
        prompts = prompts_of(case)

        async def both_times(prompts: list[list[int]] = prompts) -> dict[str, Any]:
            engine = LocalEngine(loaded, LocalConfig.parse(job["settings"]))
            await engine.generate(prompts[0][::-1][:64], sampling)  # starts the thread
            started = time.perf_counter()
            replies = await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))
            total = time.perf_counter() - started
            started = time.perf_counter()  # again: prompts are known now, so this is decoding alone
            await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))
            decode = time.perf_counter() - started
            await engine.aclose()
            ids = [list(reply.completion_ids or ()) for reply in replies]
            return {"total": total, "decode": len(prompts) * NEW_TOKENS / decode, "ids": ids}

        yield asyncio.run(both_times())


def run_transformers(job: dict[str, Any]) -> Iterable[dict[str, Any]]:
    import torch

    from memagent.engines.local.loading import load

    torch.set_num_threads(job["threads"])
    model = load(job["model"]).model
    for case in job["cases"]:
        ids = torch.tensor(prompts_of(case))
        times: list[float] = []

        def note(input_ids: Any, scores: Any, times: list[float] = times, **_: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            stopping_criteria=[note],
        )
        new = len(ids) * (NEW_TOKENS - 1)
        yield {
            "total": times[-1] - started,
            "decode": new / (times[-1] - times[0]),
            "ids": out[:, ids.shape[1] :].tolist(),
        }


def run_llama(job: dict[str, Any]) -> Iterable[dict[str, Any]]:
    import llama_cpp as api
    import numpy as np

    api.llama_backend_init()
    silent = api.llama_log_callback(lambda *_: None)  # kept: the library holds only its address
    api.llama_log_set(silent, None)
    settings = job["settings"]
    model = api.llama_model_load_from_file(job["path"].encode(), api.llama_model_default_params())
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    for case in job["cases"]:
        prompts = prompts_of(case)
        params = api.llama_context_default_params()
        room = case["tokens"] + NEW_TOKENS
        params.n_ctx = -(-room // 256) * 256 * len(prompts)
        params.n_batch = params.n_ubatch = settings["n_ubatch"]
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = job["threads"]
        params.flash_attn_type = 1 if settings["flash"] else 0
        params.kv_unified = settings["unified"]
        context = api.llama_init_from_model(model, params)
        batch = api.llama_batch_init(settings["n_ubatch"], 0, 1)

        def compute(
            rows: list[tuple[int, int, int, bool]], batch: Any = batch, context: Any = context
        ) -> None:
            """Rows of (token, position, sequence, whether its logits are needed)."""
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, is_needed) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_needed
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if api.llama_decode(context, batch):
                raise SystemExit("llama.cpp could not decode")

        def best(row: int, context: Any = context) -> int:
            logits = api.llama_get_logits_ith(context, row)
            return int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())

        started = time.perf_counter()
        ids: list[list[int]] = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
            for begin in range(0, len(rows), settings["n_ubatch"]):
                piece = rows[begin : begin + settings["n_ubatch"]]
                compute(piece)
            ids.append([best(len(piece) - 1)])
        read = time.perf_counter()
        for step in range(NEW_TOKENS - 1):
            compute([(i[-1], case["tokens"] + step, s, True) for s, i in enumerate(ids)])
            for row, known in enumerate(ids):
                known.append(best(row))
        ended = time.perf_counter()
        api.llama_batch_free(batch)
        api.llama_free(context)
        yield {
            "total": ended - started,
            "decode": len(prompts) * (NEW_TOKENS - 1) / (ended - read),
            "ids": ids,
        }


ENGINES: dict[str, Callable[[dict[str, Any]], Iterable[dict[str, Any]]]] = {
    "memagent": run_ours,
    "llama.cpp": run_llama,
    "transformers": run_transformers,
}


# --- the parent -------------------------------------------------------------------------------------


def measure(engine: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of an engine in a process of its own."""
    python = str(LLAMA_PYTHON) if engine == "llama.cpp" else sys.executable
    command = [python, str(Path(__file__).resolve()), "--worker", engine]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def best_llama_settings(job: dict[str, Any], batch: int) -> dict[str, Any]:
    case = {"tokens": TRIAL_TOKENS, "batch": batch}

    def total(settings: dict[str, Any]) -> float:
        return float(
            measure("llama.cpp", {**job, "settings": settings, "cases": [case]})[0]["total"]
        )

    return min(LLAMA_SETTINGS, key=total)


def same_share(ours: list[list[int]], theirs: list[list[int]]) -> str:
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{equal}/{len(ours)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1000, 5000])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="take the best of so many")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for result in ENGINES[arguments.worker](json.load(sys.stdin)):
            print(json.dumps(result), flush=True)
        return

    from memagent.engines import store

    path = store.find(arguments.model)
    if path is None or not path.is_file():
        raise SystemExit(f"{arguments.model} is no GGUF file here; memagent models pull it first")
    job = {
        "model": arguments.model,
        "path": str(path),
        "threads": arguments.threads,
        "settings": {},
    }
    print(f"{path.name}, {arguments.threads} threads, {NEW_TOKENS} new tokens\n")
    head = f"{'batch':>5} {'tokens':>6}  {'engine':13} {'total s':>8} {'decode tok/s':>12}"
    print(f"{head} {'our total':>10} {'our decode':>11}  same tokens as ours")
    for batch in arguments.batch:
        settings = best_llama_settings(job, batch)
        for tokens in arguments.tokens:
            cases = [{"tokens": tokens, "batch": batch}]
            found: dict[str, dict[str, Any]] = {}
            for _ in range(arguments.repeat):
                for engine in ENGINES:
                    given = settings if engine == "llama.cpp" else {}
                    result = measure(engine, {**job, "cases": cases, "settings": given})[0]
                    found[engine] = better(result, found.get(engine))
            for engine, result in found.items():
                report(batch, tokens, engine, result, found["memagent"])
        print(f"      llama.cpp with {settings}")


def better(result: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    """The best of repeated measurements: others may use the machine, nothing makes it faster."""
    if known is None:
        return result
    return {
        "total": min(result["total"], known["total"]),
        "decode": max(result["decode"], known["decode"]),
        "ids": result["ids"],
    }


def report(
    batch: int, tokens: int, engine: str, result: dict[str, Any], ours: dict[str, Any]
) -> None:
    total, decode = result["total"], result["decode"]
    print(
        f"{batch:5} {tokens:6}  {engine:13} {total:8.2f} {decode:12.1f} "
        f"{total / ours['total']:9.2f}x {ours['decode'] / decode:10.2f}x  "
        f"{same_share(ours['ids'], result['ids'])}",
        flush=True,
    )


if __name__ == "__main__":
    main()
