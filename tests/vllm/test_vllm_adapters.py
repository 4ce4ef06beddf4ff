"""vLLM itself is given adapters while it runs, and says what the local engine says with them.

    make test-vllm

Skipped unless MEMAGENT_TEST_VLLM names a Python that has vLLM.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memagent import blocking
from memagent.config import LocalConfig
from memagent.engines.base import open_engine
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.engines.vllm.engine import VllmEngine
from memagent.errors import ConfigError
from memagent.rl.settings import RolloutSettings
from memagent.rl.weights.models import Trained
from memagent.rl.weights.sync import LoraEndpoint, open_sync
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

PYTHON = os.environ.get("MEMAGENT_TEST_VLLM")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm starts vLLM"),
    pytest.mark.timeout(1200),
]
RANK = 8
ARGUMENTS = f"--enforce-eager --dtype float32 --max-num-seqs 8 --enable-lora --max-lora-rank {RANK}"
MESSAGES = [{"role": "user", "content": "Where is the red ledger kept?"}]
GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, because vLLM has no smaller ones on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, "qwen2", hidden_size=256, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        opened = open_engine(
            f"vllm:{model}",
            vllm_python=PYTHON,
            vllm_args=ARGUMENTS,
            vllm_log_dir=str(tmp_path_factory.mktemp("logs")),
            start_seconds=900,
        )
    assert isinstance(opened, VllmEngine)
    yield opened
    opened.close()


def test_it_says_what_the_local_engine_says_with_each_adapter_that_is_pushed(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    loaded = load(str(model), adapter=str(make_tiny_adapter(model, tmp_path / "a", rank=RANK)))
    trained = Trained(loaded=loaded, parameters=(), has_adapter=True)
    settings = RolloutSettings(engine=f"vllm:{model}")
    sync = open_sync(settings, engine, trained, tmp_path)
    said = []
    with LocalEngine(loaded, LocalConfig(cache_gb=0.1)) as local:
        for version in range(3):
            blocking.run(sync.push(version))
            reply = blocking.run(engine.complete(MESSAGES, GREEDY))
            expected = blocking.run(local.complete(MESSAGES, GREEDY))
            assert reply.completion_ids == expected.completion_ids
            logprobs = torch.tensor([reply.logprobs, expected.logprobs])
            torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=2e-3)
            said.append(reply.completion_ids)
            with torch.no_grad():
                for name, parameter in loaded.model.named_parameters():
                    if "lora_B" in name:
                        parameter.mul_(-0.7)
            local.weights_changed()
    assert len(set(said)) == 3
    names = [entry["id"] for entry in blocking.run(engine.endpoints[0].list_models())]
    assert names == [str(model), engine.model]


def test_an_adapter_of_a_larger_rank_is_refused_with_what_to_change(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(model, tmp_path / "a", rank=2 * RANK)

    def save(folder: Path) -> None:
        adapter.rename(folder)

    before = engine.model
    with pytest.raises(ConfigError, match=rf"--enable-lora --max-lora-rank {2 * RANK}"):
        blocking.run(LoraEndpoint(engine, tmp_path / "sync", save).push(1))
    assert engine.model == before
