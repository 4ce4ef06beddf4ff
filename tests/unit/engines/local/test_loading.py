"""Loading models: each architecture, GGUF, adapters, and every way it can fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from memagent.engines import store
from memagent.engines.local import gguf_files
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import ConfigError
from memagent.files import size_of
from memagent.tokens.tokenizers import open_tokenizer
from tests.conftest import prose
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import KINDS, WINDOW, Kind, make_tiny_adapter, make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the red ledger of 1873?"}]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {kind: make_tiny_model(folder / kind, kind) for kind in KINDS}


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def logits(loaded: LoadedModel, text: str = "In 1873 the miller sold") -> torch.Tensor:
    ids = torch.tensor([loaded.tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        values: torch.Tensor = loaded.model(ids).logits
    return values


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_model_transformers_gives(kind: Kind, tiny: dict[Kind, Path]) -> None:
    loaded = load(str(tiny[kind]))
    reference = AutoModelForCausalLM.from_pretrained(tiny[kind])
    ids = torch.tensor([loaded.tokenizer.encode(prose(3))])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training
    assert loaded.window == WINDOW
    assert loaded.eos_ids == (loaded.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert loaded.name == str(tiny[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_is_the_files_own_and_ours_counts_the_same(
    kind: Kind, tiny: dict[Kind, Path]
) -> None:
    loaded = load(str(tiny[kind]))
    counter = open_tokenizer(str(loaded.tokenizer_folder))
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)
    for text in (prose(20), "naïve 漢字 🙂 12345", "<|im_start|>user\n"):
        ids = loaded.vocabulary.control.encode_text(text)
        assert loaded.tokenizer.decode(ids) == text
        assert counter.count(text) == len(ids)
    prompt = loaded.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True
    )
    assert counter.count_messages(MESSAGES) == len(prompt["input_ids"])


def test_loading_prints_nothing(tiny: dict[Kind, Path], capfd: pytest.CaptureFixture[str]) -> None:
    load(str(tiny["llama"]))
    assert capfd.readouterr() == ("", "")


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_is_the_model_it_was_converted_from(
    kind: Kind, tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny[kind], tmp_path / "model.gguf")
    loaded, original = load(str(path)), load(str(tiny[kind]))
    assert loaded.window == WINDOW
    assert loaded.eos_ids == original.eos_ids
    ours, theirs = loaded.model.state_dict(), original.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert torch.equal(logits(loaded), logits(original))


def test_quantised_weights_are_the_ones_gguf_means(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    path = write_gguf(tiny["llama"], tmp_path / "q.gguf", kind=GGMLQuantizationType.Q8_0)
    weights = load(str(path)).model.state_dict()
    original = load(str(tiny["llama"])).model.state_dict()
    for name, weight in original.items():
        largest = weight.abs().max().item()
        assert (weights[name] - weight).abs().max().item() <= largest / 127
    assert not torch.equal(weights["lm_head.weight"], original["lm_head.weight"])


def test_embeddings_that_a_file_stores_twice_are_tied_again(
    tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    path = tmp_path / "tied.gguf"
    kinds = GGMLQuantizationType
    write_gguf(tiny["qwen2"], path, kind=kinds.Q4_0, head_kind=kinds.Q8_0)
    model: Any = load(str(path)).model
    head, embeddings = model.lm_head.weight, model.get_input_embeddings().weight
    assert head is embeddings
    original = load(str(tiny["qwen2"])).model.get_input_embeddings().weight
    error = (head - original).norm() / original.norm()
    assert error < 0.01, "the values are those with more bits"
    apart: Any = load(str(write_gguf(tiny["llama"], tmp_path / "untied.gguf"))).model
    assert apart.lm_head.weight is not apart.get_input_embeddings().weight


def test_the_tokenizer_of_a_gguf_file_is_the_models_own(
    tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny["llama"], tmp_path / "model.gguf")
    loaded, original = load(str(path)), load(str(tiny["llama"]))
    for text in (prose(20), "naïve 漢字 🙂 12345", "<|im_start|>user\n<|im_end|>"):
        ids = original.tokenizer.encode(text, add_special_tokens=False)
        assert loaded.tokenizer.encode(text, add_special_tokens=False) == ids
        assert loaded.tokenizer.decode(ids) == text
    counter = open_tokenizer(str(loaded.tokenizer_folder))
    assert counter.knows_template
    assert counter.count_messages(MESSAGES) == open_tokenizer(str(tiny["llama"])).count_messages(
        MESSAGES
    )


def test_the_header_is_cached_and_a_damaged_copy_is_rebuilt(
    tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny["qwen2"], tmp_path / "model.gguf")
    first = load(str(path))
    (kept,) = (tmp_path / "cache" / "memagent" / "gguf").iterdir()
    assert first.tokenizer_folder == kept
    made = (kept / "header.json").stat().st_mtime_ns
    load(str(path))
    assert (kept / "header.json").stat().st_mtime_ns == made
    (kept / "header.json").write_text('{"tensors": [[]]}')
    assert torch.equal(logits(load(str(path))), logits(first))


def test_headers_of_models_that_were_not_used_for_longest_leave_the_cache(
    tiny: dict[Kind, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "memagent" / "gguf"
    kinds: tuple[Kind, ...] = ("llama", "qwen2", "qwen3")
    first, second, third = (write_gguf(tiny[kind], tmp_path / f"{kind}.gguf") for kind in kinds)
    load(str(first))
    (kept,) = cache.iterdir()
    load(str(second))
    for number, path in enumerate(cache.iterdir()):
        os.utime(path, (number, number))
    load(str(first))
    monkeypatch.setattr(gguf_files, "MAX_CACHE_BYTES", int(2.5 * size_of(kept)))
    load(str(third))
    assert kept in cache.iterdir()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_truncated_gguf_file_is_a_one_line_error(
    tiny: dict[Kind, Path], tmp_path: Path, keep: float
) -> None:
    path = write_gguf(tiny["llama"], tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(ConfigError, match="truncated") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_truncated_after_its_header_was_cached_is_refused(
    tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny["llama"], tmp_path / "model.gguf")
    size = path.stat().st_size
    load(str(path))
    (kept,) = (tmp_path / "cache" / "memagent" / "gguf").iterdir()
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(ConfigError, match="truncated"):
        load(str(path))
    assert kept.is_dir()


def test_what_cannot_be_run_faithfully_is_refused(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    folder = tiny["llama"]
    cases = {
        "a gemma3 model; torch runs llama, qwen2, qwen3": {"architecture": "gemma3"},
        "gpt2/deepseek-llm; known": {"pre": "deepseek-llm"},
        "uses RoPE scaling": {"llama__rope__scaling__type": "yarn"},
    }
    for number, (message, change) in enumerate(cases.items()):
        path = write_gguf(folder, tmp_path / f"{number}.gguf", **change)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=message):
            load(str(path))


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_added_as_peft_does_and_stays_unmerged(
    kind: Kind, tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    adapter = make_tiny_adapter(tiny[kind], tmp_path / "lora")
    loaded = load(str(tiny[kind]), adapter=str(adapter))
    base = load(str(tiny[kind]))
    reference = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny[kind]), str(adapter)
    ).eval()
    ids = torch.tensor([loaded.tokenizer.encode(prose(2))])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)
        assert not torch.allclose(loaded.model(ids).logits, base.model(ids).logits)
    parameters = dict(loaded.model.named_parameters())
    assert type(loaded.model) is type(base.model)
    assert any("lora_A" in name for name in parameters)
    assert all(value.requires_grad == ("lora_" in name) for name, value in parameters.items())


def test_a_merged_adapter_gives_the_same_logits_without_layers_of_its_own(
    tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    adapter = str(make_tiny_adapter(tiny["qwen2"], tmp_path / "lora"))
    apart = load(str(tiny["qwen2"]), adapter=adapter)
    merged = load(str(tiny["qwen2"]), adapter=adapter, merged=True)
    change = (logits(apart) - logits(load(str(tiny["qwen2"])))).abs().max()
    assert (logits(merged) - logits(apart)).abs().max() < change / 100
    names = [name for name, _ in merged.model.named_parameters()]
    assert names == [name for name, _ in load(str(tiny["qwen2"])).model.named_parameters()]


def test_an_adapter_fits_a_gguf_file_too(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    adapter = str(make_tiny_adapter(tiny["llama"], tmp_path / "lora"))
    path = str(write_gguf(tiny["llama"], tmp_path / "model.gguf"))
    assert torch.equal(
        logits(load(path, adapter=adapter)), logits(load(str(tiny["llama"]), adapter=adapter))
    )


def test_an_adapter_of_another_model_is_refused(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    wider = make_tiny_model(tmp_path / "wider", "llama", hidden_size=128)
    deeper = make_tiny_model(tmp_path / "deeper", "llama", num_hidden_layers=4)
    for other in (wider, deeper):
        adapter = make_tiny_adapter(other, tmp_path / f"{other.name}-lora")
        with pytest.raises(ConfigError, match=r"does not fit|another model") as caught:
            load(str(tiny["llama"]), adapter=str(adapter))
        assert "\n" not in str(caught.value)


def test_an_adapter_may_be_split_over_files(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tiny["llama"], tmp_path / "lora")
    expected = logits(load(str(tiny["llama"]), adapter=str(adapter)))
    weights = load_file(adapter / "adapter_model.safetensors")
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for place in set(places.values()):
        part = {name: weights[name] for name in weights if places[name] == place}
        save_file(part, adapter / place)
    index = adapter / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(logits(load(str(tiny["llama"]), adapter=str(adapter))), expected)
    (adapter / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lora lacks part-1\.safetensors, a part of its weights"):
        load(str(tiny["llama"]), adapter=str(adapter))
    for content in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="is not an index of weights") as caught:
            load(str(tiny["llama"]), adapter=str(adapter))
        assert "\n" not in str(caught.value)


def test_a_folder_without_an_adapter_is_refused(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        load(str(tiny["llama"]), adapter=str(tmp_path))
    adapter = make_tiny_adapter(tiny["llama"], tmp_path / "lora")
    (adapter / "adapter_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="does not fit"):
        load(str(tiny["llama"]), adapter=str(adapter))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not an adapter"):
        load(str(tiny["llama"]), adapter=str(adapter))


# --- Failures --------------------------------------------------------------------------------


def test_a_model_that_was_not_pulled_says_how_to_pull_it() -> None:
    with pytest.raises(ConfigError, match="memagent models pull smollm2-135m"):
        load("smollm2-135m")
    with pytest.raises(ConfigError, match="did you mean smollm2-135m"):
        load("smolm2-135m")


def test_a_pulled_model_is_found_by_its_name(tiny: dict[Kind, Path]) -> None:
    shutil.copytree(tiny["llama"], store.models_folder() / "someone--some-model")
    loaded = load("someone/some-model")
    assert loaded.name == "someone/some-model"
    assert loaded.tokenizer_folder == store.models_folder() / "someone--some-model"


def test_broken_folders_are_one_line_errors(tiny: dict[Kind, Path], tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return copied(tiny["llama"], tmp_path / name)

    (broken("a") / "config.json").unlink()
    (broken("b") / "config.json").write_text("{")
    (broken("c") / "config.json").write_text('{"model_type": "gpt_neox"}')
    (broken("d") / "tokenizer.json").unlink()
    (broken("e") / "tokenizer.json").write_text("{}")
    (broken("f") / "chat_template.jinja").unlink()
    (broken("g") / "model.safetensors").unlink()
    (broken("h") / "model.safetensors").write_bytes(b"short")
    weights = load_file(broken("i") / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "i" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "j.txt").write_text("no model")
    expected = {
        "a": "has no config.json",
        "b": "config.json cannot be read",
        "c": "a gpt_neox model; the local engine runs llama, qwen2, qwen3",
        "d": "no tokenizer.json",
        "e": "has a broken tokenizer",
        "f": "no chat template",
        "g": "no .safetensors",
        "h": "cannot be loaded",
        "i": "is missing 1 weights, such as model.norm.weight",
        "j.txt": "is not a model",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load(str(tmp_path / name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["nonsense", "cuda:7", "meta:"])
def test_an_unknown_device_is_named(device: str, tiny: dict[Kind, Path]) -> None:
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here"):
        load(str(tiny["llama"]), device=device)


LOAD_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from memagent.engines.local.loading import load
from memagent.errors import ConfigError
small, large = sys.argv[1:]
load(small)  # so that only the large model needs more
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000,) * 2)
try:
    load(large)
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory as Linux does")
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_model_that_does_not_fit_the_memory_says_so(
    form: str, tiny: dict[Kind, Path], tmp_path: Path
) -> None:
    large = make_tiny_model(tmp_path / "large", "llama", intermediate_size=100_000)
    if form == "gguf":
        large = write_gguf(large, tmp_path / "large.gguf")
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITH_LITTLE_MEMORY, str(tiny["llama"]), str(large)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == (
        f"{large} does not fit the memory of cpu; use a smaller model or another device"
    )


@pytest.mark.parametrize("library", ["torch", "transformers", "gguf", "peft"])
def test_a_missing_library_names_the_extra(
    library: str, tiny: dict[Kind, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny["llama"], tmp_path / "model.gguf")
    adapter = make_tiny_adapter(tiny["llama"], tmp_path / "lora")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf'needs {library}; pip install "memagent\[gpu\]"'):
        load(str(path), adapter=str(adapter))
