"""The GPU's way of laying out work, on the CPU: its plain-torch versions give the tokens of transformers.

The kernels themselves are compared in tests/gpu, where there is a GPU.
"""

from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from memagent.engines.local.cuda.layout import prompt_layout, reply_inputs, reply_layout
from memagent.engines.local.cuda.model import GpuModel
from memagent.engines.local.generator import Generator
from memagent.engines.local.sampling import SampledTokens, uniform, uniforms
from memagent.engines.local.scheduler import GenerationRequest, Piece, Scheduler
from memagent.types import Sampling
from tests.support.tiny_models import KINDS, make_tiny_model
from tests.unit.engines.local.test_generator import all_free, prompts_of, reference, run


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def generator_of(model: Any, *, num_slots: int = 2048, max_running: int = 8) -> Generator:
    generator = Generator(
        model,
        num_slots=num_slots,
        eos_ids=[model.generation_config.eos_token_id],
        max_batch_tokens=64,
        max_running=max_running,
    )
    generator._model = GpuModel(model, num_slots, max_running=max_running)
    return generator


@pytest.mark.parametrize("num_slots", [2048, 300])
def test_shared_and_preempted_requests_give_the_tokens_of_transformers(
    model: Any, num_slots: int
) -> None:
    shared = prompts_of(model, 1, seed=2, longest=90)[0]
    prompts = [shared + own for own in prompts_of(model, 7, seed=3, longest=30)]
    prompts += prompts_of(model, 3, seed=4)
    generator = generator_of(model, num_slots=num_slots)
    requests = [
        generator.submit(prompt, Sampling(max_tokens=5 + 3 * number, temperature=0.0), seed=0)
        for number, prompt in enumerate(prompts)
    ]
    run(generator)
    for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert request.completion_ids == reference(model, prompt, 5 + 3 * number)
    assert all_free(generator)


def test_sampled_replies_are_those_of_the_plain_engine(model: Any) -> None:
    prompts = prompts_of(model, 6, seed=5)
    sampling = [
        Sampling(max_tokens=12, temperature=0.9, top_k=3 if number == 2 else None)
        for number in range(len(prompts))
    ]

    def replies(generator: Generator) -> list[GenerationRequest]:
        made = [
            generator.submit(prompt, how, seed=number)
            for number, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
        ]
        run(generator)
        return made

    plain = Generator(
        model, num_slots=2048, eos_ids=[model.generation_config.eos_token_id], max_batch_tokens=64
    )
    for own, other in zip(replies(generator_of(model)), replies(plain), strict=True):
        assert own.completion_ids == other.completion_ids
        assert np.allclose(own.logprobs, other.logprobs, atol=1e-4)


def test_a_stop_text_is_found_among_several_tokens() -> None:
    """Tokens are sampled eight at a time; those after the stop text are discarded."""

    class Counting:
        max_steps = 8

        def run(self, pieces: list[Piece], steps: int) -> Any:
            found = []
            for piece in pieces:
                if piece.is_last:
                    begin = len(piece.request.completion_ids)
                    count = steps if piece.is_reply else 1
                    ids = list(range(begin, begin + count))
                    found.append((piece.request, SampledTokens(ids, [0.0] * count)))
            return found

        def weights_changed(self) -> None: ...

    counts: list[int] = []
    generator = Generator.__new__(Generator)
    generator.__dict__.update(
        policy_version=0,
        _model=Counting(),
        _eos_ids=frozenset(),
        _ends_text=lambda request: bool(request.sampling.stop) and 11 in request.completion_ids,
        _on_tokens=lambda request, count: counts.append(count),
        scheduler=Scheduler(512, max_batch_tokens=64, max_running=4),
        num_computed_tokens=0,
        _max_batch_tokens=64,
        _num_steps_since=0,
    )
    stopped = generator.submit([1, 2], Sampling(max_tokens=40, stop=("x",)), seed=0)
    free = generator.submit([3], Sampling(max_tokens=20), seed=0)
    run(generator)
    assert stopped.completion_ids == list(range(12))
    assert stopped.finish_reason == "stop"
    assert free.completion_ids == list(range(20))
    assert free.finish_reason == "length"
    assert sum(counts) == 32


