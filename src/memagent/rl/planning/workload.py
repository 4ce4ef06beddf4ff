"""The calls and tokens of a training step, from the config and a few assumptions.

    rollout      read      read      read      answer          calls follow each other
    row         [instruction question section | memory reply]
                 shared by the group            own of a rollout

What the rollouts of a group share is computed once, in generation and in the update, as far as it stands
before the memory in the prompt: all of the section with our prompts, hardly anything with the paper's. The
first prompt, whose memory is empty, is shared with any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from memagent.agent.prompts import open_prompts
from memagent.config import LONGEST, Settings
from memagent.data.manifest import read_manifest
from memagent.errors import ConfigError
from memagent.rl.agents.memory import MemorySettings
from memagent.rl.rollouts.tasks import TaskSource
from memagent.rl.settings import TrainConfig

CHARS_PER_TOKEN = 4.2
"""Of English prompts."""
TEMPLATE_TOKENS = 20
"""What a chat template adds to a prompt."""
DOC_TOKENS = 140
"""Mean tokens of a HotpotQA document: 28,069 in 200."""
NATURAL_FILL = 0.93
"""How full sections are that end at a sentence: 4,096 tokens are five sections of at most 1,024."""
MOST_CALLS = 1_000_000
"""Of a step: its rollouts are simulated call by call."""
PLAIN_PROMPT_TOKENS = 300
"""Prompt of an agent whose prompts are not known."""


class PlanAssumptions(Settings):
    """What a config does not say about a run. Defaults are what runs of this project measured."""

    text_tokens: int | None = Field(default=None, ge=1, le=LONGEST)
    """Tokens of the text of a task; from the lengths of the tasks, or the manifests of their files, when not
    given."""
    question_tokens: int = Field(default=30, ge=0, le=LONGEST)
    """Tokens of a question."""
    reply_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a reply to a section; a quarter of its limit when not given, where replies of the
    trained readers end."""
    answer_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of an answer; a quarter of its limit, and at most 64, when not given."""
    reply_sigma: float = Field(default=1.15, ge=0, le=10)
    """Skew of reply lengths: the standard deviation of their logarithm. 1.15 gives the measured share of
    replies that reach their limit."""
    reply_correlation: float = Field(default=0.3, ge=0, le=1)
    """How much of that skew all replies of a rollout have in common."""
    signal: float = Field(default=0.65, gt=0, le=1)
    """Share of the groups whose rewards differ; without a KL term only these are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """One call of a rollout."""

    shared_tokens: float
    """Prompt tokens that are the same in all rollouts of the group, from the start of the prompt."""
    own_tokens: float
    """Prompt tokens after them."""
    reply_tokens: float
    """Mean length of the reply."""
    max_reply: int

    @property
    def prompt_tokens(self) -> float:
        """Of the whole prompt."""
        return self.shared_tokens + self.own_tokens

    @property
    def row_tokens(self) -> float:
        """Prompt and reply."""
        return self.prompt_tokens + self.reply_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step."""

    prompts: int
    group_size: int
    calls: tuple[CallShape, ...]
    """Of one rollout, in order."""
    is_sharing: bool
    """Whether the update computes shared prefixes once."""
    trained_share: float
    """Share of the groups that the update is computed for."""
    extra_groups: float
    """Groups sampled for each one that is kept, with dynamic sampling."""

    @property
    def num_rollouts(self) -> float:
        """Of a step, those that are replaced included."""
        return self.prompts * self.group_size * self.extra_groups

    @property
    def num_calls(self) -> float:
        return self.num_rollouts * len(self.calls)

    @property
    def rollout_prompt_tokens(self) -> float:
        """Prompts of one rollout."""
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def rollout_reply_tokens(self) -> float:
        """Replies of one rollout."""
        return sum(call.reply_tokens for call in self.calls)

    @property
    def prompt_tokens(self) -> float:
        return self.num_rollouts * self.rollout_prompt_tokens

    @property
    def reply_tokens(self) -> float:
        return self.num_rollouts * self.rollout_reply_tokens

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens that generation computes."""
        own = sum(call.own_tokens for call in self.calls)
        shared = sum(call.shared_tokens for call in self.calls)
        return self.num_rollouts * (own + shared / self.group_size)

    @property
    def trained_rollouts(self) -> float:
        return self.prompts * self.group_size * self.trained_share

    @property
    def trained_tokens(self) -> float:
        """Tokens of all rows of the update."""
        return self.trained_rollouts * sum(call.row_tokens for call in self.calls)

    @property
    def computed_tokens(self) -> float:
        """Tokens that the update computes: shared prefixes once."""
        return sum(tokens for tokens, _ in self.update_parts())

    @property
    def sharing(self) -> float:
        """How many times fewer tokens the update computes than its rows have."""
        return self.trained_tokens / self.computed_tokens

    def update_parts(self) -> list[tuple[float, float]]:
        """Tokens that the update computes, each with how many tokens it sees on average."""
        parts = []
        for call in self.calls:
            own = call.own_tokens + call.reply_tokens
            rows = self.trained_rollouts
            if self.is_sharing:
                parts.append((rows / self.group_size * call.shared_tokens, call.shared_tokens / 2))
                parts.append((rows * own, call.shared_tokens + own / 2))
            else:
                parts.append((rows * call.row_tokens, call.row_tokens / 2))
        return parts


