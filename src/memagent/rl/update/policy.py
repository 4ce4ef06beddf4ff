"""Log-probabilities of sampled tokens under a transformers model, over packed trees, with gradients.

    policy = Policy(model)
    scores = policy(pack)                                     scores.logprobs: one per target
    stats = accumulate(policy, packs, objective)              forward, loss and backward, pack by pack

The model's own modules and parameters are used as they are, so full fine-tuning, adapters and sharded
parameters need nothing special. Attention is that of `attention.py`. The language-model head runs only
at places that predict a target, a block of places at a time, and is recomputed in the backward pass: the
logits of a whole pack never exist.

Dropout is always off: it would make ratios differ from 1 for unchanged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memagent.engines.local.loading import check_full_attention
from memagent.engines.yarn import ARCHITECTURES
from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.attention import (
    BLOCK,
    Attention,
    attention_arguments,
    fits_parts,
    use_tree_attention,
)
from memagent.rl.update.loss import LossInputs, LossStats, merged, policy_loss
from memagent.rl.update.packing import Pack

# --- log-probabilities of chosen tokens from logits, with a gradient in two passes over the logits -----

# `place_M` is the row of the logits that predicts each target: one place may predict several. Logits stay in the model's
# precision; sums are taken in float32 or better, and no tensor of the logits' size is kept in it. With `fused` each pass
# is one kernel, compiled at first use.


def chosen_logprobs(
    logits_PV: torch.Tensor,
    place_M: torch.Tensor,
    ids_M: torch.Tensor,
    temperature: float = 1.0,
    *,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the log-sum-exp of each place."""
    apply: Any = _Chosen.apply  # untyped in torch
    logprobs_M, lse_P = apply(logits_PV, place_M, ids_M, temperature, fused)
    return logprobs_M, lse_P


@torch.no_grad()
def entropies(
    logits_PV: torch.Tensor, lse_P: torch.Tensor, temperature: float = 1.0, *, fused: bool = False
) -> torch.Tensor:
    """Entropy of the distribution of each place."""
    entropies_P: torch.Tensor = _run(_entropies, fused)(logits_PV, lse_P, temperature)
    return entropies_P


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_PV: torch.Tensor,
        place_M: torch.Tensor,
        ids_M: torch.Tensor,
        temperature: float,
        fused: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse_P = _run(_lse, fused)(logits_PV, temperature)
        logprobs_M = _scaled(logits_PV[place_M, ids_M], temperature) - lse_P[place_M]
        ctx.save_for_backward(logits_PV, place_M, ids_M, lse_P)
        ctx.settings = (temperature, fused)
        ctx.mark_non_differentiable(lse_P)
        return logprobs_M, lse_P

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        logits_PV, place_M, ids_M, lse_P = ctx.saved_tensors
        temperature, fused = ctx.settings
        grad_M = grad_M / temperature
        grad_P = torch.zeros_like(lse_P).index_add_(0, place_M, grad_M)
        grad_PV = _run(_others, fused)(logits_PV, lse_P, grad_P, temperature)
        grad_PV.index_put_((place_M, ids_M), grad_M.to(grad_PV.dtype), accumulate=True)
        return grad_PV, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _lse(logits_PV: torch.Tensor, temperature: float) -> torch.Tensor:
    return _scaled(logits_PV, temperature).logsumexp(dim=-1)


