"""Log-probabilities of sampled tokens under a transformers model, over packed trees, with gradients.

    policy = Policy(model)
    scores = policy(pack)                                     scores.logprobs: one per target
    stats = accumulate(policy, packs, objective)              forward, loss and backward, pack by pack

The model's own modules and parameters are used as they are, so full fine-tuning, adapters and sharded
parameters need nothing special. Attention is that of `tree_attention.py`. The language-model head runs only where a sampled token is predicted, some
hundred places at a time, and is computed again in the backward pass: logits of a whole pack never
exist.

Dropout is never on. It would make ratios differ from 1 where nothing has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memagent.rl.settings import ObjectiveSettings
from memagent.rl.update.attention.parts import fits_parts
from memagent.rl.update.attention.tree import (
    BLOCK,
    Attention,
    attention_arguments,
    use_tree_attention,
)
from memagent.rl.update.logprobs import chosen_logprobs, entropies
from memagent.rl.update.loss import LossStats, merged, policy_loss
from memagent.rl.update.packing import Pack

HEAD_PLACES = 1024
"""Places whose logits exist at once."""


class Scores(NamedTuple):
    """What the policy says about the targets of a pack, in their order. In float32 or better."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    """Of the distribution each target was drawn from; without gradient."""


class Policy(nn.Module):
    """A causal language model that scores packs.

    `temperature` is the one that replies are drawn with: log-probabilities are those of the
    distribution that tokens were drawn from. `checkpointing` computes each layer's activations again
    in the backward pass, which needs less memory and a third more time. `attention` is "blocks" on a GPU
    whose layers are not compiled and else "parts", see `tree_attention.py`. `compiled` fuses what layers compute,
    which is worth its minute of compilation for long runs on a GPU.
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
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.temperature = temperature
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
        parameter: torch.Tensor = next(self.model.parameters())
        return parameter.device

    def train(self, mode: bool = True) -> Policy:
        """Training and evaluation compute the same; layers alone are told, for checkpointing."""
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
        places, which_M = np.unique(pack.targets.places, return_inverse=True)
        ids_M = torch.from_numpy(pack.targets.ids).to(hidden_ND.device)
        which = torch.from_numpy(which_M).to(hidden_ND.device)
        hidden_PD = hidden_ND[torch.from_numpy(places).to(hidden_ND.device)]
        logprobs, entropies = [], []
        for first in range(0, max(len(places), 1), self._head_places):
            end = min(first + self._head_places, len(places))
            a, b = np.searchsorted(which_M, [first, end]).tolist()
            arguments = (hidden_PD[first:end], which[a:b] - first, ids_M[a:b], with_entropy)
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
            places = np.arange(len(ids), len(ids) + padding)
            ids = np.pad(ids, (0, padding))
            positions = np.pad(positions, (0, padding))
            until = np.concatenate([until, places + 1])  # each sees itself alone
        output = decoder_of(self.model)(
            input_ids=torch.from_numpy(ids).to(device)[None],
            position_ids=torch.from_numpy(positions).to(device)[None],
            use_cache=False,
            **attention_arguments(until, attention, device),
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _attention_for(self, pack: Pack) -> Attention:
        """The attention that was chosen, where there is one for the pack: a GPU has parts only of half
        precision."""
        parameter = next(self.model.parameters())
        if parameter.is_cuda and (parameter.element_size() > 2 or not fits_parts(pack.until)):
            return "blocks"
        return self._attention

    def _head(
        self,
        hidden_PD: torch.Tensor,
        which_M: torch.Tensor,
        ids_M: torch.Tensor,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits_PV = self.model.get_output_embeddings()(hidden_PD)
        logprobs_M, total_P = chosen_logprobs(
            logits_PV, which_M, ids_M, self.temperature, fused=self._compiled
        )
        if not with_entropy:
            return logprobs_M, None
        found_P = entropies(logits_PV, total_P, self.temperature, fused=self._compiled)
        return logprobs_M, found_P[which_M]


def decoder_of(model: Any) -> Any:
    """The layers of a model without its head, with or without peft around it."""
    return model.get_decoder()


def score(policy: Policy, packs: Sequence[Pack]) -> list[torch.Tensor]:
    """Log-probabilities of the targets of packs, without gradients: of old or reference weights."""
    with torch.no_grad():
        return [policy(pack).logprobs for pack in packs]


def accumulate(
    policy: Policy,
    packs: Sequence[Pack],
    objective: ObjectiveSettings,
    *,
    old: Sequence[torch.Tensor] | None = None,
    reference: Sequence[torch.Tensor] | None = None,
    with_entropy: bool = False,
    scale: float = 1.0,
) -> LossStats:
    """Add the gradient of some packs of a step to the parameters; their statistics.

    `old` and `reference` are what `score` gave for the same packs. `scale` is the number of processes
    where gradients are averaged over processes: losses are sums, so they must be added.
    """
    found = []
    for number, pack in enumerate(packs):
        scores = policy(pack, with_entropy=with_entropy)
        behaviour, advantages, weights = (
            torch.from_numpy(values).to(scores.logprobs)
            for values in (pack.targets.behaviour, pack.targets.advantages, pack.targets.weights)
        )
        result = policy_loss(
            scores.logprobs,
            behaviour,
            advantages,
            weights,
            objective,
            old=None if old is None else old[number],
            reference=None if reference is None else reference[number],
            entropies=scores.entropies,
        )
        torch.autograd.backward(result.loss * scale)
        found.append(result.stats)
    return merged(found)
