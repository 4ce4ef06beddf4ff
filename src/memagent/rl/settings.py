"""Settings of a training run, as a TOML file has them. No torch here: mistakes are found at once.

    # my_run.toml
    preset = "dapo"
    steps = 200
    [model]
    source = "smollm2-135m"
    lora_rank = 16
    [agent]
    name = "memory"
    settings = { chunk_tokens = 1024, memory_tokens = 128 }
    [[tasks]]
    tasks = ["ruler/niah_multikey_1"]
    tokens = ["4k"]

    config = read_config("my_run.toml", changes=["optim.lr=2e-6"])

Changes take precedence over the file, the file over its preset, the preset over the defaults below.
Everything that can be known to be wrong is refused here, before a model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, PositiveInt, model_validator

from memagent.agent.prompts import PROMPT_SETS
from memagent.cluster import LOCAL_CLUSTER
from memagent.config import Settings, find_config, read_toml, with_override
from memagent.data.choices import SOURCE_SETTINGS
from memagent.engines import store
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.plugins import is_file_spec
from memagent.rl.agents.command import is_command
from memagent.rl.rollouts.tasks import TaskSource
from memagent.rl.update.advantages import check_group_size
from memagent.tracking import TrackerName

NO_CLUSTER = "none"
"""Address of a cluster that leaves the rest of [cluster] out: the run is in this process."""

MOST_GPUS = 16_384
"""A plan tries their splits one by one."""

LossMean = Literal["token", "group", "rollout"]


# --- what is trained ------------------------------------------------------------------------------


class ScratchSettings(Settings):
    """A small Llama with random weights, and a byte-pair tokenizer trained on the texts of the tasks."""

    vocab_size: int = Field(default=512, ge=260)
    """Maximum size of the tokenizer's vocabulary; 256 bytes and four role marks are part of it."""
    hidden_size: int = Field(default=128, ge=16)
    """Width of the hidden states; each head gets hidden_size / num_heads, a multiple of 8."""
    num_layers: int = Field(default=4, ge=1)
    """Number of transformer layers."""
    num_heads: int = Field(default=4, ge=1)
    """Number of attention heads."""
    window: int = Field(default=512, ge=64)
    """Context window in tokens."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 8:
            raise ValueError(
                f"`hidden_size={self.hidden_size}` cannot be split into {self.num_heads} heads of a "
                "multiple of 8; change `hidden_size` or `num_heads`"
            )
        return self


class ModelSettings(Settings):
    """Which model is trained, and which of its weights."""

    source: str | None = None
    """A pulled model by name, a Hugging Face folder, or a GGUF file."""
    scratch: ScratchSettings | None = None
    """A small model with random weights instead of source, for experiments on a CPU."""
    adapter: str | None = None
    """LoRA folder to continue training from, such as one written by a warm start."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Train a LoRA adapter of this rank and freeze the model; all weights are trained when not given."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """The adapter's output is scaled by lora_alpha / lora_rank; twice the rank when not given."""
    device: str | None = None
    """Device to train on, such as cpu or cuda:0. Default: the first GPU, or the CPU. Weights are in float32 on
    a CPU and in bfloat16 on a GPU; gradients are accumulated, and AdamW steps, in float32 either way."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.source is None) == (self.scratch is None):
            raise ValueError("set either `source` or `scratch`: the model that is trained")
        if self.adapter is not None and self.scratch is not None:
            raise ValueError("`adapter` needs the model that it was trained for; remove `scratch`")
        if self.adapter is not None and self.lora_rank is not None:
            raise ValueError("the rank is that of `adapter`; remove `lora_rank`")
        return self


class AgentSettings(Settings):
    """The agent that solves the tasks, and the reward it is trained for."""

    name: str = "memory"
    """memory, calculator, single, path.py:function, or command:PROGRAM for a program that calls an endpoint."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the agent; for memory those of reading, such as chunk_tokens."""
    reward: str = "strict"
    """A grader such as strict or recall, or path.py:function."""
    bonus: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weights of metrics of the agent that are added to the reward of training, such as
    {captured = 0.1, citation_recall = 0.1, stop_moment = 0.1}; validation is scored without them."""

    @model_validator(mode="after")
    def _metrics_exist(self) -> Self:
        if not self.bonus or self.name != "memory":
            return self
        from memagent.rl.agents.readings import REWARDED  # not needed for --help

        unknown = [name for name in self.bonus if name not in REWARDED]
        if unknown:
            raise ValueError(
                f"the agent memory has no metric {unknown[0]!r} for a `bonus`; {hint(unknown[0], REWARDED)}"
            )
        return self


# --- a step ---------------------------------------------------------------------------------------


class RolloutSettings(Settings):
    """How the rollouts of a step are sampled."""

    prompts: int = Field(default=16, ge=1)
    """Tasks per step; each becomes a group of rollouts."""
    group_size: int = 16
    """Rollouts per task, at least 2: advantages are relative to the group."""
    driver: Literal["free", "lockstep"] = "free"
    """free: rollouts run independently. lockstep: all rollouts advance turn by turn, which is reproducible
    bit for bit on a CPU."""
    asynchronous: bool = False
    """Sample rollouts while the trainer updates, from weights at most objective.max_staleness steps old, which
    must be set; with 0 the steps are those without it. The engine needs its own copy of the weights."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of all replies; the trainer's log-probabilities use the same one."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of a reply where the agent sets no limit."""
    concurrency: int = Field(default=1024, ge=1)
    """Maximum number of rollouts in progress at once."""
    seconds: float | None = Field(default=None, gt=0)
    """Timeout of the agent of one rollout, and of its reward; a rollout over either counts as failed. No timeout
    when not given."""
    on_failure: Literal["exclude", "zero"] | float = "zero"
    """Rollouts that fail because of the policy's replies: an agent that raises on them, a prompt that
    outgrows the window. zero, or a number: they get this reward, and what they sampled is trained on.
    exclude: they leave their group. Failures of the machine, such as outages and timeouts, always leave it."""
    engine: str | None = None
    """Engine that samples replies, such as openai:MODEL; an engine in this process on the weights in
    training when not given."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of that engine, such as base_url; of the engine in this process, such as cache_gb."""
    merged: bool | None = None
    """Generate from a copy of the weights with the adapter merged in, refreshed after each step: as fast as
    without an adapter, for the memory of the copy. On a GPU, and with asynchronous, when not given."""
    sync: Literal["lora", "none"] = "lora"
    """How an engine outside this process gets new weights. lora: it loads the adapter after each step, as
    vLLM can. none: never; objective.max_staleness then decides which of its rows are used."""

    @property
    def failure_reward(self) -> float | None:
        """Reward of failures of the policy; None excludes them."""
        if isinstance(self.on_failure, str):
            return None if self.on_failure == "exclude" else 0.0
        return self.on_failure

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        try:
            check_group_size(self.group_size)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class ObjectiveSettings(Settings):
    """The objective: advantages, clipping, KL, and corrections for off-policy samples.

    The formula is in docs/training.md. Example: `ObjectiveSettings(clip_high=0.28, kl_coef=1e-3)`.
    """

    scale_by_std: bool = False
    """Divide advantages by the standard deviation of the group's rewards."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip: no gradient for a token with negative advantage once its ratio is below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip: no gradient for a token with positive advantage once its ratio is above 1 + clip_high."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Dual clip: no gradient for a token with negative advantage once its ratio is above this; None
    switches it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the reference model, the weights after the warm start; 0 keeps
    no reference."""
    loss_mean: LossMean | PositiveInt = "token"
    """Normalization of the loss. token: every token of an optimizer step weighs the same. group: every group
    does, and every token within it, as in the paper's formula. rollout: every rollout does. A number of tokens: the sum
    over tokens is divided by the number of rollouts times this constant."""
    old_logprobs: Literal["engine", "recompute"] = "engine"
    """Log-probabilities in the denominator of ratios. engine: those reported with the samples. recompute:
    the trainer's own, computed before the first update of a step."""
    ratio: Literal["token", "sequence"] = "token"
    """What ratios and importance weights are taken over. token: each token has its own. sequence: all tokens
    of a row have the geometric mean of theirs, as in GSPO."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """With old_logprobs = "recompute", tokens are weighted by trainer / engine probability, truncated at
    this; None switches the weights off."""
    mask: tuple[float, float] | None = None
    """Tokens whose trainer / engine probability ratio, before the first update of a step, is below the first or above
    the second number are masked; none when not given. With several updates per step this takes one more forward pass."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Rows sampled by weights more than this many training steps old are masked; no limit when not given.
    With rollout.asynchronous it decides how many rollouts are started ahead, so that none gets too old.
    It counts training steps, not the updates within a step: rollouts of the newest weights have age 0 in
    all updates of their step, and objective.clip_low and clip_high bound what those change."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards, before the overlong penalty, are all equal: they have no signal. In a step at
    most three times rollout.prompts are replaced."""
    skip_certain: float = Field(default=0.0, ge=0, lt=1)
    """Rows whose reply had at least the probability 1 - skip_certain are not trained on: their gradient is
    negligible, and so is what can be learned from them. They stay in the counts of the loss. Has no effect with
    a KL term."""
    overlong_tokens: int | None = Field(default=None, gt=0)
    """Over the last overlong_tokens of a reply's limit (at most half of it), the reward falls linearly by
    up to 1; off when not given."""

    @model_validator(mode="after")
    def _mask_is_around_one(self) -> Self:
        if self.mask is not None and not 0 <= self.mask[0] < 1 < self.mask[1]:
            raise ValueError(
                f"`mask={list(self.mask)}` must be a number from 0 to 1 and one above 1, such as [0.5, 2.0]"
            )
        return self


class UpdateSettings(Settings):
    """How the rollouts of a step become optimizer steps."""

    updates: int = Field(default=1, ge=1)
    """Optimizer steps per training step; each gets whole groups."""
    max_tokens: int = Field(default=32768, ge=16)
    """Maximum tokens of a packed sequence: the size of one forward and backward pass."""
    checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass, for less memory and about a
    third more time."""
    compiled: bool = False
    """Compile the layers with torch.compile: about a minute at the start, faster steps on a GPU."""


