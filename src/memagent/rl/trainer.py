"""The training loop: a warm start, then steps of rollouts and updates, with validation and checkpoints.

    tasks ─▶ rollouts (engine on the same weights) ─▶ groups ─▶ rows ─▶ packs ─▶ updates ─▶ the next step
                  │                                                                │
                  └─ RUN/rollouts, until the step is in a checkpoint               ├─ RUN/metrics.jsonl
                                                                                   ├─ RUN/validation
                                                                                   └─ RUN/checkpoints

    async with open_training(read_config(Path("my_run.toml")), Path("runs/mine")) as trainer:
        await trainer.train()
    async with resume_training(Path("runs/mine"), changes=["steps=200"]) as trainer:
        await trainer.train()

A run that was killed resumes from its newest checkpoint: metrics after it are cut off, finished rollouts
are reused, and the rest is repeated. With the `lockstep` driver on a CPU the metrics are then those of an
uninterrupted run, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from memagent.cluster import open_cluster
from memagent.config import check_numbers
from memagent.errors import ClusterError, EngineError, RunError
from memagent.foreign import foreign_file
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.backend import RanksLost
from memagent.rl.resume import remember_named, resumed_config, stored_values
from memagent.rl.rollouts.collect import RolloutStats
from memagent.rl.rollouts.rollout_log import FOLDER as ROLLOUTS
from memagent.rl.rollouts.rollout_log import forget_rollouts, readable_group
from memagent.rl.rollouts.step import StepRollouts, open_gatherer
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.settings import TrainConfig
from memagent.rl.setup import SCRATCH, Setup, open_setup
from memagent.rl.update.advantages import group_advantages, has_signal
from memagent.rl.update.agreement import check_agreement, check_longer
from memagent.rl.update.metrics import group_metrics, staleness_metrics, task_metrics
from memagent.rl.warmstart.lessons import ahead, sft_rows
from memagent.rl.weights.checkpoint import (
    best_of_run,
    disk_errors,
    export,
    latest_checkpoint,
    new_checkpoint,
    random_state,
    read_state,
    restore_random_state,
)
from memagent.rl.weights.sync import SYNC
from memagent.run_files import check_tree, write_file
from memagent.runs import Run, read_manifest
from memagent.tracking import METRICS, TENSORBOARD, Tracker

PACE_STEPS = 50
"""Steps that the time left is estimated from."""


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """How far a run is: with weights and optimizer, the content of a checkpoint."""

    warm_step: int = 0
    """Finished steps of the warm start."""
    step: int = 0
    """Finished steps of reinforcement learning; also the version of the weights."""
    position: int = 0
    """Tasks taken from the stream."""
    num_unused: int = 0
    """Consecutive steps without signal."""
    validated: int = -1
    """The step after which the last validation ran; 0 is before the first."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Tasks before `position` that no step has taken, with asynchronous rollouts: each with the last version
    of the weights at which it may be."""

    @property
    def total(self) -> int:
        """Finished steps of both phases."""
        return self.warm_step + self.step

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint of these steps: step-000040, or warm-000140 in the warm start."""
        return f"step-{self.step:06}" if self.step else f"warm-{self.warm_step:06}"


class TimeLimit:
    """The time a run may take, counted from the creation of this object."""

    def __init__(self, minutes: float | None) -> None:
        check_numbers(max_minutes=minutes)
        self.minutes = minutes
        self._started = perf_counter()

    @property
    def share(self) -> float:
        """Fraction of the time that has passed; 0 without a limit."""
        if self.minutes is None:
            return 0.0
        return (perf_counter() - self._started) / (60 * self.minutes)

    @property
    def is_over(self) -> bool:
        """Whether all of it has passed."""
        return self.share >= 1.0

    def limited(self, seconds: float) -> float:
        """The given time, but not more than is left."""
        if self.minutes is None:
            return seconds
        return max(0.0, min(seconds, 60 * self.minutes - (perf_counter() - self._started)))


