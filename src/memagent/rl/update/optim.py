"""AdamW for parameters of any precision: gradients are accumulated, and steps are taken, in float32.

    optimizer = Optimizer(model.named_parameters(), settings, num_steps=200)
    for batches in steps:
        for packs in batches:
            accumulate(policy, packs, objective)      any number of backward passes
            metrics = optimizer.step()                {"lr": 1e-5, "grad_norm": 0.7, "skipped": 0.0}
        optimizer.advance_schedule()                  the next step has the next learning rate

    parameter   bfloat16 ── backward ──▶ gradient, bfloat16 ── at once ──▶ added in float32
        ▲                                                                      │
        └── rounded, in place ── master, float32 ◀── AdamW ◀── clipped ◀───────┘

Parameters in float32 or float64 have no second copy. Parameters are updated in place, for engines that
run on the same weights. A step whose gradient is not finite is skipped. Sharded parameters (FSDP2) are
stepped shard by shard, with the norm of the whole gradient.

An optimizer owns the gradients of its parameters; `close` it before another one is created for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memagent.errors import ConfigError, RunError
from memagent.rl.settings import OptimSettings
from memagent.rl.weights.models import like, whole

EPSILON = 1e-8
MAX_SKIPPED = 3
"""Consecutive steps without a finite gradient that end a run."""
EXACT = (torch.float32, torch.float64)
"""Precisions that are stepped without a float32 copy."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""State of AdamW for each parameter."""


class Optimizer:
    """Steps the trainable ones among the given parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        settings: OptimSettings,
        *,
        num_steps: int,
    ) -> None:
        """`num_steps` is the length of the learning-rate schedule."""
        self._settings = settings
        self._num_steps = num_steps
        self._parameters = check_parameters(parameters)
        self._masters: dict[str, torch.Tensor] = {}
        """Float32 copies of parameters that have less precision."""
        self._hooks: list[Any] = []
        for name, parameter in self._parameters.items():
            if parameter.dtype not in EXACT:
                master = parameter.detach().float()
                self._masters[name] = master
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(_moving_to(master)))
        self._stepped: dict[str, torch.Tensor] = {**self._parameters, **self._masters}
        is_fused = all(tensor.is_cuda for tensor in self._stepped.values())
        self._adamw = torch.optim.AdamW(
            list(self._stepped.values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=EPSILON,
            weight_decay=settings.weight_decay,
            fused=is_fused,
            foreach=not is_fused,
        )
        self.schedule_step = 0
        """Position in the learning-rate schedule."""
        self._num_skipped = 0
        """Consecutive skipped steps."""

    def step(self) -> dict[str, float]:
        """Take one step with the gradients since the last one, and clear them.

        Returns the learning rate, the gradient norm before clipping, and whether the step was skipped
        because that norm is not finite.
        """
        tensors = list(self._stepped.values())
        total = get_total_norm([one.grad for one in tensors if one.grad is not None])
        norm = float(whole(total))
        lr = lr_at(self.schedule_step, self._settings, num_steps=self._num_steps)
        is_finite = math.isfinite(norm)
        if is_finite:
            clip_grads_with_norm_(tensors, self._settings.max_grad_norm, total)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._publish()
        self._adamw.zero_grad(set_to_none=True)
        self._num_skipped = 0 if is_finite else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED:
            raise ConfigError(
                f"the gradient was not finite in {MAX_SKIPPED} consecutive steps; start a new run with a "
                "lower `optim.lr`"
            )
        return {"lr": lr, "grad_norm": norm, "skipped": float(not is_finite)}

    def advance_schedule(self) -> None:
        """Move to the next learning rate; several steps may be taken with one."""
        self.schedule_step += 1

    def state_dict(self, *, gathered: bool = True) -> dict[str, torch.Tensor]:
        """Everything that decides the next steps, besides the parameters and their gradients.

        Keys are parameter names with the prefix `exp_avg/`, `exp_avg_sq/`, `step/` or `master/`. Shards
        are gathered, so all processes must call it; without `gathered` they stay shards.
        """
        given = whole if gathered else torch.Tensor.detach
        counts = {"schedule_step": self.schedule_step, "num_skipped": self._num_skipped}
        state = {name: torch.tensor(count) for name, count in counts.items()}
        for name, tensor in self._stepped.items():
            for key, value in self._adamw.state[tensor].items():
                state[f"{key}/{name}"] = given(value)
        for name, master in self._masters.items():
            state[f"master/{name}"] = given(master)
        return state

    def state_like(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors to read the named entries of a state into, sharded as the parameters are."""
        found = {}
        for name in names:
            key, _, parameter = name.partition("/")
            tensor = self._stepped.get(parameter)
            if tensor is None or key == "step":
                dtype = torch.float32 if key == "step" else torch.int64
                found[name] = torch.zeros((), dtype=dtype)
            else:
                found[name] = torch.zeros_like(tensor.detach())
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the state of another optimizer. The tensors of `state` are copied."""
        self._check(state)
        for name, master in self._masters.items():
            master.copy_(like(master, state[f"master/{name}"]))
        self._publish()
        moments = {
            number: {key: _moment(state[f"{key}/{name}"], tensor, key) for key in MOMENTS}
            for number, (name, tensor) in enumerate(self._stepped.items())
            if f"step/{name}" in state
        }
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": moments, "param_groups": groups})
        self.schedule_step = int(state["schedule_step"])
        self._num_skipped = int(state["num_skipped"])

    def close(self) -> None:
        """Release the gradients of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _publish(self) -> None:
        """Copy the master values, rounded, to the parameters."""
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)

    def _check(self, state: Mapping[str, torch.Tensor]) -> None:
        shapes: dict[str, torch.Size] = {
            "schedule_step": torch.Size(),
            "num_skipped": torch.Size(),
        }
        for name, tensor in self._stepped.items():
            if f"step/{name}" in state:  # a parameter that never had a gradient has no moments
                shapes |= {f"exp_avg/{name}": tensor.shape, f"exp_avg_sq/{name}": tensor.shape}
                shapes[f"step/{name}"] = torch.Size()
        shapes |= {f"master/{name}": master.shape for name, master in self._masters.items()}
        found = {name: value.shape for name, value in state.items()}
        if wrong := [name for name, _ in shapes.items() ^ found.items()]:
            raise RunError(
                f"the optimizer's state has another model or precision: {min(wrong)} differs; "
                "resume with the settings of the run"
            )


def check_parameters(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name. Raises ConfigError when there are none."""
    trainable = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    if not trainable:
        raise ConfigError(
            "the model has no trainable parameters; train all weights, or set `model.lora_rank`"
        )
    return trainable


def lr_at(step: int, settings: OptimSettings, *, num_steps: int) -> float:
    """The learning rate of a step, counted from 0.

    It rises linearly over `warmup_steps`, reaches `lr` in the step after them, and a decay ends with the
    last step.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    num_decay_steps = num_steps - 1 - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, num_decay_steps))
    return settings.lr * _share_left(progress, settings)


def _share_left(progress: float, settings: OptimSettings) -> float:
    """Fraction of the learning rate after a fraction of the decay."""
    final = settings.final_lr_share
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - final) * progress
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def _moving_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that adds a parameter's gradient to its master's and clears it."""

    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "another optimizer owns this gradient; close it first"
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move


def _moment(value: torch.Tensor, tensor: torch.Tensor, key: str) -> Any:
    """A copy, because the optimizer updates its state in place."""
    return value.clone() if key == "step" else like(tensor, value).clone()
