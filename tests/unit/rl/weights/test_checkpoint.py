"""Checkpoints: restored bit for bit, complete or absent, and exported for other programs."""

import json
import os
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from memagent import __version__
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import ConfigError, RunError
from memagent.rl.settings import OptimSettings
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.policy import Policy
from memagent.rl.weights.checkpoint import (
    export,
    export_gguf,
    find_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    load_weights,
    random_state,
    read_optimizer,
    read_state,
    restore_random_state,
)
from memagent.tracking import Tracker
from tests.support.checkpoint_kills import save_checkpoint
from tests.support.sizes import sized
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import KINDS, make_tiny_adapter, make_tiny_model

ROOT = Path(__file__).resolve().parents[4]
IDS = torch.arange(2, 40)[None]
NUM_KILLS = sized(12, 24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(root / kind, kind) for kind in KINDS}


def test_every_global_generator_continues_where_a_checkpoint_was_saved() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.gauss(), np.random.normal(), np.random.random(), torch.rand(1).item()]  # fmt: skip

    drawn()
    state = json.loads(json.dumps(random_state()))
    before = drawn()
    restore_random_state(state)
    assert drawn() == before


def with_adapter(loaded: LoadedModel, *, seed: int = 0) -> LoadedModel:
    """Put a random adapter into a model, as training does."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")  # fmt: skip
    loaded.model.add_adapter(config)
    changed(loaded, seed=seed)
    return loaded


def changed(loaded: LoadedModel, *, seed: int) -> None:
    """Give all trainable parameters other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=generator)


def save(run: Path, loaded: LoadedModel, step: int = 1, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "optimizer": {"moments": torch.arange(3.0)},
        "state": {"position": 160, "rates": [0.1, 1 / 3]},
        "keep": 2,
        **changes,
    }
    name = f"step-{step:06}"
    return save_checkpoint(run, name, model=loaded.model, tokenizer=loaded.tokenizer, **arguments)


def steps_of(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run)]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert torch.equal(one[name], other[name]), name


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


# --- restoring ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_restored_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    loaded = load(str(folders[kind]), dtype=dtype)
    Policy(loaded.model)  # training has its own attention; nothing of that is saved
    changed(loaded, seed=1)
    checkpoint = save(tmp_path, loaded)
    other = load(str(folders[kind]), dtype=dtype)
    addresses = [parameter.data_ptr() for parameter in other.model.parameters()]
    load_weights(other.model, checkpoint)
    assert_same(weights(other.model), weights(loaded.model))
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == addresses
    again = load(str(checkpoint / "model"), dtype=dtype)
    assert torch.equal(logits(again.model), logits(other.model))
    assert again.eos_ids == loaded.eos_ids
    assert again.window == loaded.window


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_is_restored_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    loaded = with_adapter(load(str(folders[kind]), dtype=dtype))
    checkpoint = save(tmp_path, loaded)
    other = with_adapter(load(str(folders[kind]), dtype=dtype), seed=1)
    addresses = [parameter.data_ptr() for parameter in other.model.parameters()]
    load_weights(other.model, checkpoint)
    assert_same(weights(other.model), weights(loaded.model))
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == addresses
    again = load(str(folders[kind]), adapter=str(checkpoint / "adapter"), dtype=dtype)
    assert torch.equal(logits(again.model), logits(loaded.model))
    assert not torch.equal(logits(again.model), logits(load(str(folders[kind]), dtype=dtype).model))


def test_only_the_adapter_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = save(tmp_path, with_adapter(load(str(folders["llama"]))))
    assert sorted(path.name for path in checkpoint.iterdir()) == ["adapter", "optimizer.safetensors", "state.json"]  # fmt: skip
    stored = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    layers = ("self_attn.q_proj", "mlp.up_proj")
    assert stored.keys() == {
        f"base_model.model.model.layers.{number}.{layer}.lora_{factor}.weight"
        for number in range(3)
        for layer in layers
        for factor in "AB"
    }
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folders["llama"])
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)


