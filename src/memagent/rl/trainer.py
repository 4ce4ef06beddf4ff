"""The loop: warm start, then step after step of rollouts and updates, with all that keeps it safe.

    tasks ─▶ rollouts (engine on the same weights) ─▶ groups ─▶ rows ─▶ packs ─▶ updates ─▶ the next step
                  │                                                                │
                  └─ RUN/rollouts, until they are learnt from                      ├─ RUN/metrics.jsonl
                                                                                   ├─ RUN/validation
                                                                                   └─ RUN/checkpoints

    async with open_trainer(config, run_folder) as trainer:
        await trainer.train()

A run that is killed goes on from its newest checkpoint: metrics after it are cut off, finished rollouts
are taken over, and the rest is done again. With the `lockstep` driver on a CPU the metrics are then
those of a run that was never killed, bit for bit.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from memagent.errors import EngineError
from memagent.rl.agents.offload import WorkerPool
from memagent.rl.rollouts.collect import Stats as RolloutStats
from memagent.rl.rollouts.log import forget_rollouts
from memagent.rl.rollouts.step import Found, Gatherer
from memagent.rl.rollouts.tasks import TasksAhead
from memagent.rl.settings import OptimSettings, TrainConfig
from memagent.rl.setup import Setup, set_up
from memagent.rl.update.loss import summary
from memagent.rl.update.metrics import group_metrics, task_metrics
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import num_row_tokens
from memagent.rl.update.step import memory_errors, packed, update
from memagent.rl.warmstart.lessons import ahead
from memagent.rl.warmstart.rows import accumulate_sft, sft_rows
from memagent.rl.weights.checkpoint import (
    latest_checkpoint,
    load_weights,
    read_optimizer,
    read_state,
    save_checkpoint,
)
from memagent.rl.weights.models import Snapshot
from memagent.tracking import Tracker

START = "start.safetensors"
SAMPLES = "samples"
VALIDATION = "validation"


class Watch:
    """Told how a run goes. The command line derives from it; this one does nothing."""

    def begin(self, phase: str, *, num_done: int, num_steps: int) -> None:
        """A phase begins or goes on: warm_start or train."""

    def rollouts(self, stats: RolloutStats, *, num_wanted: int) -> None:
        """A rollout of the step has finished."""

    def step(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """A step or a validation is done: warm_start, train, validation."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come: with weights and optimizer, all that a checkpoint keeps."""

    warm_step: int = 0
    """Finished steps of the warm start."""
    step: int = 0
    """Finished steps of reinforcement learning; also the version of the weights."""
    position: int = 0
    """Tasks that were drawn."""
    num_unused: int = 0
    """Steps without anything to learn, one after the other."""
    validated: int = -1
    """The last step that was validated after; 0 is before the first."""

    @property
    def total(self) -> int:
        """Counts checkpoints."""
        return self.warm_step + self.step


@asynccontextmanager
async def open_trainer(
    config: TrainConfig, run: Path, *, watch: Watch | None = None
) -> AsyncIterator[Trainer]:
    """A trainer of a run folder, new or to go on with. Mistakes of the config are raised here."""
    async with AsyncExitStack() as stack:
        setup = await set_up(config, run, stack)
        tracker = stack.enter_context(
            Tracker(
                run,
                config=config.model_dump(mode="json"),
                name=config.logging.name or run.name,
                project=config.logging.project,
                tensorboard=config.logging.tensorboard,
                wandb=config.logging.wandb,
                trackio=config.logging.trackio,
                num_lines=_num_lines(run),
            )
        )
        pool = WorkerPool()
        stack.callback(pool.close)
        trainer = Trainer(setup, run, tracker, pool, watch or Watch())
        stack.callback(trainer.close)
        yield trainer