def plan_workload(config: TrainConfig, assumed: PlanAssumptions) -> Workload:
    """The work of one step."""
    objective, rollout = config.objective, config.rollout
    has_all = objective.kl_coef > 0 or objective.dynamic_sampling
    return Workload(
        prompts=rollout.prompts,
        group_size=rollout.group_size,
        calls=tuple(_calls(config, assumed)),
        is_sharing=config.update.share_prefixes,
        trained_share=1.0 if has_all else assumed.signal,
        extra_groups=1 / assumed.signal if objective.dynamic_sampling else 1.0,
    )


def _calls(config: TrainConfig, assumed: PlanAssumptions) -> list[CallShape]:
    if config.agent.name != "memory":
        return _plain_calls(config, assumed)
    settings = MemorySettings.model_validate({"prompts": "boxed", **config.agent.settings})
    text = text_tokens(config.tasks, assumed)
    filled = 1.0 if settings.section_ends == "exact" else NATURAL_FILL
    num_sections = math.ceil(text / settings.chunk_tokens / filled)
    if settings.max_sections is not None:
        num_sections = min(num_sections, settings.max_sections)
    _check_size(config, num_sections + 1)
    section = min(text / num_sections, settings.chunk_tokens)
    return reading_calls(settings, assumed, num_sections=num_sections, section_tokens=section)


def _check_size(config: TrainConfig, num_calls: int) -> None:
    """Raise ConfigError where a step has more calls than can be simulated."""
    num = config.rollout.prompts * config.rollout.group_size * num_calls
    if num > MOST_CALLS:
        raise ConfigError(
            f"a step has {num:,} calls, and at most {MOST_CALLS:,} can be planned; lower `prompts`, "
            "`group_size` or `text_tokens`"
        )


def reading_calls(
    settings: MemorySettings,
    assumed: PlanAssumptions,
    *,
    num_sections: int,
    section_tokens: float,
) -> list[CallShape]:
    """The calls of a reading: its sections, then the answer."""
    prompts = open_prompts(settings.prompts)
    limit = settings.memory_tokens + settings.reasoning_tokens
    reply = min(assumed.reply_tokens or limit / 4, limit)
    slots = {
        "question": float(assumed.question_tokens),
        "section": section_tokens,
        "memory": min(reply, settings.memory_tokens),
    }
    answer_limit = settings.answer_tokens + settings.reasoning_tokens
    answer = min(assumed.answer_tokens or min(64, answer_limit / 4), answer_limit)
    read = _call(prompts.read, slots, reply, limit)
    last = _call(prompts.answer, slots, answer, answer_limit)
    return [_without_memory(read, slots["memory"]), *[read] * (num_sections - 1), last]


def _call(template: str, slots: dict[str, float], reply: float, max_reply: int) -> CallShape:
    """A call of a template; what stands before the memory is shared."""
    before, _, after = template.partition("{memory}")
    return CallShape(
        shared_tokens=_tokens(before, slots) + TEMPLATE_TOKENS,
        own_tokens=_tokens(after, slots) + slots["memory"],
        reply_tokens=reply,
        max_reply=max_reply,
    )


def _without_memory(read: CallShape, memory: float) -> CallShape:
    """The first section: the memory is still empty, so the group shares the whole prompt."""
    prompt = read.prompt_tokens - memory
    return replace(read, shared_tokens=prompt, own_tokens=0.0)


def _tokens(template: str, slots: dict[str, float]) -> float:
    filled = sum(size * template.count("{" + name + "}") for name, size in slots.items())
    return filled + len(template) / CHARS_PER_TOKEN


def _plain_calls(config: TrainConfig, assumed: PlanAssumptions) -> list[CallShape]:
    """The calls of another agent: its turns, as far as its settings name them."""
    settings = config.agent.settings
    turns = max(1, int(settings.get("max_turns", 1)) // 2)
    _check_size(config, turns)
    limit = int(settings.get("max_tokens", config.rollout.max_tokens))
    reply = min(assumed.reply_tokens or limit / 4, limit)
    text = text_tokens(config.tasks, assumed) if turns == 1 else 0.0
    return [
        CallShape(
            shared_tokens=PLAIN_PROMPT_TOKENS + text if turn == 0 else 0.0,
            own_tokens=assumed.question_tokens,
            reply_tokens=reply,
            max_reply=limit,
        )
        for turn in range(turns)
    ]


def text_tokens(sources: Sequence[TaskSource], assumed: PlanAssumptions) -> float:
    """Mean tokens of the texts, by the weights of their sources."""
    if assumed.text_tokens is not None:
        return float(assumed.text_tokens)
    weighed = [(source.weight, length) for source in sources if (length := _length(source))]
    total = sum(weight for weight, _ in weighed)
    return sum(weight * length for weight, length in weighed) / total if weighed else 1024.0


def _length(source: TaskSource) -> float | None:
    """Mean tokens of the texts of a source; None if they are not known."""
    if source.docs is not None:
        return DOC_TOKENS * sum(source.docs) / len(source.docs)
    if source.tokens is not None:
        return sum(source.tokens) / len(source.tokens)
    manifests = [read_manifest(Path(file)) for file in source.files]
    means = [(one.get("tokens") or {}).get("mean") for one in manifests if one is not None]
    known = [float(mean) for mean in means if mean]
    return sum(known) / len(known) if known else None