def _others(
    logits_PV: torch.Tensor, lse_P: torch.Tensor, grad_P: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The part of the gradient that goes to every token of a place, in the precision of the logits."""
    probs_PV = (_scaled(logits_PV, temperature) - lse_P[:, None]).exp()
    return (probs_PV * -grad_P[:, None]).to(logits_PV.dtype)


def _entropies(logits_PV: torch.Tensor, lse_P: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled_PV = _scaled(logits_PV, temperature)
    return lse_P - ((scaled_PV - lse_P[:, None]).exp() * scaled_PV).sum(dim=-1)


def _run(function: Callable[..., torch.Tensor], fused: bool) -> Callable[..., torch.Tensor]:
    return _compiled(function) if fused else function


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function)


# --- the policy -----------------------------------------------------------------------------------


PACKED = (*ARCHITECTURES, "mistral")
"""`model_type` of models whose packs score as their rows do. Others mix tokens of several rows (linear attention,
convolutions), or scale, cap or add to what is computed here."""
HEAD_PLACES = 1024
"""Places whose logits are computed at once."""


class Scores(NamedTuple):
    """Scores of the targets of a pack, in their order, in float32 or better."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    """The entropy of the distribution that each target was sampled from; without gradient."""


class Policy(nn.Module):
    """A causal language model that scores packs.

    `temperature` is that of the rollouts: log-probabilities are those of the distribution that tokens
    were sampled from. `checkpointing` recomputes the activations of each layer in the backward pass, for
    less memory and about a third more time. `attention` defaults to "blocks" on a GPU without `compiled`,
    else to "parts", see `attention.py`. `compiled` compiles the layers, which takes about a minute and
    pays off in long runs on a GPU. `device` is where the model computes, if that is not where its parameters
    are now: shards may be kept in CPU memory. Raises ConfigError for models that packs do not fit.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        checkpointing: bool = False,
        attention: Attention | None = None,
        compiled: bool = False,
        head_places: int = HEAD_PLACES,
        device: str | None = None,
    ) -> None:
        super().__init__()
        _check_model(decoder_of(model).config)
        self.model: Any = model
        self.temperature = temperature
        self._device = None if device is None else torch.device(device)
        self._head_places = head_places
        self._checkpointing = checkpointing
        if checkpointing:
            decoder_of(model).gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        is_eager = self.device.type == "cuda" and not compiled
        self._attention = attention or ("blocks" if is_eager else "parts")
        use_tree_attention(model)
        self._compiled = compiled
        if compiled:
            for layer in decoder_of(model).layers:
                layer.compile()
        self.train()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        parameter: torch.Tensor = next(self.model.parameters())
        return self._device or parameter.device

    def train(self, mode: bool = True) -> Policy:
        """Both modes compute the same; only layers get the mode, for checkpointing."""
        super().train(False)
        for layer in decoder_of(self.model).layers:
            layer.training = mode and self._checkpointing
        return self

    def forward(self, pack: Pack, *, with_entropy: bool = False) -> Scores:
        """Scores of a pack's targets."""
        return self.scores_of(self._hidden(pack), pack, with_entropy=with_entropy)

    def scores_of(
        self, hidden_ND: torch.Tensor, pack: Pack, *, with_entropy: bool = False
    ) -> Scores:
        """Scores of a pack's targets from the last hidden states."""
        places_P, inverse_M = np.unique(pack.targets.places, return_inverse=True)
        ids_M = torch.from_numpy(pack.targets.ids).to(hidden_ND.device)
        place_M = torch.from_numpy(inverse_M).to(hidden_ND.device)
        hidden_PD = hidden_ND[torch.from_numpy(places_P).to(hidden_ND.device)]
        logprobs, entropies = [], []
        for first in range(0, max(len(places_P), 1), self._head_places):
            end = min(first + self._head_places, len(places_P))
            a, b = np.searchsorted(inverse_M, [first, end]).tolist()
            arguments = (hidden_PD[first:end], place_M[a:b] - first, ids_M[a:b], with_entropy)
            if torch.is_grad_enabled():
                some = checkpoint(self._head, *arguments, use_reentrant=False)
            else:
                some = self._head(*arguments)
            logprobs.append(some[0])
            entropies.append(some[1])
        return Scores(torch.cat(logprobs), torch.cat(entropies) if with_entropy else None)

    def _hidden(self, pack: Pack) -> torch.Tensor:
        """The last hidden state of every token."""
        device, attention = self.device, self._attention_for(pack)
        ids, positions, until = pack.ids, pack.positions, pack.until
        if attention == "blocks":
            padding = -len(ids) % BLOCK
            added = np.arange(len(ids), len(ids) + padding)
            ids = np.pad(ids, (0, padding))
            positions = np.pad(positions, (0, padding))
            until = np.concatenate([until, added + 1])  # each sees only itself
        output = decoder_of(self.model)(
            input_ids=torch.from_numpy(ids).to(device)[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            use_cache=False,
            **attention_arguments(until, attention, device),
        )
        hidden_ND: torch.Tensor = output.last_hidden_state[0]
        return hidden_ND

    def _attention_for(self, pack: Pack) -> Attention:
        """The chosen attention if it can compute the pack: on a GPU, parts need half precision and few
        levels."""
        size = next(self.model.parameters()).element_size()
        if self.device.type == "cuda" and (size > 2 or not fits_parts(pack.until)):
            return "blocks"
        return self._attention

    def _head(
        self,
        hidden_PD: torch.Tensor,
        place_M: torch.Tensor,
        ids_M: torch.Tensor,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits_PV = self.model.get_output_embeddings()(hidden_PD)
        logprobs_M, lse_P = chosen_logprobs(
            logits_PV, place_M, ids_M, self.temperature, fused=self._compiled
        )
        if not with_entropy:
            return logprobs_M, None
        entropies_P = entropies(logits_PV, lse_P, self.temperature, fused=self._compiled)
        return logprobs_M, entropies_P[place_M]


def decoder_of(model: Any) -> Any:
    """The layers of a model without its head, with or without peft around it."""
    return model.get_decoder()


def _check_model(config: Any) -> None:
    if config.model_type not in PACKED:
        raise ConfigError(
            f"a {config.model_type} model cannot be trained: packs are known to score as their rows do only for "
            f"{', '.join(PACKED)}"
        )
    check_full_attention(config, f"the {config.model_type} model")


def score(policy: Policy, packs: Sequence[Pack]) -> list[torch.Tensor]:
    """Log-probabilities of the targets of packs, without gradient, for old or reference weights."""
    with torch.no_grad():
        return [policy(pack).logprobs for pack in packs]


def accumulate(
    policy: Policy,
    packs: Sequence[Pack],
    objective: ObjectiveSettings,
    *,
    old: Sequence[torch.Tensor] | None = None,
    reference: Sequence[torch.Tensor] | None = None,
    start: Sequence[torch.Tensor] | None = None,
    with_entropy: bool = False,
    scale: float = 1.0,
) -> LossStats:
    """Add the gradient of some packs of a step to the parameters; their statistics.

    `old`, `reference` and `start` are results of `score` for the same packs. `scale` is the number of processes
    where gradients are averaged over processes: losses are sums, so gradients must be summed.
    """
    return merged(
        _each(
            policy, packs, objective, old, reference, start, with_entropy=with_entropy, scale=scale
        )
    )


def measure(
    policy: Policy,
    packs: Sequence[Pack],
    objective: ObjectiveSettings,
    *,
    old: Sequence[torch.Tensor] | None = None,
    start: Sequence[torch.Tensor] | None = None,
) -> LossStats:
    """The statistics of `accumulate`, for packs whose gradient is zero and is not computed."""
    with torch.no_grad():
        return merged(_each(policy, packs, objective, old, None, start, with_entropy=True))


def _each(
    policy: Policy,
    packs: Sequence[Pack],
    objective: ObjectiveSettings,
    old: Sequence[torch.Tensor] | None,
    reference: Sequence[torch.Tensor] | None,
    start: Sequence[torch.Tensor] | None,
    *,
    with_entropy: bool,
    scale: float = 1.0,
) -> Iterator[LossStats]:
    """The statistics of each pack; with gradients enabled, its gradient is added to the parameters."""
    for number, pack in enumerate(packs):
        scores = policy(pack, with_entropy=with_entropy)
        behaviour_M, advantages_M, weights_M = (
            torch.from_numpy(values).to(scores.logprobs)
            for values in (pack.targets.behaviour, pack.targets.advantages, pack.targets.weights)
        )
        inputs = LossInputs(
            logprobs=scores.logprobs,
            behaviour=behaviour_M,
            advantages=advantages_M,
            old=None if old is None else old[number],
            reference=None if reference is None else reference[number],
            start=None if start is None else start[number],
            rows=torch.from_numpy(pack.targets.rows).to(scores.logprobs.device),
        )
        result = policy_loss(inputs, weights_M, objective, entropies=scores.entropies)
        if torch.is_grad_enabled():
            torch.autograd.backward(result.loss * scale)
        yield result.stats