def test_state_and_optimizer_are_restored(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(str(folders["llama"]), dtype=torch.bfloat16)
    optimizer = Optimizer(loaded.model.named_parameters(), OptimSettings(), num_steps=2)
    loaded.model(IDS).logits.square().mean().backward()
    optimizer.step()
    checkpoint = save(tmp_path, loaded, optimizer=optimizer.state_dict())
    assert read_state(checkpoint) == {"position": 160, "rates": [0.1, 1 / 3]}
    assert_same(read_optimizer(checkpoint, optimizer.state_like), optimizer.state_dict())
    other = load(str(folders["llama"]), dtype=torch.bfloat16)
    load_weights(other.model, checkpoint)
    resumed = Optimizer(other.model.named_parameters(), OptimSettings(), num_steps=2)
    resumed.load_state_dict(read_optimizer(checkpoint, resumed.state_like))
    for model, steps in ((loaded.model, optimizer), (other.model, resumed)):
        model(IDS).logits.square().mean().backward()
        steps.step()
    assert_same(weights(other.model), weights(loaded.model))
    written = json.loads((checkpoint / "state.json").read_text())
    assert (written["format"], written["memagent"]) == (1, __version__)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            lambda f: load(str(f["llama"])),
            lambda f: load(str(f["qwen2"])),
            r"has another model or precision: lm_head\.weight differs",
        ),
        (
            lambda f: load(str(f["llama"])),
            lambda f: load(str(f["llama"]), dtype=torch.bfloat16),
            "has another model or precision",
        ),
        (
            lambda f: load(str(f["llama"])),
            lambda f: with_adapter(load(str(f["llama"]))),
            "contains a whole model",
        ),
        (
            lambda f: with_adapter(load(str(f["llama"]))),
            lambda f: load(str(f["llama"])),
            "contains an adapter",
        ),
    ],
    ids=["names", "precision", "model", "adapter"],
)
def test_weights_of_another_model_are_refused(
    folders: dict[str, Path], tmp_path: Path, saved: Any, loaded: Any, message: str
) -> None:
    checkpoint = save(tmp_path, saved(folders))
    other = loaded(folders)
    before = weights(other.model)
    with pytest.raises(RunError, match=f"{message}.*resume with the settings"):
        load_weights(other.model, checkpoint)
    assert_same(weights(other.model), before)


