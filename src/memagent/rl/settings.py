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

    config = read_config(Path("my_run.toml"), changes=["optim.lr=2e-6"])

A preset sets what the file does not; what the file sets counts more, and `--set` counts most. Everything
that can be known to be wrong is refused here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from memagent.config import Settings, read_toml
from memagent.data.recipes import changed
from memagent.errors import ConfigError
from memagent.rl.objective import PRESETS as OBJECTIVES
from memagent.rl.objective import ObjectiveConfig
from memagent.rl.rollouts.tasks import TaskSource
from memagent.rl.update.advantages import check_group_size

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ScratchSettings(Settings):
    """A small model with random weights, and a tokenizer made from the texts of the tasks."""

    vocab_size: int = Field(default=512, ge=260)
    """Tokens that the tokenizer learns, at most; 256 bytes and four marks of roles are among them."""
    hidden_size: int = Field(default=128, ge=16)
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=4, ge=1)
    window: int = Field(default=512, ge=64)
    """Tokens it can see at once."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 8:
            raise ValueError(
                f"hidden_size={self.hidden_size} cannot be split into {self.num_heads} heads of a "
                "multiple of 8; change one of them"
            )
        return self


class ModelSettings(Settings):
    """Which model is trained, and which of its weights."""

    source: str | None = None
    """A pulled model by name, a Hugging Face folder, or a GGUF file."""
    scratch: ScratchSettings | None = None
    """A small model from random weights instead, to try things out."""
    adapter: str | None = None
    """LoRA folder to start from, such as one that a warm start has left; it is trained on."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Train an adapter of this rank and leave the model as it is; all weights when not given."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Weight of the adapter is lora_alpha / lora_rank; twice the rank when not given."""
    lora_targets: tuple[str, ...] = LORA_TARGETS
    """Layers that get an adapter."""
    device: str | None = None
    """Where it runs, such as cpu or cuda:0; the first GPU, else the CPU, when not given."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights; float32 on a CPU and bfloat16 on a GPU when not given. The optimizer always keeps
    float32."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.source is None) == (self.scratch is None):
            raise ValueError("give either a source or scratch: which model is trained")
        if self.adapter is not None and self.scratch is not None:
            raise ValueError("an adapter needs the model it was made for; leave out scratch")
        if self.adapter is not None and self.lora_rank is not None:
            raise ValueError("the adapter has its rank already; leave out lora_rank")
        return self


class AgentSettings(Settings):
    """Who solves the tasks, and what that is worth."""

    name: str = "memory"
    """memory, calculator, single, or path.py:function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the agent; for memory those of reading, such as chunk_tokens."""
    reward: str = "strict"
    """A grader such as strict or recall, or path.py:function."""


class RolloutSettings(Settings):
    """How the tasks of a step are tried."""

    prompts: int = Field(default=16, ge=1)
    """Tasks of a step."""
    group_size: int = 16
    """Attempts at each task."""
    driver: Literal["free", "lockstep"] = "free"
    """free: each attempt runs ahead. lockstep: all advance together, which repeats bit for bit on a CPU."""
    temperature: float = Field(default=1.0, gt=0)
    """Of all replies that are learnt from."""
    max_tokens: int = Field(default=1024, ge=1)
    """Limit of a reply where the agent sets none."""
    concurrency: int = Field(default=1024, ge=1)
    """Attempts under way at once, at most."""
    seconds: float | None = Field(default=None, gt=0)
    """How long one attempt may take, and its reward; no limit when not given."""
    max_unwanted: int | None = Field(default=None, ge=0)
    """With dynamic sampling, groups without signal that are replaced in a step, at most; when not given,
    three times as many as there are prompts."""
    engine: str | None = None
    """Engine that draws replies, such as openai:MODEL; the trained weights in this process when not
    given."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of that engine, such as base_url; or of the one in this process, such as cache_gb."""
    sync: Literal["lora", "none"] = "lora"
    """How an engine elsewhere gets new weights. lora: it is told to load the adapter, as vLLM can be.
    none: never; what it draws is then learnt from as far as objective.max_staleness allows."""

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        try:
            check_group_size(self.group_size)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class UpdateSettings(Settings):
    """How a step's rollouts become optimizer steps."""

    updates: int = Field(default=1, ge=1)
    """Optimizer steps for the rollouts of a step; each gets whole groups."""
    max_tokens: int = Field(default=32768, ge=16)
    """Tokens of a packed sequence, at most: what fits into memory at once."""
    share_prefixes: bool = True
    """Compute what attempts of a group have in common once."""
    checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    compiled: bool = False
    """Compile the layers: a minute at the start, faster steps on a GPU."""


