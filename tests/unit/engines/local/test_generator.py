"""Our generation against transformers': the same tokens, alone, together, shared and preempted."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.engines.local.generator import Generator
from memagent.engines.local.sampling import sample
from memagent.engines.local.scheduler import GenerationRequest
from memagent.errors import ConfigError
from memagent.types import Sampling
from tests.support.tiny_models import KINDS, make_tiny_model

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def reference(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens by transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return list(out[0, len(prompt) :].tolist())


def generator_of(model: Any, **settings: Any) -> Generator:
    given = {"num_slots": 2048, "max_batch_tokens": 64, **settings}
    return Generator(model, eos_ids=[model.generation_config.eos_token_id], **given)


def run(generator: Generator) -> None:
    for _ in range(10_000):
        if not generator.has_work:
            return
        generator.step()
    raise AssertionError("the generator does not come to an end")


def prompts_of(model: Any, count: int, seed: int = 0, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    vocabulary = model.config.vocab_size
    return [
        [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def all_free(generator: Generator) -> bool:
    """True when, with the prefix tree emptied, no slot is lost."""
    generator.scheduler.tree.clear()
    return generator.scheduler.pool.num_free == generator.scheduler.pool.num_slots


def test_one_prompt_gives_the_tokens_that_transformers_gives(model: Any) -> None:
    for prompt in prompts_of(model, 4):
        generator = generator_of(model)
        request = generator.submit(prompt, Sampling(max_tokens=24, **GREEDY), seed=0)
        run(generator)
        assert request.completion_ids == reference(model, prompt, 24)


def test_a_mixed_batch_gives_each_its_own_tokens(model: Any) -> None:
    prompts = prompts_of(model, 12, seed=1)
    generator = generator_of(model, max_running=5)
    requests = [
        generator.submit(prompt, Sampling(max_tokens=5 + number, **GREEDY), seed=0)
        for number, prompt in enumerate(prompts)
    ]
    run(generator)
    for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert request.completion_ids == reference(model, prompt, 5 + number)
    assert all_free(generator)


def test_a_common_prefix_is_computed_once(model: Any) -> None:
    shared = prompts_of(model, 1, seed=2)[0] * 3
    prompts = [shared + suffix for suffix in prompts_of(model, 8, seed=3, longest=9)]
    generator = generator_of(model)
    requests = [generator.submit(p, Sampling(max_tokens=8, **GREEDY), seed=0) for p in prompts]
    run(generator)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.completion_ids == reference(model, prompt, 8)
    num_replies = sum(len(request.completion_ids) for request in requests)
    own = sum(len(prompt) - len(shared) for prompt in prompts)
    assert generator.num_computed_tokens <= len(shared) + own + num_replies
    assert all_free(generator)


def test_the_same_prompt_again_costs_one_token(model: Any) -> None:
    prompt = prompts_of(model, 1, seed=4, longest=100)[0] * 2
    generator = generator_of(model)
    replies = []
    for _ in range(3):
        before = generator.num_computed_tokens
        request = generator.submit(prompt, Sampling(max_tokens=4, **GREEDY), seed=0)
        run(generator)
        replies.append((request.completion_ids, generator.num_computed_tokens - before))
    tokens = reference(model, prompt, 4)
    assert [ids for ids, _ in replies] == [tokens] * 3
    assert replies[1][1] == replies[2][1] == len(tokens)  # the last prompt token and the replies
    assert all_free(generator)


def test_requests_preempted_by_a_full_cache_end_as_if_alone(model: Any) -> None:
    prompts = prompts_of(model, 10, seed=5, longest=60)
    generator = generator_of(model, num_slots=180, max_running=8)
    requests = [generator.submit(p, Sampling(max_tokens=90, **GREEDY), seed=0) for p in prompts]
    run(generator)
    assert sum(request.num_preemptions for request in requests) > 0
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.completion_ids == reference(model, prompt, 90)
    assert all_free(generator)


def test_logprobs_are_those_of_a_teacher_forced_pass(model: Any) -> None:
    generator = generator_of(model)
    samplings = [
        Sampling(max_tokens=16, temperature=1.0),
        Sampling(max_tokens=16, temperature=0.7),
        Sampling(max_tokens=16, temperature=1.3, top_k=20),
        Sampling(max_tokens=16, temperature=1.0, top_p=0.8),
        Sampling(max_tokens=16, **GREEDY),
    ]
    prompts = prompts_of(model, len(samplings), seed=6)
    requests = [
        generator.submit(prompt, sampling, seed=number)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    run(generator)
    for request in requests:
        expected = teacher_forced(model, request)
        assert request.logprobs == pytest.approx(expected, abs=1e-4)


def teacher_forced(model: Any, request: GenerationRequest) -> list[float]:
    """Log-probabilities of the reply, worked out independently of the engine."""
    ids = torch.tensor([[*request.prompt_ids, *request.completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    sampling = request.sampling
    if sampling.temperature:
        logits = logits / sampling.temperature
    if sampling.top_k:
        kept = logits.topk(sampling.top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept, logits.gather(1, kept))
    if sampling.top_p:
        for row in logits:
            order = row.argsort(descending=True)
            probabilities = row.softmax(-1)[order]
            count = int((probabilities.cumsum(-1) < sampling.top_p).sum()) + 1
            row[order[count:]] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, request.completion_ids, strict=True)]


def test_the_same_seed_gives_the_same_tokens_in_any_batch(model: Any) -> None:
    prompt, *others = prompts_of(model, 9, seed=7)
    sampling = Sampling(max_tokens=20, temperature=1.0, top_p=0.95)

    def reply(company: list[list[int]], **settings: Any) -> list[int]:
        generator = generator_of(model, **settings)
        for number, other in enumerate(company[: len(company) // 2]):
            generator.submit(other, sampling, seed=100 + number)
        request = generator.submit(prompt, sampling, seed=42)
        for number, other in enumerate(company[len(company) // 2 :]):
            generator.submit(other, sampling, seed=200 + number)
        run(generator)
        return request.completion_ids

    alone = reply([])
    assert reply(others) == alone
    assert reply(others, num_slots=220, max_batch_tokens=17) == alone
    generator = generator_of(model)
    other_seed = generator.submit(prompt, sampling, seed=43)
    run(generator)
    assert other_seed.completion_ids != alone


def test_sampling_follows_the_distribution(model: Any) -> None:
    prompt = prompts_of(model, 1, seed=8)[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    generator = generator_of(model, num_slots=4096, max_running=256)
    requests = [
        generator.submit(prompt, Sampling(max_tokens=1, temperature=1.0), seed=seed)
        for seed in range(1500)
    ]
    run(generator)
    likely = expected.topk(3).indices.tolist()
    for token in likely:
        share = sum(request.completion_ids == [token] for request in requests) / len(requests)
        probability = float(expected[token])
        spread = (probability * (1 - probability) / len(requests)) ** 0.5
        assert abs(share - probability) < 4.5 * spread + 1e-3


def test_cancelled_requests_free_their_slots(model: Any) -> None:
    prompts = prompts_of(model, 20, seed=9)
    generator = generator_of(model, num_slots=600)
    requests = [generator.submit(p, Sampling(max_tokens=30, **GREEDY), seed=0) for p in prompts]
    rng = random.Random(0)
    while generator.has_work:
        generator.step()
        rng.choice(requests).is_cancelled = True
    for request, prompt in zip(requests, prompts, strict=True):
        if request.finish_reason:
            assert request.completion_ids == reference(model, prompt, 30)
    assert all_free(generator)


def test_new_weights_are_used_and_the_cache_is_dropped(model: Any) -> None:
    prompt = prompts_of(model, 1, seed=10)[0]
    generator = generator_of(model)
    before = generator.submit(prompt, Sampling(max_tokens=8, **GREEDY), seed=0)
    run(generator)
    embedding = model.get_input_embeddings().weight
    saved = embedding.detach().clone()
    try:
        with torch.no_grad():
            embedding.add_(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)))
        generator.weights_changed()
        after = generator.submit(prompt, Sampling(max_tokens=8, **GREEDY), seed=0)
        run(generator)
        assert after.completion_ids == reference(model, prompt, 8)
        assert generator.policy_version == 1
        assert after.completion_ids != before.completion_ids
    finally:
        with torch.no_grad():
            embedding.copy_(saved)


def test_a_request_larger_than_the_cache_is_refused(model: Any) -> None:
    generator = generator_of(model, num_slots=64)
    with pytest.raises(ConfigError, match="need 75 tokens of cache, which has 64"):
        generator.submit([5] * 50, Sampling(max_tokens=25), seed=0)
    with pytest.raises(ConfigError, match="prompt is empty"):
        generator.submit([], Sampling(max_tokens=5), seed=0)


def test_rows_with_different_filters_are_sampled_as_each_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 300) * 3
    filters = [(None, None), (1, None), (20, 0.9), (None, 0.5), (10**6, 1.0), (None, 1e-9)]
    requests = [
        (Sampling(max_tokens=4, temperature=t, top_k=k, top_p=p), seed, seed + 3)
        for seed, (t, (k, p)) in enumerate(product((0.7, 1.2), filters))
    ]
    alone = [sample(logits[[row]], [request]) for row, request in enumerate(requests)]
    together = sample(logits.clone(), requests)
    assert together.tokens == [one.tokens[0] for one in alone]
    assert together.logprobs == pytest.approx([one.logprobs[0] for one in alone], abs=1e-5)
    assert {together.tokens[row] for row in (1, 5)} == {int(logits[row].argmax()) for row in (1, 5)}
