"""vLLM itself, on a CPU or a GPU: it starts, says what the local engine says, reads, and ends.

    make test-vllm

Skipped unless MEMAGENT_TEST_VLLM names a Python that has vLLM. A start takes about a minute on two
slow cores, so there are two: the model as it is, and with its window stretched by YaRN.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent import blocking
from memagent.agent.reader import Reader
from memagent.config import AgentConfig
from memagent.engines.base import open_engine
from memagent.engines.vllm.engine import VllmEngine
from memagent.types import Sampling
from tests.conftest import prose
from tests.support.tiny_models import make_tiny_model

PYTHON = os.environ.get("MEMAGENT_TEST_VLLM")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm starts vLLM"),
    pytest.mark.timeout(1200),
]
WINDOW = 1024
FACTOR = 4.0
ARGUMENTS = "--enforce-eager --dtype float32 --max-num-seqs 8"
MESSAGES = [{"role": "user", "content": "Where is the red ledger kept?"}]
"""Without figures, which transformers takes apart in its own way for every Qwen2 tokenizer."""
GREEDY = Sampling(max_tokens=12, temperature=0.0)
TEMPLATES = """
read = "Question: {question}\\nText: {section}\\nMemory: {memory}\\nNew memory:"
answer = "Question: {question}\\nMemory: {memory}\\nAnswer:"
empty_memory = "(empty)"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, because vLLM has no smaller ones on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, "qwen2", hidden_size=256, max_position_embeddings=WINDOW)


@pytest.fixture(scope="module", params=[None, FACTOR], ids=["plain", "yarn"])
def yarn(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param is None else {"yarn_factor": request.param}


@pytest.fixture(scope="module")
def engine(
    model: Path, yarn: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        opened = open_engine(
            f"vllm:{model}",
            vllm_python=PYTHON,
            vllm_args=ARGUMENTS,
            vllm_log_dir=str(logs),
            start_seconds=900,
            **yarn,
        )
    assert isinstance(opened, VllmEngine)
    yield opened
    opened.close()
    assert not any(server.is_running for server in opened.servers)
    assert not any(server.is_healthy for server in opened.servers)


def test_it_serves_the_window_that_was_asked_for(
    engine: VllmEngine, model: Path, yarn: dict[str, Any]
) -> None:
    assert engine.served_window == (WINDOW * FACTOR if yarn else WINDOW)
    assert engine.tokenizer == str(model)


def test_it_says_token_for_token_what_the_local_engine_says(
    engine: VllmEngine, model: Path, yarn: dict[str, Any]
) -> None:
    """With YaRN too: positions that were set otherwise would give other probabilities."""
    reply = blocking.run(engine.complete(MESSAGES, GREEDY))
    with open_engine(f"local:{model}", device="cpu", cache_gb=0.1, **yarn) as local:
        expected = blocking.run(local.complete(MESSAGES, GREEDY))
    assert reply.prompt_ids == expected.prompt_ids
    assert reply.completion_ids == expected.completion_ids
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(reply.completion_ids or ())


def test_log_probabilities_are_of_the_distribution_that_was_sampled_from(
    engine: VllmEngine, model: Path, yarn: dict[str, Any]
) -> None:
    """Those of the model's logits over the temperature, for each token that was sampled."""
    import torch

    from memagent.engines.local.loading import load

    sampling = Sampling(max_tokens=12, temperature=0.7, seed=1)
    reply = blocking.run(engine.complete(MESSAGES, sampling))
    assert reply.prompt_ids is not None
    assert reply.completion_ids is not None
    ids = torch.tensor([[*reply.prompt_ids, *reply.completion_ids]])
    with torch.no_grad():
        logits = load(str(model), **yarn).model(ids).logits[0, len(reply.prompt_ids) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(reply.prompt_ids) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(reply.logprobs), expected, rtol=0, atol=2e-3)


def test_the_reader_reads_through_it(engine: VllmEngine, tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(TEMPLATES)
    config = AgentConfig(
        window=400,
        chunk_tokens=100,
        memory_tokens=20,
        answer_tokens=20,
        prompts=str(tmp_path / "short.toml"),
        temperature=0.0,
    )
    reader = Reader(engine, config=config)
    assert reader.tokenizer_note is None
    trace = reader.ask("Where is the ledger?", prose(30))
    assert len(trace.steps) > 3
    assert [step.kind for step in trace.steps][-2:] == ["read", "answer"]
    assert trace.answer
    assert not trace.usage.is_estimated