class Pace:
    """Estimates how long the rest of a phase takes, from the time between the ends of its last steps.

    Validations and checkpoints between steps are part of that time.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque([perf_counter()], maxlen=PACE_STEPS + 1)

    def step(self) -> None:
        """A step has ended."""
        self._ends.append(perf_counter())

    def seconds_for(self, num_steps: int) -> float:
        """Time for this many further steps; at least one step must have ended."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * num_steps


KIND = "train"
"""Kind of a training run in its manifest."""
REFERENCE = "start.safetensors"
SAMPLES = "samples"
VALIDATION = "validation"
FINAL = "final"
OWN = (METRICS, ROLLOUTS, SAMPLES, VALIDATION, REFERENCE, SCRATCH, SYNC, TENSORBOARD, FINAL)
"""What a training run has beside its checkpoints."""
MAX_RESTARTS = 3
"""How often the ranks are restarted without a finished step between two of them."""
NOTED_WITHOUT_SIGNAL = (1, 10, 100)
"""Consecutive steps without signal after which a note is due."""


class TrainingCallbacks:
    """Called while a run makes progress. Derive from it; these methods do nothing."""

    def on_phase(self, phase: str, *, num_done: int, num_steps: int) -> None:
        """A phase starts or is resumed: warm_start or train."""

    def on_rollout(self, stats: RolloutStats, *, num_wanted: int) -> None:
        """A rollout of the step has finished."""

    def on_step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """A step or a validation has finished: warm_start, train or validation."""

    def on_note(self, text: str) -> None:
        """Something the user should know."""


@asynccontextmanager
async def open_training(
    config: TrainConfig,
    run_dir: Path | None = None,
    *,
    callbacks: TrainingCallbacks | None = None,
    max_minutes: float | None = None,
) -> AsyncIterator[Trainer]:
    """The trainer of a new run in `run_dir`; by default a new folder in the user's state folder.

    Errors of the config are raised here, and leave no run behind. After `max_minutes`, counted from here,
    no further step starts.
    """
    limit = TimeLimit(max_minutes)
    manifest = {"kind": KIND, "config": stored_values(config)}
    remember_named(config)
    with Run.create(run_dir, manifest) as run:
        try:
            async with _open_trainer(config, run.path, callbacks, limit) as trainer:
                yield trainer
            run.check_kept()
        except BaseException:
            if not (run.path / METRICS).exists():  # it ended before it started
                shutil.rmtree(run.path / SCRATCH, ignore_errors=True)
                run.discard_if_empty()
            raise


@asynccontextmanager
async def resume_training(
    run_dir: Path,
    *,
    changes: Sequence[str] = (),
    callbacks: TrainingCallbacks | None = None,
    max_minutes: float | None = None,
) -> AsyncIterator[Trainer]:
    """The trainer of an existing run, from its newest checkpoint on.

    `changes` such as `steps=200` change its config; only settings in `MAY_CHANGE` can. Code and endpoints
    that it names must be known from a run of the user, or be given again in `changes`, see
    `resumed_config`. After `max_minutes`, counted from here, no further step starts.
    """
    limit = TimeLimit(max_minutes)
    with Run.open(run_dir) as run:
        config = config_of_run(run_dir, changes=changes)
        remember_named(config)
        async with _open_trainer(config, run.path, callbacks, limit) as trainer:
            yield trainer
        run.check_kept()


def config_of_run(run_dir: Path, *, changes: Sequence[str] = ()) -> TrainConfig:
    """The config of an existing run; `changes` as for `resume_training`. Does not lock the run."""
    manifest = read_manifest(run_dir)
    if manifest.get("kind") != KIND:
        raise RunError(f"{run_dir} is not a training run; another command created it")
    stored = manifest.get("config")
    if not isinstance(stored, dict):
        raise RunError(f"{run_dir} has no config in its manifest; it cannot be resumed")
    return resumed_config(stored, changes=changes)


