"""Everything a run needs, opened and checked before its first rollout.

    async with open_setup(config, run_dir) as setup:
        setup.backend.facts.num_trained

Cheap checks come first: a misspelt agent, or a reward that cannot grade, is reported before a model is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from memagent.data.tasks.lengths import length_tokenizer
from memagent.engines.base import BaseEngine
from memagent.files import replacing_folder
from memagent.plugins import is_file_spec
from memagent.rl.agents.api import Agent, open_agent
from memagent.rl.agents.command import is_command
from memagent.rl.agents.rewards import Reward, check_reward, open_reward, with_bonus
from memagent.rl.agents.session import RunSampling
from memagent.rl.backend import LocalBackend, TrainerBackend
from memagent.rl.rollouts.collect import check_agent, check_engine
from memagent.rl.rollouts.tasks import (
    VALIDATION_SEED,
    OpenSource,
    TaskStream,
    check_apart,
    check_ids,
    first_examples,
    open_sources,
)
from memagent.rl.settings import TrainConfig
from memagent.rl.update.learner import Learner
from memagent.rl.validation import Validation
from memagent.rl.warmstart.lessons import (
    LESSON_SEED,
    FileLessons,
    Lessons,
    TaskLessons,
    demonstrations_for,
    texts_for,
)
from memagent.rl.weights.checkpoint import disk_errors, latest_checkpoint
from memagent.rl.weights.models import (
    Trained,
    build_scratch,
    open_merged,
    open_model,
    open_rollout_engine,
)
from memagent.rl.weights.sync import WeightSync, open_sync

SCRATCH = "scratch_model"
"""Folder of a run for its model with random weights."""
SCRATCH_EXAMPLES = 200
"""Examples that its tokenizer is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a run needs."""

    config: TrainConfig
    agent: Agent
    reward: Reward
    backend: TrainerBackend
    """The processes that train."""
    engine: BaseEngine
    sync: WeightSync
    sources: Sequence[OpenSource]
    stream: Callable[[int], TaskStream]
    """The tasks, from a position on."""
    lessons: Lessons | None
    """Batches of the warm start."""
    validation: Validation | None


@asynccontextmanager
async def open_setup(
    config: TrainConfig, run_dir: Path, *, on_note: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Setup]:
    """Open everything; errors of the config are raised here. What has to be waited for is noted."""
    agent = open_agent(config.agent.name, config.agent.settings)
    reward = open_reward(config.agent.reward)
    opening: dict[str, Any] = {"tokenizer": config.model.source, "paths": config.sources}
    sources = open_sources(config.tasks, seed=config.seed, **opening)
    firsts = check_ids(sources)
    for example in firsts:
        await check_reward(reward, example)
    validation = _validation(config, agent, reward, sources, opening)
    source = _source(config, run_dir, sources)
    async with _open_processes(config, run_dir, source, on_note) as processes:
        backend, trained = processes.backend, processes.trained
        lessons = _lessons(config, trained, opening)
        async with processes.open_engine() as (engine, sync):
            await check_engine(engine)
            if (is_file_spec(config.agent.name) or is_command(config.agent.name)) and firsts:
                rollout = config.rollout
                sampling = RunSampling(
                    temperature=rollout.temperature, max_tokens=rollout.max_tokens
                )
                await check_agent(
                    agent, firsts[0], engine, sampling=sampling, seconds=rollout.seconds
                )
            yield Setup(
                config=config,
                agent=agent,
                reward=with_bonus(reward, config.agent.bonus),
                backend=backend,
                engine=engine,
                sync=sync,
                sources=sources,
                stream=lambda position: TaskStream(sources, seed=config.seed, position=position),
                lessons=lessons,
                validation=validation,
            )


OpenEngine = Callable[[], AbstractAsyncContextManager[tuple[BaseEngine, WeightSync]]]


class _Processes(NamedTuple):
    """Where a run computes."""

    backend: TrainerBackend
    trained: Trained
    """The model in this process: the trained one, or a copy with its tokenizer."""
    open_engine: OpenEngine
    """The engine that samples replies, and how it gets new weights."""


@asynccontextmanager
async def _open_processes(
    config: TrainConfig, run_dir: Path, source: str, on_note: Callable[[str], None]
) -> AsyncIterator[_Processes]:
    if config.cluster is None:
        trained = open_model(config.model, source, seed=config.seed)
        backend = LocalBackend(Learner(config, trained), in_thread=config.rollout.asynchronous)
        yield _Processes(backend, trained, partial(_open_engine, config, run_dir, trained))
        return
    from memagent.rl.distributed import opening

    async with opening.open_distributed(config, run_dir, source, on_note) as ranks:
        # GPUs are for the cluster; with replicas only the tokenizer is used here, and weights take no memory
        device = "meta" if config.has_replicas else "cpu"
        settings = config.model.model_copy(update={"device": device})
        trained = open_model(settings, source, seed=config.seed)
        if config.has_replicas:
            open_engine: OpenEngine = partial(
                opening.open_cluster_engine, config, ranks, source, trained, on_note
            )
        else:
            copy = partial(opening.DriverCopy, ranks, trained)
            open_engine = partial(_open_engine, config, run_dir, trained, copy)
        yield _Processes(ranks, trained, open_engine)


@asynccontextmanager
async def _open_engine(
    config: TrainConfig,
    run_dir: Path,
    trained: Trained,
    through: Callable[[WeightSync], WeightSync] = lambda sync: sync,
) -> AsyncIterator[tuple[BaseEngine, WeightSync]]:
    """An engine in this process or behind an endpoint; it gets weights from `trained`, `through` another step."""
    merged = open_merged(config.rollout, trained)
    async with open_rollout_engine(config.rollout, trained, merged=merged) as engine:
        sync = open_sync(
            config.rollout,
            engine,
            trained,
            run_dir,
            merged=merged,
            num_versions=config.num_versions,
        )
        yield engine, through(sync)


def _source(config: TrainConfig, run_dir: Path, sources: Sequence[OpenSource]) -> str:
    """The model to load; one with random weights is built first."""
    if config.model.source is not None:
        return config.model.source
    assert config.model.scratch is not None
    folder = run_dir / SCRATCH
    if latest_checkpoint(run_dir) is None:  # else the run has started with it
        examples = TaskStream(sources, seed=config.seed).draw(SCRATCH_EXAMPLES)
        agent = config.agent
        texts = [text for one in examples for text in texts_for(agent.name, agent.settings, one)]
        shutil.rmtree(
            folder, ignore_errors=True
        )  # left by a run that was killed before its first step
        with disk_errors(folder), replacing_folder(folder) as part:
            build_scratch(config.model.scratch, texts, part, seed=config.seed)
    return str(folder)


def _validation(
    config: TrainConfig,
    agent: Agent,
    reward: Reward,
    training: Sequence[OpenSource],
    opening: dict[str, Any],
) -> Validation | None:
    settings = config.validation
    if settings is None:
        return None
    sources = open_sources(settings.tasks, seed=config.seed + VALIDATION_SEED, **opening)
    check_apart(training, sources)
    return Validation(
        settings,
        agent,
        reward,
        first_examples(sources, settings.num),
        seed=config.seed,
        max_tokens=config.rollout.max_tokens,
        driver=config.rollout.driver,
    )


def _lessons(config: TrainConfig, trained: Trained, opening: dict[str, Any]) -> Lessons | None:
    settings = config.warm_start
    if settings is None:
        return None
    common: dict[str, Any] = {
        "model": trained.loaded,
        "max_tokens": config.update.max_tokens,
        "seed": config.seed + LESSON_SEED,
    }
    if settings.files:
        return FileLessons(settings, **common)
    sources = open_sources(
        settings.tasks or config.tasks, seed=config.seed + LESSON_SEED, **opening
    )
    tokenizer = length_tokenizer(str(trained.loaded.tokenizer_folder))
    show = demonstrations_for(
        config.agent.name, config.agent.settings, tokenizer=tokenizer, replies=settings.replies
    )
    lessons = TaskLessons(settings, sources, show, **common)
    lessons.check_sources()
    return lessons