class OptimSettings(Settings):
    """AdamW, its learning-rate schedule and its gradient-norm clip."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to final_lr_share at the last
    step."""
    final_lr_share: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of a decay, as a fraction of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient-norm clip."""

    @model_validator(mode="after")
    def _betas_are_shares(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas={self.betas}` must both be at least 0 and below 1")
        return self


# --- around the steps -----------------------------------------------------------------------------


class SftSettings(Settings):
    """Supervised fine-tuning on given replies, before reinforcement learning or instead of it."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    batch: int = Field(default=32, ge=1)
    """Examples per step, each with all of its conversations."""
    tasks: list[TaskSource] = Field(default_factory=list)
    """Tasks whose replies are written by rule for the agent in training; those of the run when neither
    tasks nor files are given."""
    files: list[str] = Field(default_factory=list)
    """Files of conversations, one per line, as `memagent data traces` writes them."""
    replies: str | None = None
    """path.py:function: the right replies to a task, in order, as a list of texts. The agent in training is
    played with them. The agents that ship have a rule of their own."""
    optim: OptimSettings = OptimSettings(lr=1e-4, warmup_steps=5, schedule="cosine")
    """Optimizer of the warm start."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.tasks and self.files:
            raise ValueError("set either `tasks` or `files` of conversations")
        if self.replies is not None and self.files:
            raise ValueError("`replies` are for `tasks`; files of conversations have their own")
        return self


class ValidationSettings(Settings):
    """Held-out questions, scored with the reward of training."""

    every: int = Field(default=10, ge=1)
    """Steps between validations; there is also one before the first step and one after the last."""
    num: int = Field(default=64, ge=1)
    """Examples of each task and length."""
    tasks: list[TaskSource] = Field(min_length=1)
    """Tasks, as those of the run; a task with the same settings gets other examples."""
    samples: int = Field(default=1, ge=1)
    """Attempts at each example; several need a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 decodes greedily."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; from all tokens when not given."""
    graders: tuple[str, ...] = ()
    """Additional graders, such as lenient."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"`samples={self.samples}` would all be the same at `temperature=0`; raise one or lower the "
                "other"
            )
        return self


class CheckpointSettings(Settings):
    """Which checkpoints are written and kept: the newest, and the one with the highest validation reward."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; there is also one after the last."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""


