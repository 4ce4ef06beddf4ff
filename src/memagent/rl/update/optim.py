"""AdamW for parameters of any precision: gradients are added up, and steps are made, in float32.

    optimizer = Optimizer(model.named_parameters(), settings, num_steps=200)
    for packs in batches:
        accumulate(policy, packs, objective)      any number of backward passes
        numbers = optimizer.step()                {"lr": 1e-5, "grad_norm": 0.7, "skipped": 0.0}

    parameter   bfloat16 ── backward ──▶ gradient, bfloat16 ── at once ──▶ added in float32
        ▲                                                                      │
        └── rounded, in place ── master, float32 ◀── AdamW ◀── clipped ◀───────┘

Parameters in float32 or float64 have no second copy. Values are put into parameters in place: an engine
that runs on the same weights sees them, and no address changes. A gradient that is not finite changes
nothing at all. Sharded parameters (FSDP2) are stepped shard by shard, with the norm of the whole.

An optimizer takes the gradients of its parameters; `close` it before another is made for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memagent.errors import ConfigError, RunError
from memagent.rl.settings import OptimSettings

MAX_SKIPPED = 3
"""Steps in a row without a finite gradient that end a run."""
EXACT = (torch.float32, torch.float64)
"""Parameters in these are stepped as they are."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter."""


class Optimizer:
    """Steps the trainable parameters among those given; names are those of the model."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        settings: OptimSettings,
        *,
        num_steps: int,
    ) -> None:
        """`num_steps` is how many steps the learning rate is planned for."""
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
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=is_fused,
            foreach=not is_fused,
        )
        self._num_done = 0
        self._num_skipped = 0
        """In a row, until now."""

    def step(self, number: int | None = None) -> dict[str, float]:
        """Take one step with the gradients since the last, and clear them.

        `number` is where in the plan of the learning rate this is, for runs that step several times at
        the same place; the steps taken so far when not given. Tells the learning rate, the length of the
        gradient before it was clipped, and whether the step was left out because that is not finite.
        """
        tensors = list(self._stepped.values())
        total = get_total_norm([one.grad for one in tensors if one.grad is not None])
        norm = float(_whole(total))
        place = self._num_done if number is None else number
        lr = lr_at(place, self._settings, num_steps=self._num_steps)
        is_finite = math.isfinite(norm)
        if is_finite:
            clip_grads_with_norm_(tensors, self._settings.max_grad_norm, total)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._publish()
            self._num_done += 1
        self._adamw.zero_grad(set_to_none=True)
        self._num_skipped = 0 if is_finite else self._num_skipped + 1
        if self._num_skipped == MAX_SKIPPED:
            raise ConfigError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row; lower optim.lr, and go on "
                "from a checkpoint before that"
            )
        return {"lr": lr, "grad_norm": norm, "skipped": float(not is_finite)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that decides the next steps, beside the parameters and their gradients.

        Names are those of the parameters with `exp_avg/`, `exp_avg_sq/`, `step/` or `master/` before
        them. Shards are gathered, so all processes must call it.
        """
        counts = {"num_done": self._num_done, "num_skipped": self._num_skipped}
        state = {name: torch.tensor(count) for name, count in counts.items()}
        for name, tensor in self._stepped.items():
            for key, value in self._adamw.state[tensor].items():
                state[f"{key}/{name}"] = _whole(value)
        for name, master in self._masters.items():
            state[f"master/{name}"] = _whole(master)
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on as the optimizer would have whose state this is. Nothing of `state` is kept."""
        self._check(state)
        for name, master in self._masters.items():
            master.copy_(_as(master, state[f"master/{name}"]))
        self._publish()
        moments = {
            number: {key: _moment(state[f"{key}/{name}"], tensor, key) for key in MOMENTS}
            for number, (name, tensor) in enumerate(self._stepped.items())
            if f"step/{name}" in state
        }
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": moments, "param_groups": groups})
        self._num_done = int(state["num_done"])
        self._num_skipped = int(state["num_skipped"])

    def close(self) -> None:
        """Leave the gradients of the parameters to others."""
        for hook in self._hooks:
            hook.remove()

    def _publish(self) -> None:
        """Put the masters' values into the parameters, rounded."""
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)

    def _check(self, state: Mapping[str, torch.Tensor]) -> None:
        shapes: dict[str, torch.Size] = {"num_done": torch.Size(), "num_skipped": torch.Size()}
        for name, tensor in self._stepped.items():
            if f"step/{name}" in state:  # a parameter that never had a gradient has no moments
                shapes |= {f"exp_avg/{name}": tensor.shape, f"exp_avg_sq/{name}": tensor.shape}
                shapes[f"step/{name}"] = torch.Size()
        shapes |= {f"master/{name}": master.shape for name, master in self._masters.items()}
        found = {name: value.shape for name, value in state.items()}
        if wrong := [name for name, _ in shapes.items() ^ found.items()]:
            raise RunError(
                f"the optimizer's state is of another model or precision: {min(wrong)} differs; "
                "resume with the settings of the run"
            )


def check_parameters(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> dict[str, torch.nn.Parameter]:
    """The trainable ones by name. Raises ConfigError when there is none."""
    trainable = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    if not trainable:
        raise ConfigError(
            "the model has no parameter to train; train all weights, or set model.lora_rank"
        )
    return trainable


def lr_at(step: int, settings: OptimSettings, *, num_steps: int) -> float:
    """The learning rate of a step; steps are counted from 0.

    In the warm-up it rises by the same amount each step, and its last step is followed by the full rate.
    A falling schedule reaches its end with the last step.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    num_falling = num_steps - 1 - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, num_falling))
    return settings.lr * _share_left(progress, settings)


def _share_left(progress: float, settings: OptimSettings) -> float:
    """Share of the learning rate after the given share of the steps."""
    final = settings.final_lr_share
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - final) * progress
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def _moving_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """What is done with a parameter's gradient after each backward pass."""

    def move(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "another optimizer took this gradient; close that one first"
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as(pattern: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The whole tensor, sharded as the pattern is."""
    if isinstance(pattern, DTensor):
        return distribute_tensor(
            whole.to(pattern.device), pattern.device_mesh, list(pattern.placements)
        )
    return whole


def _moment(value: torch.Tensor, tensor: torch.Tensor, key: str) -> Any:
    """A copy, because the optimizer changes what it has in place."""
    return value.clone() if key == "step" else _as(tensor, value).clone()
