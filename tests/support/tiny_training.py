"""A training run so small that a test can afford several."""

import json
from pathlib import Path
from typing import Any

PROMPTS = """
empty_memory = "None."
read = "{question}\\n{section}\\nKnown: {memory}"
answer = "{question}\\nKnown: {memory}\\n\\\\boxed{}"
"""


REWARD = """
async def score(task, outcome):
    return len(outcome.answer) % 3 / 2
"""
"""Meaningless, but different between rollouts."""
OFFLOADED = """
from memagent.rl.agents.offload import offload

def length(text):
    return len(text)

async def score(task, outcome):
    return await offload(length, outcome.answer) % 3 / 2
"""
"""The same, computed in the pool."""


def tiny_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of seconds; `folder` gets the files that it needs."""
    prompts, reward = folder / "prompts.toml", folder / "reward.py"
    prompts.write_text(PROMPTS)
    reward.write_text(REWARD)
    values: dict[str, Any] = {
        "seed": 3,
        "steps": 3,
        "model": {
            "scratch": {
                "vocab_size": 320, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "window": 256,
            }
        },
        "agent": {
            "name": "memory",
            "reward": f"{reward}:score",
            "settings": {
                "prompts": str(prompts), "window": 256, "chunk_tokens": 24, "memory_tokens": 32,
                "answer_tokens": 12,
            },
        },
        "tasks": [{"tasks": ["small/colours"], "settings": {"sentences": 4}}],
        "rollout": {"prompts": 3, "group_size": 4, "driver": "lockstep"},
        "update": {"updates": 2, "max_tokens": 1024},
        "objective": {"kl_coef": 1e-3, "dynamic_sampling": True},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "warm_start": {"steps": 6, "batch": 4, "optim": {"lr": 3e-3}},
        "validation": {
            "every": 2,
            "num": 6,
            "tasks": [{"tasks": ["small/colours"], "settings": {"sentences": 4}}],
        },
        "checkpoint": {"every": 2, "keep": 2},
        "logging": {"trackers": [], "rollouts": 2},
    }  # fmt: skip
    return {**values, **changes}


def tiny_config(folder: Path, **changes: Any) -> Path:
    """The settings as a file."""
    values = {
        name: value for name, value in tiny_run(folder, **changes).items() if value is not None
    }
    path = folder / "run.toml"
    path.write_text("\n".join(f"{name} = {_toml(value)}" for name, value in values.items()))
    return path


def _toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