def test_rows_with_a_common_prefix_read_it_together() -> None:
    scheduler = Scheduler(4096, max_batch_tokens=4096, max_running=16)
    shared = tuple(range(1000, 1300))
    requests = [
        GenerationRequest(
            prompt_ids=(*shared, 5000 + n, 7), sampling=Sampling(max_tokens=9), seed=n
        )
        for n in range(6)
    ]
    for request in requests:
        scheduler.submit(request)
    for _ in range(2):
        for piece in scheduler.next_pieces():
            scheduler.computed(piece)
    for request in requests:
        request.completion_ids.append(1)
    replies = [piece.request for piece in scheduler.next_pieces(4) if piece.is_reply]
    layout = reply_layout(replies, tile_rows=5, num_processors=1)
    inputs = reply_inputs(layout.order, set(replies), steps=4, padding_slot=4096)
    together = [item for item in layout.items.tolist() if item[1] > 1]
    assert layout.num_shared_items == len(together)
    assert {(row, count) for row, count, *_ in together} == {(0, 5)}
    # five rows in one tile and the sixth alone read the 300 shared tokens; each reads its own 2 + 9
    assert sum(item[4] for item in layout.items.tolist() if item[0] == 0 and item[1] == 5) == 300
    assert sum(item[4] for item in layout.items.tolist()) == 2 * 300 + 6 * 11
    own = {tuple(column) for column in inputs.slots.T.tolist()}
    assert len(own) == 6
    assert all(slots == tuple(range(slots[0], slots[0] + 4)) for slots in own)


def test_steps_beyond_the_end_of_a_reply_go_to_the_padding_slot() -> None:
    scheduler = Scheduler(64, max_batch_tokens=64, max_running=2)
    request = GenerationRequest(prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=3), seed=0)
    scheduler.submit(request)
    for piece in scheduler.next_pieces():
        scheduler.computed(piece)
    request.completion_ids.append(4)
    scheduler.next_pieces(8)
    inputs = reply_inputs([request], {request}, steps=8, padding_slot=64)
    assert inputs.slots[:, 0].tolist() == [3, 4, 5, 64, 64, 64, 64, 64]
    ended = reply_inputs([request], set(), steps=2, padding_slot=64)
    assert (ended.positions.tolist(), ended.slots.tolist()) == ([-1], [[64], [64]])


def test_a_layout_is_reused_until_a_request_joins_or_moves() -> None:
    scheduler = Scheduler(1024, max_batch_tokens=256, max_running=20, grow_slots=4)
    requests = [
        GenerationRequest(prompt_ids=(n, 2, 3), sampling=Sampling(max_tokens=30), seed=0)
        for n in range(16)
    ]
    for request in requests:
        scheduler.submit(request)
    for piece in scheduler.next_pieces():
        scheduler.computed(piece)
        piece.request.completion_ids.append(4)
    layout = reply_layout(requests, tile_rows=5, num_processors=1)
    assert layout.serves(set(requests))
    assert layout.serves(set(requests[2:])), "two of sixteen have ended"
    assert not layout.serves(set(requests[3:])), "too many rows would idle"
    stranger = GenerationRequest(prompt_ids=(7,), sampling=Sampling(max_tokens=1), seed=0)
    assert not layout.serves({*requests[1:], stranger})
    scheduler.next_pieces(8)  # more tokens than they had slots for
    assert not layout.serves(set(requests))


def test_a_piece_that_reaches_over_nodes_finds_its_slots() -> None:
    """A prompt's node may be split by a later request of the same step."""
    scheduler = Scheduler(256, max_batch_tokens=256, max_running=4)
    first = GenerationRequest(prompt_ids=tuple(range(10)), sampling=Sampling(max_tokens=1), seed=0)
    second = GenerationRequest(prompt_ids=(*range(6), 99), sampling=Sampling(max_tokens=1), seed=0)
    for request in (first, second):
        scheduler.submit(request)
    pieces = scheduler.next_pieces()
    assert [(piece.start, piece.length) for piece in pieces] == [(0, 10)]
    layout = prompt_layout(pieces, tile_rows=4)
    assert layout.slots.tolist() == list(range(10))
    assert layout.runs.tolist() == [[0, 0, 6], [6, 6, 4]]
    assert sorted(layout.tiles.tolist()) == [[0, 4, 0, 2], [4, 4, 0, 2], [8, 2, 0, 2]]


def test_uniforms_of_a_batch_equal_those_of_each_request() -> None:
    seeds, starts = [0, 1, 2**63 - 1, 12345], [0, 5, 0, 127]
    expected = [
        [uniform(seed, start + step) for seed, start in zip(seeds, starts, strict=True)]
        for step in range(3)
    ]
    assert uniforms(seeds, starts, 3).tolist() == expected