def test_a_damaged_checkpoint_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(str(folders["llama"]))
    checkpoint = save(tmp_path, loaded)
    for path, read in {
        "state.json": read_state,
        "optimizer.safetensors": lambda path: read_optimizer(path, dict.fromkeys),
        "model/model.safetensors": lambda one: load_weights(loaded.model, one),
    }.items():
        (checkpoint / path).write_bytes(b"{torn")
        with pytest.raises(RunError, match=f"cannot read .*{path}.*; remove"):
            read(checkpoint)
    (checkpoint / "state.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="format this version of memagent does not know"):
        read_state(checkpoint)
    with pytest.raises(RunError, match="is not a checkpoint"):
        load_weights(loaded.model, tmp_path)


# --- rotation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "expected"), [(1, [7]), (2, [6, 7]), (9, [*range(1, 8)])])
def test_old_checkpoints_are_removed(
    folders: dict[str, Path], tmp_path: Path, keep: int, expected: list[int]
) -> None:
    loaded = with_adapter(load(str(folders["llama"])))
    assert latest_checkpoint(tmp_path) is None
    for step in range(1, 8):
        path = save(tmp_path, loaded, step, keep=keep)
        assert latest_checkpoint(tmp_path) == path == tmp_path / "checkpoints" / f"step-{step:06}"
    assert steps_of(tmp_path) == expected
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(expected)


def test_checkpoints_are_ordered_by_number(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = with_adapter(load(str(folders["llama"])))
    for step in (999_999, 1_000_000):
        save(tmp_path, loaded, step)
    (tmp_path / "checkpoints" / "step-9999999-mine").mkdir()  # not ours
    assert steps_of(tmp_path) == [999_999, 1_000_000]


def test_checkpoints_of_the_warm_start_come_first_and_the_best_one_is_kept(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = with_adapter(load(str(folders["llama"])))
    arguments: dict[str, Any] = {
        "model": loaded.model,
        "tokenizer": loaded.tokenizer,
        "optimizer": {},
        "state": {},
        "keep": 1,
    }
    for name in ("warm-000140", "step-000001", "step-000002", "step-000003"):
        save_checkpoint(tmp_path, name, **arguments, kept="step-000001")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000003"]
    save_checkpoint(tmp_path, "warm-000200", **arguments, kept="step-000001")
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-000001", "step-000003"], "the newest is that of the last step"


def test_the_best_checkpoint_is_that_of_the_best_validation(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = with_adapter(load(str(folders["llama"])))
    for step in (1, 2):
        save(tmp_path, loaded, step)
    with Tracker(tmp_path, config={}, name="x", trackers=[]) as tracker:
        with pytest.raises(RunError, match="no validation"):
            find_checkpoint(tmp_path, best=True)
        for step, reward in ((0, 0.1), (1, 0.5), (2, 0.5)):
            tracker.log(step, {"reward": reward}, kind="validation")
            tracker.log(step, {"reward": 1.0}, kind="train")
        assert find_checkpoint(tmp_path, best=True).name == "step-000001"
        tracker.log(0, {"reward": 0.9}, kind="validation")
        with pytest.raises(RunError, match="before the first step, with a reward of"):
            find_checkpoint(tmp_path, best=True)
    assert find_checkpoint(tmp_path).name == "step-000002"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "validation", "step": 1, "reward": "x"}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged"):
        find_checkpoint(tmp_path, best=True)


# --- crashes ------------------------------------------------------------------------------------


def test_kills_leave_the_newest_checkpoint_complete(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.support.checkpoint_kills"]
    arguments = [str(folders["llama"]), str(tmp_path / "run"), str(NUM_KILLS)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] >= NUM_KILLS / 4
    assert found["num_hidden"] >= NUM_KILLS / 8


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [10, 100, 600, 10_000, 100_000])
def test_a_full_disk_leaves_the_checkpoints_before(
    folders: dict[str, Path], tmp_path: Path, num_bytes: int
) -> None:
    """The state, the optimizer, the config, the tokenizer and the weights are what does not fit."""
    loaded = load(str(folders["llama"]))
    first = save(tmp_path, loaded, 1, keep=1)
    with (
        files_of_at_most(num_bytes),
        pytest.raises(RunError, match=r"cannot write .*step-000002: File too large; ") as caught,
    ):
        save(tmp_path, loaded, 2, keep=1)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "checkpoints").iterdir()) == [first]
    load_weights(loaded.model, first)
    save(tmp_path, loaded, 2, keep=1)  # there is room again
    assert steps_of(tmp_path) == [2]


def test_a_state_that_json_cannot_express_leaves_nothing_behind(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(TypeError):
        save(tmp_path, load(str(folders["llama"])), state={"step": torch.zeros(1)})
    assert list((tmp_path / "checkpoints").iterdir()) == []


# --- export ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_is_loaded_by_transformers(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    loaded = load(str(folders[kind]))
    changed(loaded, seed=3)
    export(save(tmp_path, loaded), tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="sdpa", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(logits(model), logits(loaded.model))
    assert model.generation_config.eos_token_id == loaded.model.generation_config.eos_token_id  # type: ignore[union-attr]
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == (kind != "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "Who keeps  the ledger?\n"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        loaded.tokenizer.apply_chat_template(messages, tokenize=False)
    )
    text = "Who keeps  the ledger?\n"
    assert tokenizer.encode(text) == loaded.tokenizer.encode(text)


def test_an_exported_adapter_is_loaded_by_peft(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = with_adapter(load(str(folders["qwen3"])))
    export(save(tmp_path, loaded), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(folders["qwen3"], attn_implementation="sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft only warns where names do not fit
        model: Any = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert torch.equal(logits(model), logits(loaded.model))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_merged_model_gives_the_logits_of_model_and_adapter(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = with_adapter(load(str(folders["qwen2"])))
    export(save(tmp_path, loaded), tmp_path / "out", merge=True)
    assert not list((tmp_path / "out").glob("adapter*"))
    merged = load(str(tmp_path / "out"))
    assert torch.allclose(logits(merged.model), logits(loaded.model), atol=1e-4)
    difference = (logits(merged.model) - logits(load(str(folders["qwen2"])).model)).abs().max()
    assert difference > 0.1  # the adapter does change something


def test_sums_of_a_merged_model_are_rounded_once(folders: dict[str, Path], tmp_path: Path) -> None:
    low = load(str(folders["llama"]), dtype=torch.bfloat16)
    base = save(tmp_path / "base", low) / "model"  # a model that is stored in bfloat16
    loaded = with_adapter(load(str(base), dtype=torch.bfloat16))
    export(save(tmp_path, loaded), tmp_path / "out", merge=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    layer: Any = loaded.model.get_submodule("model.layers.1.self_attn.q_proj")
    a, b = (getattr(layer, f"lora_{factor}")["default"].weight.detach() for factor in "AB")
    expected = layer.weight.detach().float() + 2.0 * b.float() @ a.float()
    assert torch.equal(stored["model.layers.1.self_attn.q_proj.weight"], expected.bfloat16())
    unchanged = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(stored[unchanged], low.model.get_parameter(unchanged))


def test_the_adapter_of_a_gguf_file_is_merged_too(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(folders["llama"], file, kind=GGMLQuantizationType.F32)
    loaded = with_adapter(load(str(file)))
    export(save(tmp_path, loaded), tmp_path / "out", merge=True)
    merged = load(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.allclose(logits(merged.model), logits(loaded.model), atol=0.5, rtol=0.05)


def test_a_merge_needs_the_model_of_the_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "llama")
    checkpoint = save(tmp_path, with_adapter(load(str(source))))
    source.rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=r"model .*/source is not on this machine; name it with `model`"
    ):
        export(checkpoint, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))
    export(checkpoint, tmp_path / "out", merge=True, model=str(tmp_path / "moved"))
    assert (tmp_path / "out" / "model.safetensors").exists()


# --- GGUF files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "error"), [("f16", 0.005), ("q8_0", 0.1)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_gguf_file_has_the_merged_weights_and_the_header_of_its_source(
    architecture: str, kind: Any, error: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = write_gguf(folders[architecture], tmp_path / "model.gguf", general__author="someone")
    loaded = with_adapter(load(str(source)))
    export_gguf(save(tmp_path, loaded), tmp_path / "new.gguf", kind=kind)
    merged = load(str(tmp_path / "new.gguf"))
    expected = logits(loaded.model)
    assert (logits(merged.model) - expected).norm() < error * expected.norm()
    assert (logits(load(str(source)).model) - expected).norm() > 0.2 * expected.norm()
    fields, before = (GGUFReader(path).fields for path in (tmp_path / "new.gguf", source))
    assert fields["general.author"].contents() == "someone"
    own = {"general.file_type", "general.quantization_version"}
    assert {name for name in fields if not name.startswith("GGUF.")} - own == {
        name for name in before if not name.startswith("GGUF.")
    }
    tokens = "tokenizer.ggml.tokens"
    assert fields[tokens].contents() == before[tokens].contents()
    stored = {
        tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "new.gguf").tensors
    }
    assert stored["blk.0.attn_q.weight"] == kind.upper()
    assert stored["blk.0.attn_norm.weight"] == "F32"


def test_an_adapter_alone_becomes_a_gguf_file(folders: dict[str, Path], tmp_path: Path) -> None:
    source = write_gguf(folders["llama"], tmp_path / "model.gguf")
    loaded = load(str(source), adapter=str(make_tiny_adapter(folders["llama"], tmp_path / "one")))
    export_gguf(save(tmp_path, loaded), tmp_path / "new.gguf", kind=None)
    reader = GGUFReader(tmp_path / "new.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() > 0
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    weights = dict(loaded.model.named_parameters())
    name = "model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    heads, width = 4, 16
    expected = weights[name.format("B")].detach().view(heads, 2, width // 2, -1).transpose(1, 2)
    assert np.array_equal(found["blk.0.attn_q.weight.lora_b"], expected.reshape(heads * width, -1))
    down = weights[name.format("A")].detach().numpy()
    assert np.array_equal(found["blk.0.attn_q.weight.lora_a"], down)


def test_a_gguf_file_is_made_of_adapters_of_gguf_files_only(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    whole = save(tmp_path / "whole", load(str(folders["llama"])))
    with pytest.raises(ConfigError, match="contains a whole model, not an adapter"):
        export_gguf(whole, tmp_path / "new.gguf", kind="f16")
    adapter = save(tmp_path / "adapter", with_adapter(load(str(folders["llama"]))))
    with pytest.raises(ConfigError, match="is no GGUF file here"):
        export_gguf(adapter, tmp_path / "new.gguf", kind="f16")
    (tmp_path / "new.gguf").write_text("mine")
    with pytest.raises(RunError, match=r"new\.gguf already exists; name a new file"):
        export_gguf(adapter, tmp_path / "new.gguf", kind="f16")


def test_the_folder_of_an_adapter_is_exported_too(folders: dict[str, Path], tmp_path: Path) -> None:
    adapter = save(tmp_path, with_adapter(load(str(folders["llama"])))) / "adapter"
    assert find_checkpoint(adapter) == adapter
    export(adapter, tmp_path / "out", merge=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_an_existing_folder_is_not_overwritten(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = save(tmp_path, with_adapter(load(str(folders["llama"]))))
    (tmp_path / "mine").mkdir()
    export(checkpoint, tmp_path / "mine")  # an empty one may be there
    with pytest.raises(RunError, match="mine already exists; name a new folder"):
        export(checkpoint, tmp_path / "mine")
    with pytest.raises(RunError, match="is not a checkpoint"):
        export(tmp_path, tmp_path / "other")