@asynccontextmanager
async def try_setup(
    config: TrainConfig, run_dir: Path | None = None
) -> AsyncIterator[tuple[Setup, TrainProgress]]:
    """Everything a run needs, opened and checked, and how far `run_dir` is; nothing is written.

    The rows of the first step of the warm start are built. Of an existing run its newest checkpoint is
    loaded. On a cluster all places are reserved, and one rank and one engine replica are started.
    """
    checkpoint = None if run_dir is None else latest_checkpoint(run_dir)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        if config.cluster is not None:
            from memagent.rl.distributed.opening import try_cluster

            config = await stack.enter_async_context(try_cluster(config))
        setup = await stack.enter_async_context(open_setup(config, Path(folder)))
        progress = TrainProgress()
        if checkpoint is not None:
            await setup.backend.load(checkpoint, with_optimizer=False)
            progress = _progress_of(read_state(checkpoint), checkpoint)
        settings = config.warm_start
        if setup.lessons is not None and settings and progress.warm_step < settings.steps:
            setup.lessons.batch(progress.warm_step)
        yield setup, progress


@asynccontextmanager
async def _open_trainer(
    config: TrainConfig, run_dir: Path, callbacks: TrainingCallbacks | None, limit: TimeLimit
) -> AsyncIterator[Trainer]:
    for name in OWN:
        check_tree(run_dir / name)
    async with AsyncExitStack() as stack:
        callbacks = callbacks or TrainingCallbacks()
        setup = await stack.enter_async_context(
            open_setup(config, run_dir, on_note=callbacks.on_note)
        )
        checkpoint = latest_checkpoint(run_dir)
        tracker = stack.enter_context(
            Tracker(
                run_dir,
                config=stored_values(config),
                name=run_dir.name,
                trackers=config.logging.trackers,
                num_lines=0 if checkpoint is None else _num_lines(checkpoint),
            )
        )
        pool = WorkerPool()
        if (settings := config.cluster) is not None:  # the setup has joined it
            joined = open_cluster(settings.address, wait_seconds=settings.wait_seconds)
            cluster = stack.enter_context(joined)
            pool = WorkerPool.on_cluster(cluster, on_note=callbacks.on_note)
        stack.enter_context(pool)
        trainer = Trainer(setup, run_dir, tracker, pool, callbacks, limit)
        stack.push_async_callback(trainer.aclose)
        await trainer.load()
        yield trainer


