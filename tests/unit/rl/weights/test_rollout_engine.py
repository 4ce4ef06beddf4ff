"""The engine that samples replies: outside this process it gets neutral sampling values."""

from typing import Any

import pytest

from memagent.config import EngineConfig
from memagent.engines.openai import PLAIN, EndpointEngine
from memagent.rl.settings import RolloutSettings
from memagent.rl.weights import models
from memagent.types import Sampling

MESSAGES = [{"role": "user", "content": "Hello."}]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What engines were opened with."""
    found: list[tuple[str, dict[str, Any]]] = []

    def open_engine(name: str, **values: Any) -> EndpointEngine:
        found.append((name, values))
        base = {
            "model": "m",
            "base_url": "http://localhost:1",
            "extra_body": values.get("extra_body"),
        }
        return EndpointEngine(EngineConfig.parse(base))

    monkeypatch.setattr(models, "open_engine", open_engine)
    return found


def engine_of(name: str, **settings: Any) -> EndpointEngine:
    rollout = RolloutSettings.parse({"engine": name, "engine_settings": settings})
    engine = models.open_rollout_engine(rollout, None)  # type: ignore[arg-type]
    assert isinstance(engine, EndpointEngine)
    return engine


def test_requests_of_training_name_every_value_that_a_server_has_defaults_for(opened: Any) -> None:
    body = engine_of("openai:m")._body(MESSAGES, Sampling(max_tokens=5, temperature=1.0))
    assert PLAIN.items() <= body.items()
    assert PLAIN == {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert (body["return_token_ids"], body["logprobs"]) == (True, True)
    body = engine_of("openai:m")._body(MESSAGES, Sampling(max_tokens=5, top_p=0.7))
    assert body["top_p"] == 0.7, "what a call asks for takes precedence"


def test_requests_of_reading_leave_the_choice_to_the_server() -> None:
    engine = EndpointEngine(EngineConfig(model="m", base_url="http://localhost:1"))
    assert not PLAIN.keys() & engine._body(MESSAGES, Sampling(max_tokens=5)).keys()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "--generation-config vllm"),
        ("--enforce-eager", "--generation-config vllm --enforce-eager"),
        ("--generation-config auto", "--generation-config auto"),
    ],
)
def test_vllm_is_started_without_the_sampling_defaults_of_the_model(
    opened: Any, given: str | None, expected: str
) -> None:
    engine_of("vllm:m", **({} if given is None else {"vllm_args": given}))
    ((name, values),) = opened
    assert (name, values["vllm_args"], values["token_ids"]) == ("vllm:m", expected, True)


def test_an_address_that_a_config_names_gets_its_own_key_only(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "mine")
    monkeypatch.delenv("MEMAGENT_BASE_URL", raising=False)
    engine_of("openai:m", base_url="http://config/v1")
    engine_of("openai:m", base_url="http://config/v1", api_key="theirs")
    monkeypatch.setenv("MEMAGENT_BASE_URL", "http://config/v1")
    engine_of("openai:m", base_url="http://config/v1")
    engine_of("openai:m")  # the user's own address
    assert [values.get("api_key") for _, values in opened] == ["none", "theirs", "mine", None]
