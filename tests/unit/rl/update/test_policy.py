"""The gradient of a step: independent of packing, and equal to a textbook computation on plain rows."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memagent.engines.local.generator import Generator
from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.attention import BLOCK, block_mask, use_tree_attention
from memagent.rl.update.loss import summary
from memagent.rl.update.packing import Pack, pack, share_out
from memagent.rl.update.policy import Policy, accumulate, score
from memagent.rl.update.rows import StepRows, TrainingRow, rows_of
from memagent.types import Sampling
from tests.support.rollouts import dense_mask, near_policy, random_groups, row_logprobs
from tests.support.tiny_models import KINDS, make_tiny_model

OBJECTIVE = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In float64, but for norms, which transformers computes in float32."""
    return tiny(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory, "llama")


def tiny(tmp_path_factory: pytest.TempPathFactory, kind: Any, **shape: Any) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / kind, kind, **{**SMALL, **shape})
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float64
    )


# --- the textbook ---------------------------------------------------------------------------------


def textbook_loss(model: Any, groups: Sequence[Group], mean: str, reference: Any = None) -> Any:
    """Equation by equation, one row at a time, nothing shared with our own code."""
    per_rollout = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        for rollout in group.rollouts:
            advantage = rollout.reward - sum(rewards) / len(rewards)
            terms = []
            for row in rollout.samples:
                ids = torch.tensor([row.ids])
                logits = model(ids, attention_mask=torch.ones_like(ids)).logits
                logprobs = torch.log_softmax(logits, dim=-1)
                for place in range(1, len(row.ids)):
                    if not row.is_sampled[place]:
                        continue
                    logprob = logprobs[0, place - 1, row.ids[place]]
                    ratio = torch.exp(logprob - row.logprobs[place])
                    clipped = torch.clamp(ratio, 0.8, 1.28)
                    gain = torch.min(ratio * advantage, clipped * advantage)
                    if advantage < 0:
                        gain = torch.max(gain, torch.tensor(3.0 * advantage, dtype=gain.dtype))
                    term = -gain
                    if reference is not None:
                        other = row_logprobs(reference, row.ids)[place - 1]
                        term = term + 0.05 * (torch.exp(other - logprob) - (other - logprob) - 1)
                    terms.append(term)
            per_rollout.append(terms)
    if mean == "token":
        flat = [term for terms in per_rollout for term in terms]
        return sum(flat) / len(flat)
    if mean == "rollout":
        return sum(sum(terms) / len(terms) for terms in per_rollout) / len(per_rollout)
    return sum(sum(terms) for terms in per_rollout) / (len(per_rollout) * 50)


def gradient(model: Any, run: Callable[[], Any]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    run()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    found = torch.cat(parts).clone()
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 1e-6) -> None:
    assert expected.norm() > 1e-3  # a gradient of nothing would equal any other
    assert ((found - expected).norm() / expected.norm()).item() < tolerance


def packed(
    model: Any, rows: Sequence[TrainingRow], objective: ObjectiveSettings = OBJECTIVE, **how: Any
) -> torch.Tensor:
    policy = Policy(model, **how.pop("policy", {}))
    packs = pack(rows, **{"max_tokens": 10_000, **how})
    return gradient(model, lambda: accumulate(policy, packs, objective))


@pytest.mark.parametrize(
    "means",
    [
        {"loss_mean": "token"},
        {"loss_mean": "rollout"},
        {"loss_mean": 50},
    ],
    ids=lambda m: m["loss_mean"],
)
def test_the_gradient_is_that_of_the_textbook(model: Any, means: dict[str, Any]) -> None:
    groups = near_policy(model, random_groups(model))
    expected = gradient(model, lambda: textbook_loss(model, groups, means["loss_mean"]).backward())
    objective = ObjectiveSettings(clip_low=0.2, clip_high=0.28, **means)
    rows = rows_of(groups, objective).rows
    assert_same(packed(model, rows, objective), expected)