class LogSettings(Settings):
    """Where metrics go, besides metrics.jsonl and the console. The names of the run and its project at Weights &
    Biases are those of its variables, WANDB_NAME and WANDB_PROJECT."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """tensorboard: write its files, where it is installed. wandb: log to Weights & Biases."""
    rollouts: int = Field(default=8, ge=0)
    """Rollouts per step that are saved in samples/, group by group, those with different rewards first."""


class ClusterSettings(Settings):
    """A Ray cluster to train on. Without GPUs in the cluster, everything runs on CPUs.

    Example: `ClusterSettings(address="10.0.0.1:6379", trainer_ranks=8, engine_replicas=4)`.
    """

    address: str = LOCAL_CLUSTER
    """HOST:PORT of the head node of a running cluster. auto: the cluster in the variable RAY_ADDRESS, as
    inside `ray job submit`; without it a cluster of this machine alone, which ends with the run. none: no
    cluster; everything is in this process, whatever else [cluster] says."""
    trainer_ranks: int = Field(default=1, ge=1, le=MOST_GPUS)
    """Processes that train together, each with one GPU and a shard of the weights, gradients and optimizer
    (FSDP2). May differ when a run is resumed."""
    engine_replicas: int = Field(default=1, ge=1, le=MOST_GPUS)
    """Engines that sample replies, each with tensor_parallel_size GPUs."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MOST_GPUS)
    """GPUs that share the weights of one engine replica; above 1 for vLLM only."""
    placement: Literal["colocated", "separate"] = "separate"
    """separate: engine replicas have their own GPUs. colocated: they share those of the trainer ranks, and
    sleep while the ranks train."""
    offload: bool = False
    """Keep weights, gradients and optimizer state of the ranks, and the reference weights of the KL term, in CPU
    memory between uses, and step there: slower, for the smallest GPU memory."""
    start_seconds: float = Field(default=600.0, gt=0)
    """How long an engine replica may take to be ready, its model loaded; at the start and when it is replaced."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long missing GPUs, CPUs and nodes are waited for, at the start and after a node has left. Then
    the run stops, and can be resumed."""

    @model_validator(mode="after")
    def _is_placeable(self) -> Self:
        needed = self.engine_replicas * self.tensor_parallel_size
        if self.placement == "colocated" and needed > self.trainer_ranks:
            raise ValueError(
                f"{needed} GPUs of engine replicas (`engine_replicas` x `tensor_parallel_size`) cannot share "
                f"those of {self.trainer_ranks} trainer ranks; lower them, raise `trainer_ranks`, or set "
                "`placement=separate`"
            )
        return self