class Trainer:
    """One run."""

    def __init__(
        self, setup: Setup, run: Path, tracker: Tracker, pool: WorkerPool, watch: Watch
    ) -> None:
        self.config = setup.config
        self.setup = setup
        self.run = run
        self.progress = Progress()
        self._tracker = tracker
        self._pool = pool
        self._watch = watch
        self._gatherer = Gatherer(setup, run, pool, watch.rollouts)
        self._saved = -1
        """What `progress.total` was at the last checkpoint."""
        self._current: Optimizer | None = None
        self._restored: dict[str, torch.Tensor] | None = None
        """State of the optimizer of the phase that goes on."""
        self._restore()
        self._tasks: TasksAhead | None = None

    def close(self) -> None:
        """End the thread that makes tasks."""
        if self._tasks is not None:
            self._tasks.close()

    async def train(self) -> None:
        """Run to the end. When it is cancelled or the engine fails, what is finished is saved first."""
        self._pool.use()
        try:
            await self.setup.sync.push(self.progress.step)
            await self._warm_up()
            await self._learn()
        except (asyncio.CancelledError, EngineError):
            self._save()
            raise

    # --- warm start ----------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        settings, lessons = self.config.warm_start, self.setup.lessons
        if settings is None or lessons is None or self.progress.warm_step >= settings.steps:
            return
        optimizer = self._optimizer(settings.optim, settings.steps)
        self._watch.begin("warm_start", num_done=self.progress.warm_step, num_steps=settings.steps)
        for batch in ahead(lessons, self.progress.warm_step, settings.steps):
            started = perf_counter()
            number = self.progress.warm_step
            rows = sft_rows(batch.examples)
            packs = packed(rows, self.config.update)
            with memory_errors():
                stats = summary(accumulate_sft(self.setup.policy, packs))
                told = optimizer.step(number)
            seconds = perf_counter() - started
            num_tokens = sum(one.num_tokens for one in packs)
            self.progress.warm_step += 1
            self._log(
                "warm_start",
                self.progress.warm_step,
                {
                    **stats,
                    **told,
                    "num_refused": float(batch.num_refused),
                    "sharing": num_row_tokens(rows) / num_tokens,
                    "time/step": seconds,
                    "speed/update_tokens": num_tokens / seconds,
                },
            )
            await asyncio.sleep(0)  # lets Ctrl-C in
            is_last = self.progress.warm_step == settings.steps
            if is_last or self.progress.warm_step % self.config.checkpoint.every == 0:
                self._save(optimizer)
        optimizer.close()
        await self.setup.sync.push(self.progress.step)

    # --- reinforcement learning ----------------------------------------------------------------

    async def _learn(self) -> None:
        config, progress = self.config, self.progress
        self._watch.begin("train", num_done=progress.step, num_steps=config.steps)
        optimizer = self._optimizer(config.optim, config.steps)
        reference = self._reference()
        await self._validate()
        if progress.step >= config.steps:
            return
        tasks = TasksAhead(self.setup.stream(progress.position), config.rollout.prompts)
        self._tasks = tasks
        while progress.step < config.steps:
            await self._learn_step(optimizer, reference, tasks)
            await self._validate()
            if progress.step == config.steps or progress.step % config.checkpoint.every == 0:
                self._save(optimizer)

    async def _learn_step(
        self, optimizer: Optimizer, reference: Snapshot | None, tasks: TasksAhead
    ) -> None:
        started = perf_counter()
        number = self.progress.step + 1
        found = await self._gatherer.gather(number, tasks)
        rolled = perf_counter()
        with memory_errors():
            updated = update(
                self.setup, found.groups, optimizer, reference, version=self.progress.step
            )
        self._check_signal(has_learnt=bool(updated["num_updates"]))
        self.progress.step = number
        self.progress.position = tasks.position
        seconds = perf_counter() - rolled
        num_packed = updated.pop("packed_tokens")
        self._keep_samples(number, found)
        self._log(
            "train",
            number,
            {
                **group_metrics(found.drawn),
                **task_metrics(found.drawn, {name: one.task for name, one in found.tasks.items()}),
                "num_unwanted": float(found.num_unwanted),
                **updated,
                "time/rollout": rolled - started,
                "time/update": seconds,
                "time/step": rolled - started + seconds,
                "speed/rollout_tokens": found.num_computed / max(rolled - started, 1e-9),
                "speed/update_tokens": num_packed / seconds,
            },
        )
        await self.setup.sync.push(number)

    def _check_signal(self, *, has_learnt: bool) -> None:
        """Say so when nothing is learnt: rewards that are all the same teach nothing."""
        self.progress.num_unused = 0 if has_learnt else self.progress.num_unused + 1
        if self.progress.num_unused in (1, 10, 100):
            count = self.progress.num_unused
            told = "this step" if count == 1 else f"{count} steps"
            self._watch.note(
                f"nothing to learn in {told}: rewards of a group are all the same; a warm start, tasks "
                "of another difficulty or larger groups help"
            )

    # --- what is kept --------------------------------------------------------------------------

    def _optimizer(self, settings: OptimSettings, num_steps: int) -> Optimizer:
        optimizer = Optimizer(self.setup.trained.parameters, settings, num_steps=num_steps)
        if self._restored is not None:
            optimizer.load_state_dict(self._restored)
            self._restored = None
        self._current = optimizer
        return optimizer

    def _reference(self) -> Snapshot | None:
        """The weights that reinforcement learning began with, if KL to them counts."""
        if self.config.objective.kl_coef == 0.0:
            return None
        path = self.run / START
        if path.exists():
            return Snapshot.read(path, self.setup.trained)
        snapshot = Snapshot.of(self.setup.trained)
        snapshot.save(path)
        return snapshot

    async def _validate(self) -> None:
        """Validate if it is time: before the first step, now and then, after the last."""
        validation, settings, step = (
            self.setup.validation,
            self.config.validation,
            self.progress.step,
        )
        if validation is None or settings is None or self.progress.validated == step:
            return
        if step != self.config.steps and step % settings.every:
            return
        started = perf_counter()
        result = await validation.run(self.setup.engine)
        folder = self.run / VALIDATION
        folder.mkdir(exist_ok=True)
        lines = "".join(f"{json.dumps(record)}\n" for record in result.records)
        (folder / f"step-{step:06}.jsonl").write_text(lines, encoding="utf-8")
        self.progress.validated = step
        seconds = perf_counter() - started
        self._log("validation", step, {**result.metrics, "time/validation": seconds})

    def _log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self._tracker.log(step, metrics, kind=kind)
        self._watch.step(kind, step, metrics)

    def _keep_samples(self, number: int, found: Found) -> None:
        """A few rollouts to read, of as many tasks as can be."""
        num = self.config.logging.rollouts
        if not num:
            return
        by_turn = zip(*(group.rollouts for group in found.drawn), strict=True)
        chosen = [rollout for turn in by_turn for rollout in turn][:num]
        lines = [
            {
                "task_id": rollout.task_id,
                "question": getattr(found.tasks[rollout.task_id], "question", None),
                "answers": list(getattr(found.tasks[rollout.task_id], "answers", ())),
                "index": rollout.index,
                "reward": rollout.reward,
                "error": rollout.error,
                "metrics": dict(rollout.metrics),
                "record": dict(rollout.record),
            }
            for rollout in chosen
        ]
        folder = self.run / SAMPLES
        folder.mkdir(exist_ok=True)
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        (folder / f"step-{number:06}.jsonl").write_text(text, encoding="utf-8")

    def _save(self, optimizer: Optimizer | None = None) -> None:
        """A checkpoint of what is finished, unless there is one."""
        progress = self.progress
        optimizer = optimizer or self._current
        if self._saved == progress.total or progress.total == 0 or optimizer is None:
            return
        save_checkpoint(
            self.run,
            progress.total,
            model=self.setup.trained.model,
            tokenizer=self.setup.trained.loaded.tokenizer,
            optimizer=optimizer.state_dict(),
            state={
                "progress": asdict(progress),
                "num_lines": self._tracker.num_lines,
                "random": _random_state(),
            },
            keep=self.config.checkpoint.keep,
            keep_every=self.config.checkpoint.keep_every,
        )
        self._saved = progress.total
        forget_rollouts(self.run, until=progress.step)

    def _restore(self) -> None:
        checkpoint = latest_checkpoint(self.run)
        if checkpoint is None:
            return
        state = read_state(checkpoint)
        load_weights(self.setup.trained.model, checkpoint)
        self.progress = Progress(**state["progress"])
        self._saved = self.progress.total
        _set_random_state(state["random"])
        settings = self.config.warm_start
        is_between = self.progress.step == 0 and (
            settings is None or self.progress.warm_step >= settings.steps
        )
        if not is_between:
            self._restored = read_optimizer(checkpoint)


# --- small things -----------------------------------------------------------------------------------


def _num_lines(run: Path) -> int:
    """Lines of metrics that the newest checkpoint knows of."""
    checkpoint = latest_checkpoint(run)
    return 0 if checkpoint is None else int(read_state(checkpoint)["num_lines"])


def _random_state() -> dict[str, Any]:
    """Ours comes from seeds and positions; an agent of the user may draw from these."""
    version, values, gauss = random.getstate()
    torch_state = torch.get_rng_state().numpy().tobytes()
    return {
        "python": [version, list(values), gauss],
        "torch": base64.b64encode(torch_state).decode("ascii"),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    stored = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8)
    torch.set_rng_state(torch.from_numpy(stored.copy()))
