"""The engine on a GPU: the same tokens as transformers, and kernels equal to their plain-torch versions.

Skipped without a GPU. The same laws hold on the CPU for the plain-torch versions, see
tests/unit/engines/local/test_gpu_layout.py.
"""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from memagent.engines.local.generator import Generator
from memagent.engines.local.scheduler import GenerationRequest
from memagent.types import Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": 7,
    "pad_token_id": 7,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**{**SHAPE, "head_dim": 64}),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32)
    return made.cuda().eval()


def prompts_of(count: int, *, seed: int, shared: int = 0, longest: int = 400) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(8, 1000) for _ in range(shared)]
    return [
        common + [rng.randrange(8, 1000) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


def replies(model: Any, prompts: list[list[int]], **settings: Any) -> list[GenerationRequest]:
    given: dict[str, Any] = {"num_slots": 32768, "max_batch_tokens": 1024, "max_running": 64}
    sampling = settings.pop("sampling", Sampling(max_tokens=40, temperature=0.0))
    generator = Generator(model, eos_ids=[7], **{**given, **settings})
    assert type(generator._model).__name__ == "GpuModel"
    requests = [generator.submit(p, sampling, seed=n) for n, p in enumerate(prompts)]
    while generator.has_work:
        generator.step()
    generator.scheduler.tree.clear()
    assert generator.scheduler.pool.num_free == generator.scheduler.pool.num_slots
    return requests


def by_transformers(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return list(out[0, len(prompt) :].tolist())


@torch.no_grad()
def teacher_forced(model: Any, request: GenerationRequest, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*request.prompt_ids, *request.completion_ids]], device="cuda")
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / temperature
    index = torch.tensor(request.completion_ids, device="cuda")
    return logits.log_softmax(-1).gather(1, index[:, None])[:, 0].cpu()


def test_a_mixed_batch_gives_the_tokens_of_transformers(model: Any) -> None:
    prompts = prompts_of(20, seed=1)
    for request, prompt in zip(replies(model, prompts), prompts, strict=True):
        assert request.completion_ids == by_transformers(model, prompt, 40)


def test_shared_and_preempted_requests_give_the_tokens_of_transformers(model: Any) -> None:
    prompts = prompts_of(24, seed=2, shared=700, longest=90)
    sampling = Sampling(max_tokens=150, temperature=0.0)
    requests = replies(model, prompts, num_slots=2400, sampling=sampling)
    assert any(request.num_preemptions for request in requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.completion_ids == by_transformers(model, prompt, 150)


def test_logprobs_are_those_of_a_teacher_forced_pass(model: Any) -> None:
    sampling = Sampling(max_tokens=30, temperature=0.8)
    for request in replies(model, prompts_of(12, seed=3, shared=50), sampling=sampling):
        expected = teacher_forced(model, request, 0.8)
        assert (torch.tensor(request.logprobs) - expected).abs().max() < 1e-4


def test_a_seed_gives_the_same_tokens_in_another_batch(model: Any) -> None:
    sampling = Sampling(max_tokens=30, temperature=1.0)
    prompts = prompts_of(16, seed=4, shared=64)
    together = replies(model, prompts, sampling=sampling)
    few = replies(model, prompts, sampling=sampling, max_running=3)
    assert [r.completion_ids for r in together] == [r.completion_ids for r in few]


def test_top_k_and_top_p_restrict_the_tokens(model: Any) -> None:
    prompts = prompts_of(6, seed=5)
    generator = Generator(model, num_slots=8192, eos_ids=[7], max_running=8)
    sampling = Sampling(max_tokens=20, temperature=1.0, top_k=1)
    for _ in range(2):  # the second time graphs of several sizes exist already
        requests = [generator.submit(prompt, sampling, seed=3) for prompt in prompts]
        while generator.has_work:
            generator.step()
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.completion_ids == by_transformers(model, prompt, 20)


def test_samples_follow_the_distribution_of_the_model(model: Any) -> None:
    """4,000 first tokens of one prompt against the model's own distribution, by chi-square."""
    prompt = prompts_of(1, seed=6)[0]
    sampling = Sampling(max_tokens=1, temperature=1.0)
    requests = replies(model, [prompt] * 4000, sampling=sampling, max_running=512)
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
    shares = logits.softmax(-1).cpu()
    counts = torch.bincount(
        torch.tensor([r.completion_ids[0] for r in requests]), minlength=len(shares)
    )
    likely = shares * 4000 >= 5
    expected = torch.cat([shares[likely] * 4000, shares[~likely].sum()[None] * 4000])
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]]).float()
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-6))[expected > 1].sum())
    freedom = int((expected > 1).sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 8


def test_weights_changed_in_place_are_used_at_once(model: Any) -> None:
    prompt = prompts_of(1, seed=7)[0]
    generator = Generator(model, num_slots=4096, eos_ids=[7], max_running=4)
    before = generator.submit(prompt, Sampling(max_tokens=20, temperature=0.0), seed=0)
    while generator.has_work:
        generator.step()
    parameter = model.get_decoder().layers[0].mlp.down_proj.weight
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(-2)
    generator.weights_changed()
    after = generator.submit(prompt, Sampling(max_tokens=20, temperature=0.0), seed=0)
    while generator.has_work:
        generator.step()
    try:
        assert after.completion_ids == by_transformers(model, prompt, 20)
        assert after.completion_ids != before.completion_ids
    finally:
        with torch.no_grad():
            parameter.copy_(kept)