class OptimSettings(Settings):
    """AdamW, its learning rate and its limits."""

    lr: float = Field(default=1e-5, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to final_lr_share at the last step."""
    final_lr_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that is left at the end of a falling schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened to this."""

    @model_validator(mode="after")
    def _betas_are_shares(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both be at least 0 and below 1")
        return self


class SftSettings(Settings):
    """Learning from given replies, before reinforcement learning or instead of it."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    batch: int = Field(default=32, ge=1)
    """Examples of a step; all conversations of an example count."""
    tasks: list[TaskSource] = Field(default_factory=list)
    """Tasks whose replies are written by rule, for the agent that is trained; those of the run when neither
    tasks nor files are given."""
    files: list[str] = Field(default_factory=list)
    """Files of conversations, one per line, as `memagent data traces` writes them."""
    optim: OptimSettings = OptimSettings(lr=1e-4, warmup_steps=5, schedule="cosine")

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.tasks and self.files:
            raise ValueError("give either tasks or files of conversations")
        return self


class ValidationSettings(Settings):
    """Questions that are asked again and again, with the reward of training and never learnt from."""

    every: int = Field(default=10, ge=1)
    """Steps between validations; there is one before the first step and one after the last."""
    num: int = Field(default=64, ge=1)
    """Examples of each task and length."""
    tasks: list[TaskSource] = Field(min_length=1)
    """As the tasks of the run; a task that has the same settings gets other examples."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the replies; 0 takes the likeliest token."""
    concurrency: int = Field(default=256, ge=1)
    """Questions under way at once, at most."""
    graders: tuple[str, ...] = ()
    """Further graders to score the answers with, such as lenient."""


class CheckpointSettings(Settings):
    """What is kept to go on from."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; there is one after the last."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept, the newest."""
    keep_every: int | None = Field(default=None, ge=1)
    """Steps whose checkpoints are never removed."""


class LogSettings(Settings):
    """Where numbers go, besides metrics.jsonl and the console."""

    tensorboard: bool = True
    """Write TensorBoard files where it is installed."""
    wandb: bool = False
    trackio: bool = False
    project: str = "memagent"
    """Name of the project there."""
    name: str | None = None
    """Name of the run there; that of its folder when not given."""
    rollouts: int = Field(default=4, ge=0)
    """Rollouts of each step that are kept to be read."""


class TrainConfig(Settings):
    """A training run."""

    about: str = ""
    """What it is for."""
    preset: str | None = None
    """paper or dapo: sets what is not set here."""
    seed: int = 0
    """Weights, tasks and replies depend on it."""
    steps: int = Field(default=100, ge=0)
    """Steps of reinforcement learning: rollouts, then updates; 0 only warms up."""
    model: ModelSettings
    agent: AgentSettings = AgentSettings()
    tasks: list[TaskSource] = Field(default_factory=list)
    """What is trained on; drawn in proportion to their weights."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source of the tasks, by its name; published files that are not named are fetched."""
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveConfig = ObjectiveConfig()
    update: UpdateSettings = UpdateSettings()
    optim: OptimSettings = OptimSettings()
    warm_start: SftSettings | None = None
    """Learn from replies written by rule first; no warm start when not given."""
    validation: ValidationSettings | None = None
    """No validation when not given."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.update.updates > self.rollout.prompts:
            raise ValueError(
                f"update.updates={self.update.updates} optimizer steps need as many groups, and a step "
                f"has rollout.prompts={self.rollout.prompts}; lower updates or raise prompts"
            )
        if self.steps == 0 and self.warm_start is None:
            raise ValueError("steps=0 without a warm start trains nothing; set one of them")
        if not self.tasks and (self.steps or self.model.scratch is not None):
            raise ValueError("name in [[tasks]] what is trained on")
        if self.warm_start and not (self.tasks or self.warm_start.tasks or self.warm_start.files):
            raise ValueError("name tasks or files for the warm start")
        if self.rollout.engine is not None and self.rollout.sync == "lora" and not self.has_adapter:
            raise ValueError(
                "an engine elsewhere is given an adapter after each step; set model.lora_rank, or "
                'rollout.sync="none"'
            )
        if self.rollout.engine is not None and self.rollout.driver == "lockstep":
            raise ValueError('an engine elsewhere needs rollout.driver="free"')
        return self

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the model left as it is."""
        return self.model.adapter is not None or self.model.lora_rank is not None


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "objective": OBJECTIVES["paper"],
        "rollout": {"prompts": 128, "group_size": 16, "temperature": 1.0},
        "update": {"updates": 16},
        "optim": {"lr": 1e-6, "warmup_steps": 20, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "agent": {
            "name": "memory",
            "reward": "strict",
            "settings": {
                "window": 8192,
                "chunk_tokens": 5000,
                "memory_tokens": 1024,
                "answer_tokens": 1024,
                "max_sections": 8,
            },
        },
    },
    "dapo": {
        "objective": OBJECTIVES["dapo"],
        "rollout": {"prompts": 32, "group_size": 16, "temperature": 1.0},
        "update": {"updates": 4},
        "optim": {"lr": 1e-6, "warmup_steps": 10, "weight_decay": 0.0, "max_grad_norm": 1.0},
    },
}
"""What a run has in common with the paper's, or with DAPO's."""


def read_config(path: Path, *, changes: Sequence[str] = ()) -> TrainConfig:
    """A run from a TOML file; `changes` such as `optim.lr=2e-6` are put into it."""
    values = read_toml(path, "config")
    try:
        return parse_config(values, changes=changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(values: Mapping[str, Any], *, changes: Sequence[str] = ()) -> TrainConfig:
    """A run from a table, checked, with its preset filled in."""
    given = dict(values)
    for change in changes:
        given = changed(given, change)
    preset = given.get("preset")
    if preset is not None:
        given = _filled(given, _without_settings_of_others(_preset(preset), given))
    return TrainConfig.parse(given)


def _preset(name: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in PRESETS:
        near = get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PRESETS)}"
        raise ConfigError(f"there is no preset {name!r}; {hint}")
    return PRESETS[name]


def _without_settings_of_others(preset: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset; settings of its agent are not those of another one."""
    agent, chosen = preset.get("agent"), given.get("agent")
    if agent is None or not isinstance(chosen, Mapping):
        return preset
    if chosen.get("name", agent["name"]) == agent["name"]:
        return preset
    return {**preset, "agent": {"reward": agent["reward"]}}


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, and the defaults of those that are not given."""
    result = {**defaults, **given}
    for name, value in defaults.items():
        theirs = given.get(name)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            result[name] = _filled(theirs, value)
    return result