class Trainer:
    """Trains the model of one run."""

    def __init__(
        self,
        setup: Setup,
        run_dir: Path,
        tracker: Tracker,
        pool: WorkerPool,
        callbacks: TrainingCallbacks,
        limit: TimeLimit,
    ) -> None:
        self.config = setup.config
        self.setup = setup
        self.run_dir = run_dir
        self._tracker = tracker
        self._pool = pool
        self._callbacks = callbacks
        self._limit = limit
        self._num_restarts, self._lost_at = 0, -1
        """Restarts of the ranks, and `progress.total` at the last one."""
        self._begin()

    def _begin(self) -> None:
        """Restore the latest checkpoint."""
        self.progress = TrainProgress()
        self._saved = -1
        """`progress.total` at the last checkpoint."""
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint is not None:
            state = read_state(checkpoint)
            self.progress = _progress_of(state, checkpoint)
            self._saved = self.progress.total
            with foreign_file(checkpoint, "is damaged; remove it", error=RunError):
                restore_random_state(state["random"])
        self._gatherer = open_gatherer(
            self.setup,
            self.run_dir,
            self._pool,
            self._callbacks.on_rollout,
            pending=self.progress.pending,
        )
        self._best = best_of_run(self.run_dir)
        self._num_checked = 0
        """Tokens of the longest row whose scores were compared."""
        self._pace = Pace()
        self._tasks: TasksAhead | None = None

    async def aclose(self) -> None:
        """Cancel rollouts that are in progress, and end the thread that generates tasks."""
        await self._gatherer.aclose()
        if self._tasks is not None:
            self._tasks.close()

    async def load(self) -> None:
        """Give the weights and the optimizer of the newest checkpoint to the backend."""
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint is not None:
            # the first step of reinforcement learning starts with a new optimizer
            is_begun = not self.is_warm or self.progress.step > 0
            await self.setup.backend.load(checkpoint, with_optimizer=is_begun)

    @property
    def is_warm(self) -> bool:
        """Whether the warm start is finished, if there is one."""
        settings = self.config.warm_start
        return settings is None or self.progress.warm_step >= settings.steps

    @property
    def is_finished(self) -> bool:
        """Whether all steps are finished."""
        return self.is_warm and self.progress.step >= self.config.steps

    async def train(self) -> Path:
        """Train to the last step or until the time limit; the folder of the trained model or adapter.

        After the time limit the run is validated and saved as after its last step, and can be resumed. When it is cancelled or the engine fails, a checkpoint of the finished steps is saved first.
        """
        self._pool.use()
        while True:
            try:
                await self.setup.sync.push(self.progress.step)
                await self._warm_up()
                if self.is_warm:
                    await self._check_engine()
                    await self._learn()
                else:
                    await self._validate(is_last=True)
                return self._export()
            except RanksLost as error:
                await self._recover(error)
            except (asyncio.CancelledError, EngineError):
                await self._save()
                raise

    async def _recover(self, error: RanksLost) -> None:
        """Go back to the newest checkpoint with new ranks. Rollouts since then are reused."""
        total = self.progress.total
        self._num_restarts = 1 if total > self._lost_at else self._num_restarts + 1
        self._lost_at = total
        if self._num_restarts > MAX_RESTARTS:
            raise ClusterError(
                f"{error} {self._num_restarts} times, without a finished step between two of them; see the "
                "logs of Ray for the reason"
            ) from None
        await self.aclose()
        checkpoint = latest_checkpoint(self.run_dir)
        where = "the start" if checkpoint is None else checkpoint.name
        self._callbacks.on_note(f"{error}; all ranks are started again, from {where}")
        await self.setup.backend.restart()
        self._tracker.rewind(0 if checkpoint is None else _num_lines(checkpoint))
        self._begin()
        await self.load()

    # --- warm start ----------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        settings, lessons = self.config.warm_start, self.setup.lessons
        if settings is None or lessons is None or self.is_warm:
            return
        progress, backend = self.progress, self.setup.backend
        first = await backend.begin(settings.optim, num_steps=settings.steps)
        self._callbacks.on_phase(
            "warm_start", num_done=progress.warm_step, num_steps=settings.steps
        )
        self._pace = Pace()
        await self.setup.sync.release()
        for batch in ahead(lessons, progress.warm_step, settings.steps):
            if self._limit.is_over:
                break
            started = perf_counter()
            rows = sft_rows(batch.examples)
            least = 0
            if not self.config.steps:  # the schedule of a warm start alone ends with the time limit
                least = first + int(self._limit.share * (settings.steps - first))
            fitted = await backend.fit(rows, min_schedule_step=min(least, settings.steps - 1))
            seconds = perf_counter() - started
            num_tokens = fitted.pop("packed_tokens")
            progress.warm_step += 1
            self._log_step(
                "warm_start",
                progress.warm_step,
                settings.steps,
                {
                    **fitted,
                    "num_refused": float(batch.num_refused),
                    "time/step": seconds,
                    "speed/update_tokens": num_tokens / seconds,
                },
            )
            await asyncio.sleep(0)  # lets a cancellation in
            is_last = progress.warm_step == settings.steps
            if is_last or progress.warm_step % self.config.checkpoint.every == 0:
                await self._save()
        await self._save()
        await backend.end()
        await self.setup.sync.push(progress.step)

    # --- reinforcement learning ----------------------------------------------------------------

    async def _learn(self) -> None:
        config, progress = self.config, self.progress
        self._callbacks.on_phase("train", num_done=progress.step, num_steps=config.steps)
        backend = self.setup.backend
        await backend.begin(config.optim, num_steps=config.steps)
        if config.objective.kl_coef:
            with disk_errors(self.run_dir / REFERENCE):
                await backend.keep_reference(self.run_dir / REFERENCE)
        await self._validate()
        if progress.step >= config.steps:
            return
        tasks = TasksAhead(self.setup.stream(progress.position), config.rollout.prompts)
        self._tasks = tasks
        self._pace = Pace()
        while progress.step < config.steps and not self._limit.is_over:
            await self._learn_step(tasks)
            is_best = await self._validate()
            is_due = progress.step == config.steps or progress.step % config.checkpoint.every == 0
            if is_due or is_best:
                await self._save()
        await self._gatherer.aclose()
        if progress.step < config.steps:
            await self._save()  # before the validation, which may take long
            await self._validate(is_last=True)

    async def _learn_step(self, tasks: TasksAhead) -> None:
        started = perf_counter()
        number = self.progress.step + 1
        found = await self._gatherer.gather(number, tasks)
        rolled = perf_counter()
        await self.setup.sync.release()
        is_served = self.config.rollout.engine is not None and self.config.rollout.sync != "none"
        self._num_checked = await check_longer(
            found.groups,
            self.setup.backend.score,
            num_checked=self._num_checked,
            policy_version=self.progress.step,
            served=self.setup.engine.model if is_served else None,
        )
        updated = await self.setup.backend.update(found.groups, policy_version=self.progress.step)
        # all advantages are zero when rewards do not differ
        count = self.progress.num_unused = (
            0 if updated["num_updates"] else self.progress.num_unused + 1
        )
        if count in NOTED_WITHOUT_SIGNAL:
            steps = "this step" if count == 1 else f"{count} consecutive steps"
            self._callbacks.on_note(
                f"no update in {steps}: the rewards of each group are all equal; a warm start, tasks of "
                "another difficulty or larger groups help"
            )
        self.progress.step = number
        self.progress.position, self.progress.pending = found.position, found.pending
        seconds = perf_counter() - rolled
        num_packed = updated.pop("packed_tokens")
        self._keep_samples(number, found)
        self._log_step(
            "train",
            number,
            self.config.steps,
            {
                **group_metrics(found.all_groups),
                **task_metrics(
                    found.all_groups, {name: one.task for name, one in found.tasks.items()}
                ),
                "num_unwanted": float(len(found.all_groups) - len(found.groups)),
                "num_dropped": float(found.num_dropped),
                **staleness_metrics(found.groups, policy_version=number - 1),
                **updated,
                "time/rollout": rolled - started,
                "time/update": seconds,
                "time/step": rolled - started + seconds,
                "speed/rollout_tokens": found.num_computed / max(rolled - started, 1e-9),
                "speed/update_tokens": num_packed / seconds,
            },
        )
        await self.setup.sync.push(number)

    async def _check_engine(self) -> None:
        """Refuse an engine outside this process that does not sample from the weights in training."""
        rollout, progress = self.config.rollout, self.progress
        if rollout.engine is None or progress.step >= self.config.steps:
            return
        if rollout.sync == "none" and progress.total:
            return  # it keeps the weights of the start
        engine = self.setup.engine
        for endpoint in getattr(engine, "endpoints", (engine,)):  # each server by itself
            await check_agreement(
                endpoint,
                self.setup.backend.score,
                temperature=rollout.temperature,
                vocabulary=self.setup.backend.facts.vocabulary,
                seed=self.config.seed,
            )

    # --- validation ----------------------------------------------------------------------------

    async def _validate(self, *, is_last: bool = False) -> bool:
        """Validate if it is due: before the first step, every few steps, after the last.

        Whether the reward is the best so far.
        """
        validation, settings, step = (
            self.setup.validation,
            self.config.validation,
            self.progress.step,
        )
        if validation is None or settings is None or self.progress.validated == step:
            return False
        if not (step % settings.every == 0 or is_last or step == self.config.steps):
            return False
        started = perf_counter()
        result = await validation.run(self.setup.engine)
        lines = "".join(f"{json.dumps(record)}\n" for record in result.records)
        write_file(self.run_dir, f"{VALIDATION}/step-{step:06}.jsonl", lines.encode())
        self.progress.validated = step
        seconds = perf_counter() - started
        self._log("validation", step, {**result.metrics, "time/validation": seconds})
        before, self._best = self._best, best_of_run(self.run_dir)
        return self._best != before

    # --- files of the run ----------------------------------------------------------------------

    def _log_step(self, kind: str, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Log a step of a phase, with an estimate of the time until the end of the phase."""
        self._pace.step()
        left = self._limit.limited(self._pace.seconds_for(num_steps - step))
        self._log(kind, step, {**metrics, "time/left": left})

    def _log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self._tracker.log(step, metrics, kind=kind)
        self._callbacks.on_step(kind, step, metrics)

    def _keep_samples(self, number: int, found: StepRollouts) -> None:
        """Save a few rollouts for people to read: those of a group together, groups with signal first."""
        num = self.config.logging.rollouts
        if not num:
            return
        scale = self.config.objective.scale_by_std
        records = (
            record
            for group in sorted(found.all_groups, key=lambda group: not has_signal(group))
            for record in readable_group(
                group,
                found.tasks[group.task_id],
                group_advantages(group, scale_by_std=scale),
            )
        )
        lines = list(islice(records, num))
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        data = text.encode("utf-8", "backslashreplace")
        write_file(self.run_dir, f"{SAMPLES}/step-{number:06}.jsonl", data)

    async def _save(self) -> None:
        """Write a checkpoint of the finished steps, unless there is one."""
        progress, settings = self.progress, self.config.checkpoint
        if self._saved == progress.total or progress.total == 0:
            return
        best = None
        if self._best is not None:  # the checkpoint with the best validation
            best = replace(progress, step=self._best.step).checkpoint
        with new_checkpoint(
            self.run_dir,
            progress.checkpoint,
            state={
                "progress": asdict(progress),
                "num_lines": self._tracker.num_lines,
                "random": random_state(),
            },
            keep=settings.keep,
            kept=best,
        ) as folder:
            await self.setup.backend.save(folder)
        self._saved = progress.total
        forget_rollouts(self.run_dir, until=progress.step)

    def _export(self) -> Path:
        """Write the model or adapter of the last checkpoint as a folder."""
        checkpoint = latest_checkpoint(self.run_dir)
        if checkpoint is None:
            raise RunError(f"no step was finished; raise `max_minutes={self._limit.minutes:g}`")
        final = self.run_dir / FINAL
        shutil.rmtree(final, ignore_errors=True)  # of the same run with fewer steps
        export(checkpoint, final)
        return final


def _progress_of(state: dict[str, Any], checkpoint: Path) -> TrainProgress:
    try:
        progress = TrainProgress(**state["progress"])
        pending = [(position, deadline) for position, deadline in progress.pending]
        counts = {**state["progress"], "pending": 0}.values()
        if any(type(value) is not int for value in (*counts, *chain(*pending))):
            raise TypeError("progress is counted in whole numbers")
        return replace(progress, pending=pending)
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{checkpoint} has no valid progress; remove it") from None


def _num_lines(checkpoint: Path) -> int:
    """Lines of metrics that a checkpoint covers."""
    with foreign_file(checkpoint, "is damaged; remove it", error=RunError):
        return int(read_state(checkpoint)["num_lines"])
