"""Model files of strangers: whatever they hold, an answer or one line with the file's name."""

import json
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from memagent.engines.local.loading import load
from memagent.errors import ConfigError
from memagent.foreign import foreign_file
from memagent.gguf_format import read_contents
from memagent.tokens import templates as chat_templates
from memagent.tokens.templates import ChatTemplate
from memagent.tokens.tokenizers import open_tokenizer
from tests.conftest import QWEN_PATTERN, make_tokenizer
from tests.hostile import tokenizer_files
from tests.hostile.harness import tried
from tests.hostile.model_files import (
    ENDLESS,
    PATTERNS,
    TEMPLATES,
    Damaged,
    Originals,
    _Field,
    _joined,
    _split,
    complaint_of,
    make_originals,
    warm_up,
    wrong_with,
)

COUNT = 24
"""Damaged files in each run of the tests; `python -m tests.hostile.model_files` opens thousands."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    made = make_originals(tmp_path_factory.mktemp("originals"))
    warm_up(made)
    return made


@pytest.mark.timeout(120)
def test_damaged_models_give_an_answer_or_a_line(originals: Originals) -> None:
    assert tried(complaint_of(originals), COUNT, seed=1) == []


def test_damaged_tokenizers_count_or_give_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0)
    assert tried(tokenizer_files.complaint, COUNT, seed=1) == []


def never_ends(description: dict[str, Any]) -> None:
    vocabulary = description["model"]["vocab"]
    vocabulary["3"] = vocabulary.pop("z")  # the id of "3" is free


def twice(description: dict[str, Any]) -> None:
    vocabulary = description["model"]["vocab"]
    vocabulary["3"] = vocabulary["z"]


def far_away(description: dict[str, Any]) -> None:
    description["model"]["vocab"]["3"] = 10**9


def another_id(description: dict[str, Any]) -> None:
    description["added_tokens"][0]["id"] = 3


@pytest.mark.parametrize("change", [never_ends, twice, far_away, another_id])
def test_a_vocabulary_with_irregular_ids_counts(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    file = make_tokenizer(tmp_path, pattern=QWEN_PATTERN) / "tokenizer.json"
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description))
    assert open_tokenizer(str(tmp_path)).count("It was 3 in the zoo.") > 0


def with_field(originals: Originals, name: str, kind: int, payload: bytes) -> bytes:
    file = _split(originals.gguf)
    fields = [
        _Field(field.name, kind, payload) if field.name == name.encode() else field
        for field in file.fields
    ]
    return _joined(file._replace(fields=fields))


@pytest.mark.parametrize("count", [1, 3, 10**6, 2**32 - 1])
def test_the_number_of_layers_is_compared_with_the_weights(
    originals: Originals, tmp_path: Path, count: int
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_field(originals, "llama.block_count", 4, struct.pack("<I", count)))
    with pytest.raises(ConfigError, match=r"model\.gguf.*(2 layers|block_count)"):
        load(str(path))


def test_weights_that_share_bytes_are_refused(originals: Originals, tmp_path: Path) -> None:
    file = _split(originals.gguf)
    first = file.tensors[0]
    same = [one._replace(offset=first.offset) for one in file.tensors]
    path = tmp_path / "model.gguf"
    path.write_bytes(_joined(file._replace(tensors=same)))
    with pytest.raises(ConfigError, match=r"model\.gguf.* overlaps another weight"):
        load(str(path))


def test_the_configuration_of_a_folder_is_compared_with_its_weights(
    originals: Originals, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(originals.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"num_hidden_layers": 10**9}, {"hidden_size": 10**6, "head_dim": 8}):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=r"model.* configuration says"):
            load(str(folder))


@pytest.mark.parametrize("pattern", PATTERNS[:4])
@pytest.mark.parametrize("setting", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_in_an_adapter_takes_seconds_at_most(
    originals: Originals, tmp_path: Path, setting: str, pattern: str
) -> None:
    adapter = changed_adapter(
        originals, tmp_path, {setting: {pattern: 4} if setting == "rank_pattern" else pattern}
    )
    started = time.monotonic()
    assert wrong_with(Damaged(originals.folder, adapter), name="lora") is None
    assert time.monotonic() - started < 8


def test_a_pattern_that_takes_too_long_is_named(originals: Originals, tmp_path: Path) -> None:
    adapter = changed_adapter(originals, tmp_path, {"target_modules": ENDLESS})
    with pytest.raises(ConfigError, match=r"lora: the pattern .* never ends$"):
        load(str(originals.folder), adapter=str(adapter))


@pytest.mark.parametrize("source", TEMPLATES[1:], ids=range(1, len(TEMPLATES)))
def test_a_template_of_any_kind_ends_in_a_line(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0)
    message = _error_of(ChatTemplate(source, {}, name="m"))
    assert message.isprintable()
    assert len(message) < 400


def _error_of(template: ChatTemplate) -> str:
    try:
        return template.render([{"role": "user", "content": "Hi."}])[:100]
    except ConfigError as error:
        return str(error)


def changed_adapter(originals: Originals, tmp_path: Path, change: dict[str, Any]) -> Path:
    folder = tmp_path / "lora"
    shutil.copytree(originals.adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return folder


@pytest.mark.parametrize(
    "change",
    [{"r": 10**9}, {"layer_replication": [[0, 2]] * 1000}, {"megatron_config": {"a": 1}}],
    ids=str,
)
def test_what_is_more_than_the_weights_of_an_adapter_is_refused(
    originals: Originals, tmp_path: Path, change: dict[str, Any]
) -> None:
    adapter = changed_adapter(originals, tmp_path, change)
    with pytest.raises(ConfigError, match=r"lora (has no weights of rank|is more than LoRA)"):
        load(str(originals.folder), adapter=str(adapter))


def test_a_pattern_in_an_adapter_names_the_modules_that_peft_would_find(
    originals: Originals, tmp_path: Path
) -> None:
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    change = {"target_modules": rf".*\.({'|'.join(linear)})", "rank_pattern": {r"[kq]_proj": 4}}
    adapter = changed_adapter(originals, tmp_path, change)
    plain = load(str(originals.folder), adapter=str(originals.adapter)).model.state_dict()
    named = load(str(originals.folder), adapter=str(adapter)).model.state_dict()
    assert plain.keys() == named.keys()
    assert all((plain[name] == named[name]).all() for name in plain)


def test_the_header_is_read_as_the_gguf_library_reads_it(
    originals: Originals, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(originals.gguf)
    reader = GGUFReader(path)
    contents = read_contents(path)
    theirs = {name: field.contents() for name, field in reader.fields.items()}
    assert contents.fields == {n: v for n, v in theirs.items() if not n.startswith("GGUF.")}
    assert [
        (one.name, list(reversed(one.shape)), one.kind, one.offset, one.num_bytes)
        for one in contents.tensors
    ] == [
        (one.name, one.shape.tolist(), one.tensor_type, one.data_offset, one.n_bytes)
        for one in reader.tensors
    ]


def test_a_failure_is_one_line_with_the_files_name() -> None:
    message = r"^x\.bin is broken: no \ufffdway$"
    with pytest.raises(ConfigError, match=message), foreign_file("x.bin", "is broken"):
        raise ValueError("no\n \x1bway")


def test_a_file_that_takes_too_long_is_refused() -> None:
    message = r"^x\.bin is broken: more than 0\.2 seconds$"
    with pytest.raises(ConfigError, match=message):
        _loop("x.bin", seconds=0.2)


def _loop(path: str, *, seconds: float) -> None:
    with foreign_file(path, "is broken", seconds=seconds):
        while True:
            random.random()


def test_time_is_not_up_after_the_file_was_read() -> None:
    for _ in range(50):
        with foreign_file("x.bin", "is broken", seconds=0.001):
            pass
    time.sleep(0.05)


PROFILED = """
import cProfile
from memagent.errors import ConfigError
from memagent.foreign import foreign_file

with foreign_file("x.bin", "is broken", seconds=10):
    pass
for seconds in (0.001, 0.05):
    try:
        with foreign_file("x.bin", "is broken", seconds=seconds):
            while True:
                pass
    except ConfigError:
        pass
cProfile.Profile().runcall(sorted, [2, 1], key=lambda value: value)
"""


def test_a_profiler_works_after_a_file_was_read_in_time_or_not() -> None:
    subprocess.run([sys.executable, "-c", PROFILED], check=True, timeout=60)


def test_an_interrupt_is_no_failure_of_the_file() -> None:
    with pytest.raises(KeyboardInterrupt), foreign_file("x.bin", "is broken", seconds=10):
        raise KeyboardInterrupt
