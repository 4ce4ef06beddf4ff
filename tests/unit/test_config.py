"""Settings: strict, and errors that say what to change."""

import pytest

from memagent.config import AgentConfig, EngineConfig, LocalConfig, VllmConfig
from memagent.errors import ConfigError


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


def test_every_setting_has_a_help_text() -> None:
    for settings in (AgentConfig, EngineConfig, LocalConfig, VllmConfig):
        for name in settings.model_fields:
            assert len(settings.help(name)) > 10


def test_a_key_is_not_shown() -> None:
    config = EngineConfig.parse({"model": "m", "api_key": "sk-secret-123"})
    assert "sk-secret-123" not in repr(config)
    assert "sk-secret-123" not in config.model_dump_json()
