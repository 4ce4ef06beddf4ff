"""Settings: strict, and errors that say what to change."""

from typing import Any

import pytest
from pydantic import Field

from memagent.config import AgentConfig, EngineConfig, LocalConfig, Settings, VllmConfig
from memagent.errors import ConfigError
from memagent.rl.settings import TrainConfig


def test_the_defaults_are_the_papers() -> None:
    config = AgentConfig()
    assert (config.window, config.chunk_tokens, config.memory_tokens) == (8192, 5000, 1024)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_token": 5}, "unknown setting chunk_token; did you mean chunk_tokens?"),
        ({"chunk_tokens": 0}, "chunk_tokens: input should be greater than or equal to 16"),
        ({"window": "wide"}, "window: input should be a valid integer"),
        ({"memory_tokens": 9000}, "`memory_tokens=9000` does not fit a window of 8192"),
        ({"chunk_tokens": 9000}, "`chunk_tokens=9000` does not fit a window of 8192"),
        ({"top_p": 0}, "top_p: input should be greater than 0"),
    ],
)
def test_a_wrong_setting_is_explained_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AgentConfig.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class _Rollout(Settings):
    group_size: int = 4
    """Attempts."""
    num_prompts: int = 8
    """Prompts."""


class _Training(Settings):
    rollout: _Rollout | None = None
    """Rollouts."""
    tasks: list[_Rollout] = Field(default_factory=list)
    """Tasks."""
    steps: int = 1
    """Steps."""


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"rollout": {"group_sise": 4}}, "rollout.group_sise; did you mean rollout.group_size?"),
        (
            {"tasks": [{}, {"num_promts": 1}]},
            "tasks.1.num_promts; did you mean tasks.1.num_prompts?",
        ),
        ({"rollout": {"xyz": 4}}, "rollout.xyz; known: group_size, num_prompts"),
        ({"rolout": {}}, "rolout; did you mean rollout?"),
        ({"group_size": 4}, "group_size; did you mean rollout.group_size?"),
        ({"rollout": {"steps": 4}}, "rollout.steps; did you mean steps?"),
    ],
)
def test_a_misspelt_key_gets_a_sibling_as_hint(values: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _Training.parse(values)
    assert str(caught.value) == f"unknown setting {hint}"


def test_a_misspelt_key_of_a_training_config_gets_a_hint() -> None:
    values = {"model": {"source": "m"}, "tasks": [{"tasks": ["small/colours"]}]}
    with pytest.raises(ConfigError, match=r"group_sise; did you mean rollout\.group_size\?"):
        TrainConfig.parse(values, changes=["rollout.group_sise=4"])


def test_every_setting_has_a_help_text() -> None:
    for settings in (AgentConfig, EngineConfig, LocalConfig, VllmConfig):
        for name in settings.model_fields:
            assert len(settings.help(name)) > 10


def test_a_key_is_not_shown() -> None:
    config = EngineConfig.parse({"model": "m", "api_key": "sk-secret-123"})
    assert "sk-secret-123" not in repr(config)
    assert "sk-secret-123" not in config.model_dump_json()
