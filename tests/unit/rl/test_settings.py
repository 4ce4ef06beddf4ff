"""Settings of a run: what is wrong is told in a sentence that helps; presets fill what is not set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memagent.errors import ConfigError
from memagent.rl.settings import PRESETS, parse_config, read_config

LEAST: dict[str, Any] = {
    "model": {"source": "smollm2-135m"},
    "tasks": [{"tasks": ["ruler/niah_single_1"], "tokens": ["4k"]}],
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rolout.prompts=4", "rolout"),
        ("rollout.promts=4", "promts"),
        ("rollout.group_size=1", "use at least 2"),
        ("update.updates=17", "lower updates or raise prompts"),
        ("objective.loss_mean=constant", "constant_tokens"),
        ("objective.clip_low=1.5", "clip_low"),
        ("optim.betas=[0.9, 1.0]", "below 1"),
        ("preset=papers", "did you mean paper?"),
        ("tasks.0.tasks=['ruler/niah_singel_1']", "did you mean ruler/niah_single_1?"),
        ("tasks.0.tokens=['4kb']", "write it as 8192 or 8k"),
        ("tasks=[]", "[[tasks]]"),
        ("steps=0", "trains nothing"),
        ("model.scratch={}", "either a source or scratch"),
        ("rollout.engine=openai:x", "model.lora_rank"),
        ("rollout.driver=lokstep", "lockstep"),
        ("warm_start={tasks=[{tasks=['arithmetic']}], files=['a.jsonl']}", "either tasks or files"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(change: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(LEAST, changes=[change])
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_preset_fills_what_the_file_does_not_set() -> None:
    config = parse_config({**LEAST, "preset": "paper", "optim": {"lr": 5e-6}})
    assert (config.rollout.prompts, config.rollout.group_size) == (128, 16)
    assert config.update.updates == 16
    assert (config.optim.lr, config.optim.warmup_steps) == (5e-6, 20)
    assert (config.objective.kl_coef, config.objective.clip_high) == (1e-3, 0.2)
    assert not config.objective.scale_by_std
    assert config.agent.settings["chunk_tokens"] == 5000
    assert config.agent.settings["max_sections"] == 8
    assert config.agent.reward == "strict"


def test_dapo_clips_higher_and_replaces_groups() -> None:
    objective = parse_config({**LEAST, "preset": "dapo"}).objective
    assert (objective.clip_high, objective.kl_coef) == (0.28, 0.0)
    assert objective.dynamic_sampling
    assert objective.overlong_tokens


def test_settings_of_a_presets_agent_are_not_those_of_another() -> None:
    config = parse_config({**LEAST, "preset": "paper", "agent": {"name": "calculator"}})
    assert config.agent.settings == {}
    assert config.agent.reward == "strict"


def test_changes_count_more_than_the_file_and_the_file_more_than_the_preset() -> None:
    values = {**LEAST, "preset": "dapo", "rollout": {"prompts": 8}}
    config = parse_config(values, changes=["rollout.group_size=4", "rollout.prompts=6"])
    assert (config.rollout.prompts, config.rollout.group_size) == (6, 4)
    assert config.update.updates == PRESETS["dapo"]["update"]["updates"]


def test_a_config_survives_being_written_down() -> None:
    config = parse_config({**LEAST, "preset": "dapo", "warm_start": {"steps": 3}})
    assert parse_config(config.model_dump(mode="json")) == config


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="there is no config"):
        read_config(path)
    path.write_text("steps = ")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read"):
        read_config(path)
    path.write_text("[model]\nsource = 'x'\nsouce = 'y'\n")
    with pytest.raises(ConfigError, match=r"run\.toml: .*souce"):
        read_config(path)