def test_the_random_rollouts_cover_clipping_and_sharing(llama: Any) -> None:
    """Clipping of all kinds happens in these rollouts, and sharing saves tokens."""
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    shared, apart = (pack(rows, max_tokens=10_000, share=share) for share in (True, False))
    assert sum(one.num_tokens for one in shared) < 0.7 * sum(one.num_tokens for one in apart)
    metrics = summary(accumulate(Policy(llama), shared, OBJECTIVE))
    assert metrics["clip_low"] > 0
    assert metrics["clip_high"] > 0
    llama.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    "how",
    [
        {"share": False},
        {"max_tokens": 60},
        {"max_tokens": 60, "share": False},
        {"policy": {"head_places": 3}},
        {"policy": {"checkpointing": True}},
    ],
    ids=[
        "full rows",
        "small packs",
        "small packs of full rows",
        "pieces of the head",
        "checkpoints",
    ],
)
def test_how_rows_are_packed_does_not_change_the_gradient(llama: Any, how: dict[str, Any]) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    assert_same(packed(llama, rows, **how), packed(llama, rows))


def test_the_order_of_rows_does_not_change_the_gradient(llama: Any) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    shuffled = random.Random(0).sample(rows, len(rows))
    assert_same(packed(llama, shuffled), packed(llama, rows))


def test_micro_batches_add_up_to_the_whole(llama: Any) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    parts = [packed(llama, rows[first : first + 4]) for first in range(0, len(rows), 4)]
    assert_same(sum(parts[1:], parts[0]), packed(llama, rows))


def test_processes_with_their_own_packs_add_up_to_the_whole(llama: Any) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    policy, packs = Policy(llama), pack(rows, max_tokens=60)
    parts = [
        gradient(llama, lambda part=part: accumulate(policy, part, OBJECTIVE))
        for part in share_out(packs, 3)
    ]
    assert_same(sum(parts[1:], parts[0]), packed(llama, rows))


def test_in_float32_the_gradient_differs_by_rounding_alone(llama: Any) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    single = AutoModelForCausalLM.from_config(llama.config).float()
    single.load_state_dict(llama.state_dict())
    trees, alone = packed(single, rows), packed(single, rows, share=False, max_tokens=60)
    assert_same(trees, alone, tolerance=1e-5)


