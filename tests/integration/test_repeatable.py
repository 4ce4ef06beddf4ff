"""Lockstep rollouts of the embedded engine repeat bit for bit, whatever takes how long."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.rl import validation
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.agents.rewards import open_reward
from memagent.rl.settings import ValidationSettings
from memagent.types import Completion, Sampling
from tests.support.repeated_rollouts import (
    AGENTS,
    Pauses,
    examples,
    fingerprints,
    plain,
    reading,
    rollouts,
)
from tests.support.sizes import sized
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=1024
    )


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        yield engine


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as pool:
        yield pool


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("agent", AGENTS)
async def test_the_same_collection_gives_the_same_bits(
    engine: LocalEngine, pool: WorkerPool, agent: str
) -> None:
    first = await rollouts(engine, agent, pool, jitter=None)
    assert not [rollout.error for group in first for rollout in group.rollouts if rollout.error]
    assert len({str(rollout) for rollout in plain(first)}) == 9
    for jitter in range(3):
        await engine.complete(
            [{"role": "user", "content": "Something else."}], Sampling(max_tokens=3)
        )
        again = await rollouts(engine, agent, pool, jitter=jitter)
        assert plain(again) == plain(first)


async def test_several_sections_are_read_and_prefixes_shared(
    engine: LocalEngine, pool: WorkerPool
) -> None:
    groups = await rollouts(engine, "reading", pool, jitter=None)
    assert min(len(rollout.samples) for group in groups for rollout in group.rollouts) >= 3
    assert engine._generator.num_computed_tokens < 0.8 * sum(
        len(row.ids) for group in groups for rollout in group.rollouts for row in rollout.samples
    )


class Listening(LocalEngine):
    """Keeps what it was asked and the log-probabilities of what it said."""

    def __init__(self, folder: Path) -> None:
        super().__init__(load(str(folder)), LocalConfig(cache_gb=0.01))
        self.said: list[tuple[Sequence[int], list[str]]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await super().generate(prompt_ids, sampling)
        self.said.append((prompt_ids, [logprob.hex() for logprob in completion.logprobs or ()]))
        return completion


async def test_validation_in_lockstep_repeats_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More examples than are under way at once, on an engine that has said other things before."""
    monkeypatch.setattr(validation, "CONCURRENCY", 4)
    settings = ValidationSettings.parse({"tasks": [{"tasks": ["ruler/vt"]}]})
    heard, metrics = [], []
    async with Listening(folder) as engine:
        for jitter in (None, 1, 2):
            agent = reading(Pauses(jitter))
            validating = validation.Validation(
                settings,
                agent,
                open_reward("recall"),
                examples(6),
                seed=2,
                max_tokens=20,
                driver="lockstep",
            )
            engine.said = []
            metrics.append((await validating.run(engine)).metrics)
            heard.append(sorted(engine.said))
    assert metrics[0]["num_failed"] == 0
    assert heard[0] == heard[1] == heard[2]
    assert metrics[0] == metrics[1] == metrics[2]
    assert len(heard[0]) > 20


@pytest.mark.parametrize("threads", range(sized(2, 1), 3))
async def test_another_process_gives_the_same_bits(folder: Path, threads: int) -> None:
    with threads_of_torch(threads):
        here = await fingerprints(str(folder), jitter=1)
    command = [sys.executable, "-m", "tests.support.repeated_rollouts", str(folder)]
    command += ["--threads", str(threads), "--jitter", "2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == here
    assert len(set(here)) == len(AGENTS)
