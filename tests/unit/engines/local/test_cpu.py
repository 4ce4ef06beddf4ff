"""The kernel for a CPU against torch and transformers: packed or not, any number of rows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from memagent.engines.local.cpu.model import CpuModel
from memagent.engines.local.cpu.native import Kernels, _instructions, build, kernels
from memagent.engines.local.cpu.packing import PACKERS
from memagent.engines.local.generator import Generator
from memagent.engines.local.loading import LoadedModel, load
from memagent.engines.local.scheduler import GenerationRequest
from memagent.types import Sampling
from tests.support.tiny_gguf import K_KINDS, random_blocks, write_gguf
from tests.support.tiny_models import KINDS, Kind, make_tiny_adapter, make_tiny_model

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")

NUM_MATRICES = 3 * 7 + 1
"""Of a tiny model: seven in each of three layers, and the head."""
WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""A head size of 64, for which the kernel has special code."""
OF_256: dict[str, Any] = {**WIDE, "hidden_size": 256, "intermediate_size": 512}
"""Rows of whole blocks of 256."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    found = build(COMPILER, tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", **WIDE)


def cpu_model(generator: Generator) -> CpuModel:
    model = generator._model
    assert isinstance(model, CpuModel)
    return model


def generator_of(loaded: LoadedModel, library: Kernels | None, num_slots: int = 4096) -> Generator:
    """A generator without end tokens, whose model uses the given kernels."""
    generator = Generator(loaded.model, num_slots=num_slots, eos_ids=(), max_batch_tokens=64)
    generator._model = CpuModel(loaded.model, num_slots, library, gguf=loaded.gguf)
    return generator


def prompts_of(loaded: LoadedModel, count: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(count)
    size = loaded.model.config.vocab_size
    return [[rng.randrange(3, size) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def replies(
    generator: Generator, prompts: list[list[int]], **sampling: Any
) -> list[GenerationRequest]:
    given = Sampling(**{"max_tokens": 12, "temperature": 0.0, **sampling})
    requests = [generator.submit(prompt, given, seed=n) for n, prompt in enumerate(prompts)]
    while generator.has_work:
        generator.step()
    return requests


def assert_same(ours: list[GenerationRequest], theirs: list[GenerationRequest]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.completion_ids == other.completion_ids
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
)
def test_packed_weights_compute_what_their_float32_values_do(
    kind: GGMLQuantizationType, library: Kernels, tiny: Path, tmp_path: Path
) -> None:
    loaded = load(str(write_gguf(tiny, tmp_path / "model.gguf", kind=kind)))
    packed = generator_of(loaded, library)
    assert cpu_model(packed).num_packed == NUM_MATRICES
    for count in (1, 2, 3, 5, 11):  # every number of rows that the kernel takes at once
        prompts = prompts_of(loaded, count)
        assert_same(replies(packed, prompts), replies(generator_of(loaded, None), prompts))


@pytest.mark.parametrize("kind", list(K_KINDS))
@pytest.mark.parametrize("flags", [("-march=native",), ("-mavx2", "-mfma"), ()])
def test_blocks_of_256_compute_what_their_float32_values_do(
    kind: GGMLQuantizationType, flags: tuple[str, ...], tmp_path: Path
) -> None:
    if "-mavx2" in flags and "avx2" not in _instructions():
        pytest.skip("this processor has no AVX2")
    library = build(COMPILER, tmp_path / "kernels", ways=((flags, ()),))
    assert library is not None
    folder = make_tiny_model(tmp_path / "llama", "llama", **OF_256)
    loaded = load(str(write_gguf(folder, tmp_path / "model.gguf", kind=kind)))
    packed = generator_of(loaded, library)
    assert cpu_model(packed).num_packed == NUM_MATRICES
    for count in (1, 2, 3, 5, 11):
        prompts = prompts_of(loaded, count)
        assert_same(replies(packed, prompts), replies(generator_of(loaded, None), prompts))


@pytest.mark.parametrize("kind", list(K_KINDS))
def test_blocks_of_256_have_the_values_that_gguf_reads(
    kind: GGMLQuantizationType, library: Kernels
) -> None:
    raw = random_blocks((37, 1280), kind)
    packed = PACKERS[kind](raw)
    weights = torch.from_numpy(dequantize(raw, kind)).contiguous()
    assert library.same_weights(packed.matrix(), weights.data_ptr(), 1)
    for row, column in ((0, 0), (17, 24), (36, 1279)):
        changed = weights.clone()
        changed[row, column] += weights.abs().max() / 1000
        assert not library.same_weights(packed.matrix(), changed.data_ptr(), 1)


def test_the_head_of_a_file_that_is_tied_again_stays_packed(
    library: Kernels, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "qwen2", "qwen2", **WIDE)
    kinds = GGMLQuantizationType
    path = write_gguf(folder, tmp_path / "m.gguf", kind=kinds.Q4_0, head_kind=kinds.Q8_0)
    loaded = load(str(path))
    assert loaded.model.config.tie_word_embeddings
    generator = generator_of(loaded, library)
    assert cpu_model(generator).num_packed == NUM_MATRICES
    prompts = prompts_of(loaded, 3)
    assert_same(replies(generator, prompts), replies(generator_of(loaded, None), prompts))


def test_kinds_that_cannot_be_packed_are_read_as_float32(
    library: Kernels, tiny: Path, tmp_path: Path
) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q5_1)
    loaded = load(str(path))
    generator = generator_of(loaded, library)
    assert cpu_model(generator).num_packed == 0
    prompts = prompts_of(loaded, 3)
    assert_same(replies(generator, prompts), replies(generator_of(loaded, None), prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_read_in_place(kind: Kind, library: Kernels, tmp_path: Path) -> None:
    loaded = load(str(make_tiny_model(tmp_path / kind, kind)))
    prompts = prompts_of(loaded, 9)
    ours = replies(generator_of(loaded, library), prompts)
    assert_same(ours, replies(generator_of(loaded, None), prompts))


def test_a_long_context_is_read_in_parts(library: Kernels, tiny: Path) -> None:
    loaded = load(str(tiny))
    prompt = prompts_of(loaded, 1)[0] * 30
    prompts = [prompt[:400], [*prompt[:400], 7, 8], [5, *prompt[:330]]]  # two share a prefix
    ours = replies(generator_of(loaded, library), prompts)
    ids = torch.tensor([prompts[0]])
    expected = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert ours[0].completion_ids == expected[0, 400:].tolist()
    assert_same(ours, replies(generator_of(loaded, None), prompts))


def test_a_row_does_not_depend_on_its_batch(library: Kernels, tiny: Path) -> None:
    loaded = load(str(tiny))
    generator = generator_of(loaded, library)
    model, scheduler = cpu_model(generator), generator.scheduler
    given = Sampling(max_tokens=8, temperature=0.0)
    for prompt in prompts_of(loaded, 11, longest=20):
        generator.submit(prompt, given, seed=0)
    while any(not request.completion_ids for request in [*scheduler.running, *scheduler.waiting]):
        generator.step()
    pieces = scheduler.next_pieces()
    assert len(pieces) > 8
    together = model.step(pieces)
    for row, piece in enumerate(pieces):
        assert torch.equal(model.step([piece])[0], together[row])


def test_changed_weights_are_read_and_the_others_stay_packed(
    library: Kernels, tiny: Path, tmp_path: Path
) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q4_1)
    loaded = load(str(path))
    generator = generator_of(loaded, library)
    prompts = prompts_of(loaded, 3)
    before = replies(generator, prompts)
    with torch.no_grad():
        weight = loaded.model.model.layers[1].mlp.up_proj.weight
        weight.mul_(1.7)
        weight[5, 9] += 0.5
    generator.weights_changed()
    assert cpu_model(generator).num_packed == NUM_MATRICES - 1
    after = replies(generator, prompts)
    assert_same(after, replies(generator_of(loaded, None), prompts))
    assert [r.logprobs for r in after] != [r.logprobs for r in before]


def test_one_changed_weight_is_detected(library: Kernels, tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    loaded = load(str(path))
    generator = generator_of(loaded, library)
    with torch.no_grad():
        loaded.model.lm_head.weight[-1, -1] *= 1.001
    generator.weights_changed()
    assert cpu_model(generator).num_packed == NUM_MATRICES - 1


def test_an_adapter_works_on_packed_weights_and_follows_training(
    library: Kernels, tiny: Path, tmp_path: Path
) -> None:
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q4_1)
    adapter = make_tiny_adapter(tiny, tmp_path / "adapter")
    loaded, plain = load(str(path), adapter=str(adapter)), load(str(path))
    generator = generator_of(loaded, library)
    prompts = prompts_of(loaded, 5)
    adapted = replies(generator, prompts)
    assert_same(adapted, replies(generator_of(loaded, None), prompts))
    without = replies(generator_of(plain, library), prompts)
    assert [r.completion_ids for r in adapted] != [r.completion_ids for r in without]
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-0.5)
    generator.weights_changed()
    assert cpu_model(generator).num_packed == NUM_MATRICES
    assert_same(replies(generator, prompts), replies(generator_of(loaded, None), prompts))


def test_a_build_without_wide_vectors_computes_the_same(
    library: Kernels, tiny: Path, tmp_path: Path
) -> None:
    plain = build(COMPILER, tmp_path / "kernels", ways=(((), ()),))
    assert plain is not None
    path = write_gguf(tiny, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q4_1)
    loaded = load(str(path))
    prompts = prompts_of(loaded, 5)
    ours = replies(generator_of(loaded, plain), prompts)
    assert_same(ours, replies(generator_of(loaded, library), prompts))


def test_without_a_compiler_there_is_no_kernel(tmp_path: Path) -> None:
    assert build(None, tmp_path) is None
    assert build(shutil.which("false"), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    first = build(COMPILER, tmp_path, ways=(((), ()),))
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert first is not None
    assert len(made) == 1
    assert build(COMPILER, tmp_path, ways=(((), ()),)) is not None
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made


def test_the_kernel_can_be_disabled(tiny: Path) -> None:
    model = load(str(tiny)).model
    assert not isinstance(Generator(model, num_slots=64, eos_ids=(), native=False)._model, CpuModel)
    assert isinstance(Generator(model, num_slots=64, eos_ids=())._model, CpuModel)
    assert kernels() is not None