def test_kl_pulls_towards_the_reference(
    llama: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = tiny(tmp_path_factory, "llama", seed=5)
    groups = near_policy(llama, random_groups(llama))
    expected = gradient(llama, lambda: textbook_loss(llama, groups, "token", reference).backward())
    objective = ObjectiveSettings(clip_low=0.2, clip_high=0.28, kl_coef=0.05)
    packs = pack(rows_of(groups, objective).rows, max_tokens=80)
    held = score(Policy(reference), packs)
    found = gradient(llama, lambda: accumulate(Policy(llama), packs, objective, reference=held))
    assert_same(found, expected)


def test_recomputed_ratios_are_one_and_the_mismatch_becomes_a_weight(llama: Any) -> None:
    rows = rows_of(near_policy(llama, random_groups(llama)), OBJECTIVE).rows
    policy, packs = Policy(llama), pack(rows, max_tokens=80)
    metrics = summary(accumulate(policy, packs, OBJECTIVE, old=score(policy, packs)))
    llama.zero_grad(set_to_none=True)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["mismatch_kl"] == pytest.approx(0.4**2 / 2, rel=0.5)  # of the noise put in


def test_temperature_and_entropy_are_those_of_the_distribution_sampled_from(llama: Any) -> None:
    rows = rows_of(random_groups(llama, num_groups=1), OBJECTIVE).rows
    (one,) = pack(rows, max_tokens=10_000)
    with torch.no_grad():
        scores = Policy(llama, temperature=0.5)(one, with_entropy=True)
        for at in (0, 5, len(one.targets) - 1):
            row, offset = rows[one.targets.rows[at]], int(one.targets.offsets[at])
            logits = llama(torch.tensor([row.sample.ids])).logits[0, offset - 1] / 0.5
            expected = torch.distributions.Categorical(logits=logits)
            sampled = torch.tensor(row.sample.ids[offset])
            assert scores.logprobs[at].item() == pytest.approx(expected.log_prob(sampled).item())
            assert scores.entropies is not None
            assert scores.entropies[at].item() == pytest.approx(expected.entropy().item())


# --- adapters and dropout -------------------------------------------------------------------------


def with_adapter(model: Any, *, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    copy = AutoModelForCausalLM.from_config(model.config).double()
    copy.load_state_dict(model.state_dict())
    adapted = get_peft_model(
        copy, LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear")
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.double()
                parameter.normal_(std=0.1, generator=generator)
    return adapted


def test_an_adapter_alone_gets_the_gradient(llama: Any) -> None:
    adapted = with_adapter(llama)
    groups = near_policy(adapted, random_groups(llama))
    expected = gradient(adapted, lambda: textbook_loss(adapted, groups, "token").backward())
    rows = rows_of(groups, OBJECTIVE).rows
    assert_same(packed(adapted, rows, max_tokens=80), expected)
    checkpointed = packed(adapted, rows, max_tokens=80, policy={"checkpointing": True})
    assert_same(checkpointed, expected)
    num_trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert len(expected) == num_trained < sum(p.numel() for p in llama.parameters())


def test_dropout_is_off(llama: Any) -> None:
    adapted = with_adapter(llama, dropout=0.5)
    rows = rows_of(random_groups(llama), OBJECTIVE).rows
    policy, packs = Policy(adapted, checkpointing=True).train(), pack(rows, max_tokens=80)
    first, second = score(policy, packs), score(policy, packs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- on policy ------------------------------------------------------------------------------------


def drawn_rows(model: Any) -> StepRows:
    """Groups whose replies the embedded engine samples with the same weights."""
    generator = Generator(model, num_slots=2048, eos_ids=[model.generation_config.eos_token_id])
    rng = random.Random(3)
    groups = []
    for number in range(2):
        prompt = [rng.randrange(3, model.config.vocab_size) for _ in range(30)]
        requests = [
            generator.submit(prompt, Sampling(max_tokens=12, temperature=1.0), seed=seed)
            for seed in range(4)
        ]
        while generator.has_work:
            generator.step()
        rollouts = []
        for index, request in enumerate(requests):
            reply = request.completion_ids
            one = Sample(
                ids=(*prompt, *reply),
                is_sampled=(*[False] * len(prompt), *[True] * len(reply)),
                logprobs=(*[0.0] * len(prompt), *request.logprobs),
            )
            rollouts.append(
                Rollout(task_id=str(number), index=index, samples=(one,), reward=float(index % 2))
            )
        groups.append(Group(task_id=str(number), rollouts=tuple(rollouts)))
    return rows_of(groups, OBJECTIVE)


def metrics_of(model: Any, rows: Sequence[TrainingRow]) -> dict[str, float]:
    stats = accumulate(Policy(model), pack(rows, max_tokens=200), OBJECTIVE)
    model.zero_grad(set_to_none=True)
    return summary(stats)


def test_ratios_of_the_first_update_are_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny(tmp_path_factory, "llama", hidden_size=64, intermediate_size=64).float()
    rows = drawn_rows(model).rows
    metrics = metrics_of(model, rows)
    assert metrics["num_tokens"] > 50
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch_max"] < 1e-3
    assert metrics["mismatch_kl"] < 1e-6
    assert metrics["clip_low"] == metrics["clip_high"] == 0.0


def test_a_wrong_log_probability_is_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny(tmp_path_factory, "llama").float()
    good, *others = drawn_rows(model).rows
    values = [*good.sample.logprobs[:-1], good.sample.logprobs[-1] - 0.5]
    bad = TrainingRow(
        sample=Sample(
            ids=good.sample.ids, is_sampled=good.sample.is_sampled, logprobs=tuple(values)
        ),
        group=good.group,
        rollout=good.rollout,
        advantage=good.advantage,
        weight=good.weight,
    )
    assert metrics_of(model, [bad, *others])["mismatch_max"] == pytest.approx(0.5, abs=1e-3)


def test_changed_weights_are_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny(tmp_path_factory, "llama").float()
    rows = drawn_rows(model).rows
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.05)
    assert metrics_of(model, rows)["mismatch_max"] > 1e-2


# --- masks ----------------------------------------------------------------------------------------


def whole(one: Pack, multiple: int) -> torch.Tensor:
    """`until` of a pack, filled up as on a GPU."""
    until = one.until.tolist()
    until += [place + 1 for place in range(len(until), len(until) + -len(until) % multiple)]
    return torch.tensor(until)


def test_blocks_cover_exactly_what_is_seen(llama: Any) -> None:
    rows = rows_of(random_groups(llama, group_size=6), OBJECTIVE).rows
    (one,) = pack(rows, max_tokens=10_000)
    until = whole(one, 8)
    mask, sees = block_mask(until, block=8), dense_mask(until)
    num_blocks = len(until) // 8
    for q in range(num_blocks):
        partly = set(mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist())
        wholly = set(mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist())
        for k in range(num_blocks):
            block = sees[q * 8 : q * 8 + 8, k * 8 : k * 8 + 8]
            assert (k in wholly) == bool(block.all())
            assert (k in partly) == bool(block.any() and not block.all())
    assert mask.full_kv_num_blocks.sum() > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_in_blocks_gives_the_same_log_probabilities(model: Any) -> None:
    rows = rows_of(random_groups(model, group_size=4), OBJECTIVE).rows
    packs = pack(rows, max_tokens=10_000)
    assert packs[0].num_tokens > BLOCK
    copy = AutoModelForCausalLM.from_config(model.config).double()
    copy.load_state_dict(model.state_dict())
    (found,), (expected,) = (
        score(Policy(copy, attention="blocks"), packs),
        score(Policy(model), packs),
    )
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_tree_attention_does_not_change_other_masks(llama: Any) -> None:
    copy = AutoModelForCausalLM.from_config(llama.config).double()
    copy.load_state_dict(llama.state_dict())
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = llama(ids, attention_mask=mask).logits[:, 4:]
    use_tree_attention(copy)
    assert torch.equal(copy(ids, attention_mask=mask).logits[:, 4:], expected)


# --- models that packs do not fit -----------------------------------------------------------------

OTHERS: dict[str, Any] = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}


def random_model(kind: str, **values: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**SMALL, **OTHERS, "num_hidden_layers": 4, **values})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 128}),
    ],
)
def test_two_rows_with_a_prefix_score_in_a_pack_as_they_do_alone(
    kind: str, values: dict[str, Any]
) -> None:
    model = random_model(kind, **values)
    rng = random.Random(0)
    prefix = [rng.randrange(3, 64) for _ in range(40)]
    rows = [prefix + [rng.randrange(3, 64) for _ in range(20)] for _ in range(2)]
    with torch.no_grad():
        alone = [row_logprobs(model, row)[39:].tolist() for row in rows]
    samples = [
        Sample(ids=tuple(row), is_sampled=(False,) * 40 + (True,) * 20, logprobs=(0.0,) * 60)
        for row in rows
    ]
    (one,) = pack(
        [
            TrainingRow(sample=sample, group=0, rollout=number, advantage=1.0, weight=1.0)
            for number, sample in enumerate(samples)
        ],
        max_tokens=200,
    )
    assert one.num_tokens == 80
    (found,) = score(Policy(model), [one])
    expected = [
        alone[row][offset - 40]
        for row, offset in zip(one.targets.rows, one.targets.offsets, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("qwen3_5_text", {}, "only for llama, qwen2, qwen3, mistral"),
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1}, "only for"),
        ("lfm2", {}, "only for"),
        ("gemma3_text", {}, "only for"),
        ("gemma2", {}, "only for"),
        ("cohere", {"eos_token_id": 1, "bos_token_id": 2}, "only for"),
        ("mistral", {"sliding_window": 127}, "not full attention"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "8"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, "8"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)  # fmt: skip
def test_a_model_that_packs_do_not_fit_is_refused(
    kind: str, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Policy(random_model(kind, **values))
