"""YaRN: the settings by hand, and a local model's positions against the formula worked out here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.engines.base import open_engine
from memagent.engines.local.loading import load
from memagent.engines.yarn import vllm_arguments, yarn_settings
from memagent.errors import ConfigError
from memagent.types import Sampling
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import KINDS, WINDOW, Kind, make_tiny_model

QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "num_attention_heads": 28,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """Models whose positions are far enough apart in speed to be stretched differently."""
    folder = tmp_path_factory.mktemp("yarn")
    return {kind: make_tiny_model(folder / kind, kind, hidden_size=128) for kind in KINDS}


# --- settings -------------------------------------------------------------------------------------


def test_the_factor_is_the_new_window_over_the_original_one() -> None:
    settings = yarn_settings(QWEN, window=131072)
    assert settings is not None
    assert settings.overrides == {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    assert yarn_settings(QWEN, factor=4.0) == settings


def test_without_a_wish_nothing_is_set() -> None:
    assert yarn_settings(QWEN) is None


def test_settings_in_the_words_of_transformers_5_are_read_too() -> None:
    config = {
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    settings = yarn_settings(config, factor=2)
    assert settings is not None
    assert (settings.theta, settings.window, settings.original_window) == (100000.0, 16384, 8192)


def test_a_model_that_has_yarn_already_is_stretched_from_its_original_window() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**QWEN, "max_position_embeddings": 131072, "rope_scaling": scaling}
    settings = yarn_settings(config, window=262144)
    assert settings is not None
    assert (settings.factor, settings.original_window) == (8.0, 32768)


def test_vllm_gets_the_same_as_arguments() -> None:
    settings = yarn_settings(QWEN, window=65536)
    assert settings is not None
    flag, overrides, length_flag, length = vllm_arguments(settings)
    assert (flag, length_flag, length) == ("--hf-overrides", "--max-model-len", "65536")
    assert json.loads(overrides) == settings.overrides


@pytest.mark.parametrize(
    ("config", "wish", "message"),
    [
        (QWEN, {"window": 65536, "factor": 2.0}, "`yarn_window` or `yarn_factor`, not both"),
        (QWEN, {"window": 4096}, "`yarn_window=4096` is less than the model's own 32768"),
        ({**QWEN, "model_type": "mamba"}, {"factor": 2.0}, "not for mamba"),
        ({**QWEN, "rope_scaling": {"rope_type": "llama3"}}, {"factor": 2.0}, "already .llama3."),
        ({"model_type": "llama"}, {"factor": 2.0}, "does not say how many positions"),
    ],
)
def test_what_cannot_be_stretched_is_refused(
    config: dict[str, Any], wish: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        yarn_settings(config, **wish)


# --- a model --------------------------------------------------------------------------------------


def yarn_by_hand(
    position: int, *, head_dim: int, theta: float, original: int, factor: float
) -> tuple[list[float], list[float]]:
    """Cosine and sine of each pair of dimensions at a position, from the YaRN paper.

    A pair that turns more than 32 times within the original window keeps its speed, one that turns
    less than once is slowed down by the factor, and between them it is a mixture, linear in the
    number of the pair. All are scaled by 0.1 ln(factor) + 1.
    """
    num_pairs = head_dim // 2

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(32)), 0)
    last = min(math.ceil(pair_that_turns(1)), head_dim - 1)
    scale = 0.1 * math.log(factor) + 1
    cosines, sines = [], []
    for pair in range(num_pairs):
        speed = theta ** (-2 * pair / head_dim)
        slowed = min(max((pair - first) / (last - first), 0.0), 1.0)
        angle = position * (speed * (1 - slowed) + speed / factor * slowed)
        cosines.append(math.cos(angle) * scale)
        sines.append(math.sin(angle) * scale)
    return cosines, sines


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_a_stretched_model_are_those_of_the_formula(
    kind: Kind, folders: dict[Kind, Path]
) -> None:
    loaded = load(str(folders[kind]), yarn_window=4 * WINDOW)
    rotary: Any = loaded.model.model.rotary_emb
    positions = [0, 1, 37, WINDOW - 1, WINDOW, 3 * WINDOW + 5, 4 * WINDOW - 1]
    cosines, sines = rotary(torch.zeros(1, 1), torch.tensor([positions]))
    head_dim = cosines.shape[-1]
    for index, position in enumerate(positions):
        cosine, sine = yarn_by_hand(
            position, head_dim=head_dim, theta=10000.0, original=WINDOW, factor=4.0
        )
        # float32 angles of a few thousand radians are good to about 1e-4
        torch.testing.assert_close(cosines[0, index], torch.tensor(cosine * 2), rtol=0, atol=5e-4)
        torch.testing.assert_close(sines[0, index], torch.tensor(sine * 2), rtol=0, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_one_changes_nothing_and_more_changes_the_logits(
    kind: Kind, folders: dict[Kind, Path]
) -> None:
    ids = torch.arange(100)[None] % 50 + 10
    plain = load(str(folders[kind]))
    same = load(str(folders[kind]), yarn_factor=1.0)
    longer = load(str(folders[kind]), yarn_factor=4.0)
    assert same.model.config.rope_parameters["rope_type"] == "yarn"
    with torch.no_grad():
        expected = plain.model(ids).logits
        torch.testing.assert_close(same.model(ids).logits, expected, rtol=0, atol=1e-5)
        assert (longer.model(ids).logits - expected).abs().max() > 0.01


def test_the_files_of_the_model_stay_as_they_are(folders: dict[Kind, Path]) -> None:
    before = (folders["llama"] / "config.json").read_bytes()
    assert load(str(folders["llama"]), yarn_window=2 * WINDOW).window == 2 * WINDOW
    assert (folders["llama"] / "config.json").read_bytes() == before
    assert load(str(folders["llama"])).window == WINDOW


async def test_the_local_engine_reads_beyond_the_window_as_transformers_does(
    folders: dict[Kind, Path],
) -> None:
    prompt = [number % 97 + 10 for number in range(WINDOW + 200)]
    reference = load(str(folders["qwen3"]), yarn_window=4 * WINDOW).model
    settings: dict[str, Any] = {"yarn_window": 4 * WINDOW, "device": "cpu"}
    async with open_engine(f"local:{folders['qwen3']}", cache_gb=0.05, **settings) as engine:
        assert engine.served_window == 4 * WINDOW
        completion = await engine.generate(prompt, Sampling(max_tokens=5, temperature=0.0))  # type: ignore[attr-defined]
    reply = list(completion.completion_ids)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    assert torch.isfinite(logits).all()
    assert logits.argmax(-1).tolist() == reply


def test_a_gguf_file_is_stretched_too(folders: dict[Kind, Path], tmp_path: Path) -> None:
    path = write_gguf(folders["llama"], tmp_path / "tiny.gguf")
    loaded = load(str(path), yarn_factor=2.0)
    assert loaded.window == 2 * WINDOW
    assert loaded.model.config.rope_parameters["factor"] == 2.0
