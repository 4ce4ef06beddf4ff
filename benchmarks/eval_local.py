"""How fast an evaluation can feed a model in its own process: prompts per second, with no time for the model.

    memagent eval's runner ──▶ reader ──▶ LocalEngine ──▶ its thread ──▶ a model that only takes time
          └── texts composed in worker processes

The model replies `No change.` to every section. Like a GPU it takes `--rate` prompt tokens a second, which it spends
asleep, after `--ops` small operations for each step, which compete for the interpreter as kernel launches do.
What is missing to the rate is the time in which a GPU would have waited for Python.

    python -m benchmarks.eval_local --hotpotqa FOLDER --tokens 112k --num 32
    python -m benchmarks.eval_local --hotpotqa FOLDER --tokens 3.5m --num 32 --rate 190000
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from memagent.config import LocalConfig
from memagent.data.tasks.lengths import parse_length
from memagent.engines import store
from memagent.engines.local import gguf_files
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import LoadedModel
from memagent.engines.local.sampling import SampledTokens
from memagent.engines.local.scheduler import GenerationRequest, Piece
from memagent.eval.setup import evaluate
from memagent.eval.suites import Suite

REPLY = "No change."
SETTINGS = {
    "window": 4096,
    "chunk_tokens": 2048,
    "memory_tokens": 512,
    "answer_tokens": 64,
    "prompts": "add",
    "temperature": 0.0,
}


class IdleModel:
    """Takes the time of a GPU and replies with the same tokens to every prompt."""

    max_steps = 8
    grow_slots = 256
    cache = torch.zeros(0)

    def __init__(self, reply: Sequence[int], *, rate: float, ops: int) -> None:
        self.seconds = 0.0
        self.num_tokens = 0
        self._reply = list(reply)
        self._rate = rate
        self._ops = ops
        self._number = torch.zeros(16)

    def run(
        self, pieces: Sequence[Piece], steps: int
    ) -> list[tuple[GenerationRequest, SampledTokens]]:
        """The tokens of the reply, after the time that the pieces take."""
        clock = time.perf_counter()
        for _ in range(self._ops):
            self._number.add_(1.0)
        num_tokens = sum(piece.length for piece in pieces)
        wanted = num_tokens / self._rate
        time.sleep(max(0.0, wanted - (time.perf_counter() - clock)))
        self.seconds += wanted
        self.num_tokens += num_tokens
        return [
            (piece.request, self._next(piece, steps if piece.is_reply else 1))
            for piece in pieces
            if piece.is_last
        ]

    def _next(self, piece: Piece, count: int) -> SampledTokens:
        done = len(piece.request.completion_ids)
        tokens = self._reply[done : done + count]
        return SampledTokens(tokens, [0.0] * len(tokens))

    def weights_changed(self) -> None:
        """It has none."""

    def free_memory(self) -> None:
        """It has none."""

    def close(self) -> None:
        """Nothing to free."""


def open_idle(name: str, *, rate: float, ops: int) -> tuple[LocalEngine, IdleModel]:
    """An engine with the tokenizer of a pulled GGUF model, and the model in it."""
    path = store.find(name)
    if path is None or not path.is_file():
        raise SystemExit(f"run `memagent models pull {name}` first")
    folder = gguf_files.open_header(path).folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, clean_up_tokenization_spaces=False)
    eos: Any = tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=32768,
    )
    loaded = LoadedModel(
        model=Qwen2ForCausalLM(config),
        tokenizer=tokenizer,
        name=name,
        window=32768,
        eos_ids=(eos,),
        tokenizer_folder=folder,
    )
    settings = LocalConfig(max_running=1024, max_batch_tokens=32768, cache_gb=0.25)
    engine = LocalEngine(loaded, settings)
    model = IdleModel([*loaded.vocabulary.encode(REPLY), eos], rate=rate, ops=ops)
    engine._generator._model = model
    return engine, model


async def measure(arguments: argparse.Namespace) -> None:
    """One evaluation; prints its rates."""
    engine, model = open_idle(arguments.model, rate=arguments.rate, ops=arguments.ops)
    suite = Suite.parse(
        {
            "seed": 7,
            "num": arguments.num,
            "length_tokenizer": arguments.model,
            "agent": SETTINGS,
            "sources": {
                "hotpotqa-dev": str(arguments.hotpotqa / "dev.jsonl.gz"),
                "hotpotqa-paragraphs": str(arguments.hotpotqa / "paragraphs.jsonl.gz"),
            },
            "tasks": [
                {
                    "tasks": ["hotpotqa"],
                    "tokens": [parse_length(arguments.tokens)],
                    "settings": {"split": "dev"},
                }
            ],
        }
    )
    clock, cpu = time.perf_counter(), time.process_time()
    async with engine:
        records = await evaluate(
            suite,
            engine,
            run_dir=arguments.run_dir,
            concurrency=arguments.concurrency,
        )
    seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    calls = sum(record.num_calls for record in records)
    prompts = sum(record.prompt_tokens for record in records)
    print(f"{len(records)} items, {calls:,} calls, {prompts:,} prompt tokens, {seconds:.1f} s")
    print(
        f"{calls / seconds:.1f} calls/s, {prompts / seconds:,.0f} prompt tokens/s of {arguments.rate:,.0f}"
    )
    print(f"{1000 * cpu / calls:.2f} ms of this process's CPU time for each call")
    print(f"the model worked {100 * model.seconds / seconds:.1f} % of the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hotpotqa", type=Path, required=True, help="folder with HotpotQA's files")
    parser.add_argument("--tokens", default="112k")
    parser.add_argument("--num", type=int, default=32)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument(
        "--rate", type=float, default=190_000, help="prompt tokens of the model per second"
    )
    parser.add_argument(
        "--ops", type=int, default=400, help="small operations in each of its steps"
    )
    parser.add_argument("--concurrency", type=int, default=None)
    parser.add_argument("--run-dir", type=Path, default=None)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
