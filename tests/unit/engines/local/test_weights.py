"""New weights for a running engine: copied in place, or refused before anything changes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.errors import ConfigError
from memagent.types import Completion, Sampling
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the red ledger?"}]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "first", "qwen2")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes with other values."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "other", "qwen2", seed=1)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    async with opened(folder) as engine:
        yield engine


def opened(folder: Path, adapter: Path | None = None) -> LocalEngine:
    loaded = load(str(folder), adapter=None if adapter is None else str(adapter))
    return LocalEngine(loaded, LocalConfig(cache_gb=0.01))


def parameters(engine: LocalEngine) -> dict[str, torch.Tensor]:
    return dict(engine._loaded.model.named_parameters())


def copies(engine: LocalEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters(engine).items()}


async def reply(engine: LocalEngine) -> Completion:
    return await engine.complete(MESSAGES, Sampling(max_tokens=10))


async def test_new_weights_are_used_and_counted(engine: LocalEngine, other: Path) -> None:
    before = await reply(engine)
    async with opened(other) as other_engine:
        assert engine.update_weights(parameters(other_engine)) == 1
        after, expected = await reply(engine), await reply(other_engine)
    assert (before.policy_version, after.policy_version) == (0, 1)
    assert after.completion_ids == expected.completion_ids != before.completion_ids
    assert after.logprobs == expected.logprobs
    assert after.usage is not None
    assert after.usage.cached_tokens == 0, "what the old weights computed is forgotten"


async def test_weights_are_copied_into_the_same_memory(engine: LocalEngine, other: Path) -> None:
    places = {name: value.data_ptr() for name, value in parameters(engine).items()}
    objects = {name: id(value) for name, value in parameters(engine).items()}
    new = dict(load(str(other)).model.named_parameters())
    engine.update_weights(new.items())
    for name, value in parameters(engine).items():
        assert torch.equal(value, new[name])
        assert value.data_ptr() == places[name] != new[name].data_ptr()
        assert id(value) == objects[name]


async def test_parameters_that_are_not_named_keep_their_values(engine: LocalEngine) -> None:
    before = copies(engine)
    engine.update_weights([(NORM, torch.full_like(before[NORM], 0.5))])
    changed = {n for n, value in parameters(engine).items() if not torch.equal(value, before[n])}
    assert changed == {NORM}


async def test_a_tied_weight_may_come_under_either_name(engine: LocalEngine) -> None:
    embedding = parameters(engine)["model.embed_tokens.weight"]
    assert "lm_head.weight" not in parameters(engine)
    engine.update_weights({"lm_head.weight": torch.ones_like(embedding)})
    assert torch.equal(embedding, torch.ones_like(embedding))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.wieght", torch.ones(64), r"no parameter 'model\.norm\.wieght'; did you mean "),
        (NORM, torch.ones(63), r"model\.norm\.weight has shape \(64,\), not \(63,\)"),
        (NORM, torch.ones(64, 1), r"not \(64, 1\)"),
        (NORM, torch.ones(64, dtype=torch.bfloat16), r"is torch\.float32, not torch\.bfloat16"),
    ],
)
async def test_a_wrong_weight_is_named_and_nothing_changes(
    engine: LocalEngine, name: str, value: torch.Tensor, message: str
) -> None:
    before, said = copies(engine), await reply(engine)
    good = ("model.embed_tokens.weight", torch.zeros_like(before["model.embed_tokens.weight"]))
    with pytest.raises(ConfigError, match=message) as caught:
        engine.update_weights([good, (name, value)])
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in parameters(engine).items())
    again = await reply(engine)
    assert (again.completion_ids, again.policy_version) == (said.completion_ids, 0)


async def test_no_weights_at_all_are_an_error(engine: LocalEngine) -> None:
    with pytest.raises(ConfigError, match="no weights were given"):
        engine.update_weights({})
    assert engine.policy_version == 0


async def test_weights_are_refused_while_a_request_runs(engine: LocalEngine) -> None:
    before = copies(engine)
    task = asyncio.ensure_future(engine.complete(MESSAGES, Sampling(max_tokens=300)))
    await asyncio.sleep(0)  # it is in line now, taken or not
    with pytest.raises(ConfigError, match="while no request is running"):
        engine.update_weights({NORM: torch.zeros(64)})
    assert torch.equal(parameters(engine)[NORM], before[NORM])
    assert (await task).policy_version == 0
    assert engine.update_weights({NORM: torch.full((64,), 0.5)}) == 1


async def test_requests_during_an_update_get_the_new_weights(
    engine: LocalEngine, other: Path
) -> None:
    await reply(engine)  # so that the thread runs and waits
    new = dict(load(str(other)).model.named_parameters())

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, with requests coming in between the first and the second half."""
        for number, item in enumerate(new.items()):
            if number == len(new) // 2:
                submitted.set()
                assert go_on.wait(20)
            yield item

    submitted, go_on = threading.Event(), threading.Event()
    update = asyncio.ensure_future(asyncio.to_thread(engine.update_weights, slowly()))
    await asyncio.to_thread(submitted.wait, 20)
    waiting = [asyncio.ensure_future(reply(engine)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    go_on.set()
    assert await update == 1
    async with opened(other) as other_engine:
        expected = await reply(other_engine)
    for completion in await asyncio.gather(*waiting):
        assert completion.policy_version == 1
        assert completion.completion_ids == expected.completion_ids


async def test_an_adapters_weights_change_too(folder: Path, tmp_path: Path) -> None:
    adapters = [make_tiny_adapter(folder, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    async with opened(folder, adapters[0]) as engine, opened(folder, adapters[1]) as other_engine:
        before = await reply(engine)
        new = {n: value for n, value in parameters(other_engine).items() if "lora_" in n}
        places = {name: parameters(engine)[name].data_ptr() for name in new}
        assert len(new) == 2 * 7 * 3  # A and B of seven projections in three layers
        engine.update_weights(new)
        after, expected = await reply(engine), await reply(other_engine)
        assert {name: parameters(engine)[name].data_ptr() for name in new} == places
    assert after.completion_ids == expected.completion_ids != before.completion_ids
    assert after.policy_version == 1


async def test_a_policy_version_can_be_set(engine: LocalEngine) -> None:
    engine.weights_changed(policy_version=41)
    assert engine.policy_version == (await reply(engine)).policy_version == 41
    engine.weights_changed()
    assert (await reply(engine)).policy_version == 42


async def test_a_reply_that_spans_an_update_is_marked_token_by_token(
    engine: LocalEngine, other: Path
) -> None:
    """Each token has the log-probability that its weights give it after the tokens before it."""
    models = [load(str(other)).model for _ in range(2)]
    models[0].load_state_dict(copies(engine), strict=False)
    sampling = Sampling(max_tokens=400, temperature=1.0, seed=4)
    tasks = [asyncio.ensure_future(engine.generate(range(20, 40), sampling)) for _ in range(2)]
    while not engine.load.num_running:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    new = dict(models[1].named_parameters())
    await asyncio.to_thread(engine.update_weights, new, policy_version=5, while_running=True)
    for completion in await asyncio.gather(*tasks):
        assert completion.token_versions is not None
        assert completion.completion_ids is not None
        assert completion.prompt_ids is not None
        assert completion.logprobs is not None
        versions = completion.token_versions
        assert (completion.policy_version, len(versions)) == (0, len(completion.completion_ids))
        assert list(versions) == sorted(versions)
        assert set(versions) == {0, 5}
        ids = torch.tensor([[*completion.prompt_ids, *completion.completion_ids]])
        with torch.no_grad():
            logprobs = [model(ids).logits[0].log_softmax(-1) for model in models]
        first = len(completion.prompt_ids) - 1
        for place, (token, version) in enumerate(
            zip(completion.completion_ids, versions, strict=True)
        ):
            expected = logprobs[version // 5][first + place, token].item()
            assert completion.logprobs[place] == pytest.approx(expected, abs=1e-4)