# --- a run ----------------------------------------------------------------------------------------


class TrainConfig(Settings):
    """A training run."""

    about: str = ""
    """Free text: what the run is for."""
    preset: str | None = None
    """paper or dapo: values for what is not set here."""
    seed: int = 0
    """Seed of initial weights, tasks and sampling."""
    steps: int = Field(default=100, ge=0)
    """Steps of reinforcement learning, each rollouts and updates; 0 runs the warm start only."""
    model: ModelSettings
    """Which model is trained, and which of its weights."""
    agent: AgentSettings = AgentSettings()
    """The agent that solves the tasks, and its reward."""
    tasks: list[TaskSource] = Field(default_factory=list)
    """Training tasks, drawn in proportion to their weights."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source of the tasks, by its name; published files that are not named are fetched."""
    rollout: RolloutSettings = RolloutSettings()
    """How the rollouts of a step are sampled."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """Advantages, clipping, KL, and corrections for off-policy samples."""
    update: UpdateSettings = UpdateSettings()
    """How the rollouts of a step become optimizer steps."""
    optim: OptimSettings = OptimSettings()
    """AdamW, its learning-rate schedule and its gradient-norm clip."""
    warm_start: SftSettings | None = None
    """Supervised fine-tuning before the first step; none when not given."""
    validation: ValidationSettings | None = None
    """Validation on held-out questions; none when not given."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Which checkpoints are written and kept."""
    logging: LogSettings = LogSettings()
    """Where metrics go."""
    cluster: ClusterSettings | None = None
    """Train on a Ray cluster; in this process when not given."""

    @classmethod
    def parse(cls, values: dict[str, Any], *, changes: Sequence[str] = ()) -> Self:
        """Check values, with `changes` applied and the preset filled in."""
        for change in changes:
            values = with_override(values, change)
        cluster = values.get("cluster")
        if isinstance(cluster, Mapping) and cluster.get("address") == NO_CLUSTER:
            values = {**values, "cluster": None}
        preset = values.get("preset")
        if preset is not None:
            if not isinstance(preset, str) or preset not in PRESETS:
                raise ConfigError(f"there is no preset {preset!r}; {hint(str(preset), PRESETS)}")
            values = _filled(values, _fitting(PRESETS[preset], values))
        return super().parse(values)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.update.updates > self.rollout.prompts:
            raise ValueError(
                f"{self.update.updates} optimizer steps (`update.updates`) need as many groups, and a step "
                f"has {self.rollout.prompts} (`rollout.prompts`); lower the former or raise the latter"
            )
        if self.steps == 0 and self.warm_start is None:
            raise ValueError("`steps=0` without `warm_start` trains nothing; set one of them")
        if not self.tasks and (self.steps or self.model.scratch is not None):
            raise ValueError("name the training tasks in [[tasks]]")
        if self.warm_start and not (self.tasks or self.warm_start.tasks or self.warm_start.files):
            raise ValueError("the warm start needs `warm_start.tasks` or `warm_start.files`")
        is_served = self.rollout.engine is not None and not self.has_replicas
        if is_served and self.rollout.sync == "lora" and not self.has_adapter:
            raise ValueError(
                "an engine outside this process loads an adapter after each step; set `model.lora_rank`, "
                'or `rollout.sync="none"`'
            )
        if self.rollout.merged and (self.rollout.engine is not None or not self.has_adapter):
            raise ValueError(
                "`rollout.merged` is for an adapter whose replies are sampled in this process; remove it"
            )
        if self.rollout.asynchronous:
            self._check_asynchronous()
        if self.rollout.driver == "lockstep" and self.rollout.engine is not None:
            raise ValueError('an engine outside this process needs `rollout.driver="free"`')
        if self.rollout.driver == "lockstep" and is_command(self.agent.name):
            raise ValueError('an agent that is a program needs `rollout.driver="free"`')
        return self

    @model_validator(mode="after")
    def _replicas_can_be_placed(self) -> Self:
        if self.cluster is None or self.cluster.tensor_parallel_size == 1 or not self.has_replicas:
            return self
        if self.rollout.engine is None:
            raise ValueError(
                'embedded engine replicas have one GPU each; set `rollout.engine="vllm:MODEL"`, or '
                "`cluster.tensor_parallel_size=1`"
            )
        if self.cluster.placement == "colocated":
            raise ValueError(
                "colocated engine replicas have one GPU each; set `cluster.tensor_parallel_size=1`, or "
                "`cluster.placement=separate`"
            )
        return self

    def _check_asynchronous(self) -> None:
        if self.objective.max_staleness is None:
            raise ValueError(
                "`rollout.asynchronous` needs a bound: set `objective.max_staleness`, such as 2"
            )
        if self.rollout.driver == "lockstep":
            raise ValueError('`rollout.asynchronous` needs `rollout.driver="free"`')
        if self.rollout.engine is not None and self.rollout.sync == "none":
            raise ValueError(
                '`rollout.asynchronous` needs new weights; remove `rollout.sync="none"`'
            )
        if self.cluster is not None and self.cluster.placement == "colocated":
            raise ValueError(
                "`rollout.asynchronous` needs engines that do not sleep during updates; set "
                "`cluster.placement=separate`"
            )
        is_apart = (
            self.cluster is not None
            or self.rollout.engine is not None
            or (self.has_adapter and self.rollout.merged is not False)
        )
        if not is_apart:
            raise ValueError(
                "`rollout.asynchronous` needs an engine with its own copy of the weights: train an adapter "
                "(`model.lora_rank`), or name another engine in `rollout.engine`"
            )

    @property
    def has_replicas(self) -> bool:
        """Whether replies are sampled by engine replicas on a cluster: embedded ones, or vLLM."""
        engine = self.rollout.engine
        return self.cluster is not None and (engine is None or engine.startswith("vllm:"))

    @property
    def num_versions(self) -> int:
        """Versions of the weights that rollouts in progress may use."""
        if not self.rollout.asynchronous:
            return 1
        return 1 + (self.objective.max_staleness or 0)

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained and the model frozen."""
        return self.model.adapter is not None or self.model.lora_rank is not None


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "objective": {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,
            "kl_coef": 1e-3,
            "loss_mean": "token",
            "old_logprobs": "recompute",
            "importance_cap": None,
        },
        "rollout": {"prompts": 128, "group_size": 16, "temperature": 1.0},
        "update": {"updates": 16},
        "optim": {"lr": 1e-6, "warmup_steps": 20, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "agent": {
            "name": "memory",
            "reward": "strict",
            "settings": {
                "prompts": "paper",
                "window": 8192,
                "chunk_tokens": 5000,
                "section_ends": "exact",
                "memory_tokens": 1024,
                "empty_replies": "overwrite",
                "answer_tokens": 1024,
                "max_sections": 8,
                "long_texts": "cut_middle",
            },
        },
        "validation": {"every": 5, "num": 128, "samples": 4, "temperature": 1.0, "top_p": 0.7},
        "checkpoint": {"every": 10},
    },
    "dapo": {
        "objective": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "scale_by_std": True,
            "kl_coef": 0.0,
            "loss_mean": "token",
            "dynamic_sampling": True,
            "overlong_tokens": 256,
        },
        "rollout": {"prompts": 32, "group_size": 16, "temperature": 1.0},
        "update": {"updates": 4},
        "optim": {"lr": 1e-6, "warmup_steps": 10, "weight_decay": 0.0, "max_grad_norm": 1.0},
    },
}
"""The recipe of the MemAgent paper, and that of DAPO."""


def read_config(path: Path | str, *, changes: Sequence[str] = ()) -> TrainConfig:
    """The config in a TOML file, or a shipped one by its name, such as `tiny_cpu`.

    `changes` such as `optim.lr=2e-6` take precedence. Relative paths in the file are looked up in its
    folder first, those in `changes` in the working folder.
    """
    path = find_config("train", path)
    values = located(read_toml(path, "config"), path.parent)
    try:
        return TrainConfig.parse(values, changes=changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_warm_start(
    path: Path | str, *, changes: Sequence[str] = (), files: Sequence[Path] = ()
) -> TrainConfig:
    """The warm start of a config without the reinforcement learning after it.

    `files` of conversations replace its tasks and files.
    """
    only = [*changes, "steps=0"]
    if files:
        only += [f"warm_start.files={[str(file) for file in files]!r}", "warm_start.tasks=[]"]
    is_set = any(change.startswith("warm_start") for change in only)
    if not is_set and "warm_start" not in read_toml(find_config("train", path), "config"):
        raise ConfigError(f"{path} has no [warm_start]; set there what is trained on, and `steps`")
    return read_config(path, changes=only)


def parse_config(values: Mapping[str, Any], *, changes: Sequence[str] = ()) -> TrainConfig:
    """A config from a table, checked, with its preset filled in."""
    return TrainConfig.parse(dict(values), changes=changes)


def _fitting(preset: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a preset that fits a config: no settings of another agent, validation only if there is one."""
    fitting = {name: value for name, value in preset.items() if name != "validation"}
    if given.get("validation") is not None and "validation" in preset:
        fitting["validation"] = preset["validation"]
    agent, chosen = preset.get("agent"), given.get("agent")
    if agent is None or not isinstance(chosen, Mapping):
        return fitting
    if chosen.get("name", agent["name"]) != agent["name"]:
        fitting["agent"] = {"reward": agent["reward"]}
    return fitting


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, and the defaults of those that are not given."""
    result = {**defaults, **given}
    for name, value in defaults.items():
        theirs = given.get(name)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            result[name] = _filled(theirs, value)
    return result


# --- paths: relative ones are looked up in the config's own folder first, then in the working folder ---

# Found files get their absolute path, so that the stored config of a run means the same everywhere.

_source_settings = "|".join(sorted(SOURCE_SETTINGS))
_PATHS = re.compile(
    rf"""model\.(source|adapter)
    | agent\.settings\.prompts
    | sources\..+
    | warm_start\.files\.\*
    | (warm_start\.|validation\.)?tasks\.\*\.(files\.\*|settings\.({_source_settings}))""",
    re.VERBOSE,
)
_CODE = re.compile(r"agent\.(name|reward)|warm_start\.replies|validation\.graders\.\*")


def located(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a config with absolute paths where files lie in its folder."""
    return {name: _located(value, folder, name) for name, value in values.items()}


def is_path(setting: str) -> bool:
    """Whether a setting such as `tasks.0.files.1` may name a file or a folder."""
    return _PATHS.fullmatch(re.sub(r"\.\d+(?=\.|$)", ".*", setting)) is not None


def _located(value: Any, folder: Path, setting: str) -> Any:
    if isinstance(value, dict):
        return {key: _located(one, folder, f"{setting}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_located(one, folder, f"{setting}.*") for one in value]
    if not isinstance(value, str) or value in store.KNOWN or value in PROMPT_SETS:
        return value
    if _CODE.fullmatch(setting) and is_file_spec(value):
        path, colon, function = value.partition(":")
        return f"{_beside(path, folder)}{colon}{function}"
    return _beside(value, folder) if _PATHS.fullmatch(setting) else value


def _beside(path: str, folder: Path) -> str:
    """The absolute path of a file in the folder; another path as it is."""
    found = folder / Path(path).expanduser()
    return os.path.abspath(found) if found.exists() else path
