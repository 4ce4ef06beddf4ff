"""Kept texts: what a later question does not compute again, and that nobody else gets it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memagent import Document, Reader
from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.kept.disk import KeptText, TextFiles
from memagent.engines.local.kept.keys import weights_key
from memagent.engines.local.kept.texts import KeptPrefix, KeptTexts
from memagent.engines.local.loading import load
from memagent.errors import ConfigError
from memagent.eval.setup import evaluate
from memagent.eval.suites import Suite, parse_suite
from memagent.serve.reading.readings import ReadingCalls
from memagent.types import Usage
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

SHAPE = {"window": 2048}
SETTINGS = {
    "window": 2048,
    "chunk_tokens": 300,
    "memory_tokens": 16,
    "answer_tokens": 4,
    "temperature": 0.0,
    "prompts": "compact",
    "mode": "parallel",
    "rounds": 1,
}
WORDS = "the miller sold corn to Ada and Bo in the winter of that year"
TEXT = ". ".join(f"{WORDS} {number}" for number in range(40))
DOCUMENT = Document.from_text(TEXT, source="mill.txt")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memagent" / "texts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "llama", "llama", max_position_embeddings=2048
    )


def engine_of(folder: Path, adapter: Path | None = None, **settings: float | bool) -> LocalEngine:
    config = LocalConfig(native=False, **{"cache_gb": 0.02, "keep_text": True, **settings})  # type: ignore[arg-type]
    return LocalEngine(load(str(folder), adapter=None if adapter is None else str(adapter)), config)


def ask(engine: BaseEngine, question: str) -> tuple[list[str], Usage]:
    trace = Reader(engine, **SETTINGS).ask(question, DOCUMENT)  # type: ignore[arg-type]
    reads = [step for step in trace.steps if step.kind == "read"]
    starts = sorted(reads, key=lambda step: step.section.start if step.section else 0)
    total = Usage()
    for step in reads:
        total += step.usage
    return [step.reply for step in starts], total


def computed(usage: Usage) -> int:
    return usage.prompt_tokens - usage.cached_tokens


@pytest.fixture
def plain(folder: Path) -> Iterator[list[str]]:
    """What is replied without anything that was kept."""
    with engine_of(folder, keep_text=False) as engine:
        yield ask(engine, "Who sold the corn?")[0]


def test_a_later_process_reads_a_kept_text_from_disk(
    folder: Path, plain: list[str], cache_folder: Path
) -> None:
    with engine_of(folder) as engine:
        first = ask(engine, "What is the year?")[1]
        (sizes,) = engine.kept_texts()
    assert (sizes.source, sizes.num_sections) == ("mill.txt", first.calls)
    assert sizes.cache_bytes > 0
    (text,) = TextFiles(max_bytes=1).texts()
    assert (text.source, text.num_sections) == ("mill.txt", first.calls)
    assert text.num_bytes == sizes.cache_bytes
    with engine_of(folder) as engine:
        replies, usage = ask(engine, "Who sold the corn?")
    assert replies == plain
    assert computed(usage) < 0.25 * computed(first)
    assert computed(usage) <= usage.calls * 90  # what stands behind the section


def test_what_leaves_a_small_cache_stays_in_memory(folder: Path, plain: list[str]) -> None:
    with engine_of(folder, cache_gb=1e-9, keep_disk_gb=0) as engine:
        first = ask(engine, "What is the year?")[1]
        (sizes,) = engine.kept_texts()
        replies, usage = ask(engine, "Who sold the corn?")
    assert sizes.memory_bytes > 0
    assert sizes.disk_bytes == 0
    assert replies == plain
    assert computed(usage) < 0.25 * computed(first)


def test_what_leaves_the_memory_goes_to_disk(folder: Path, plain: list[str]) -> None:
    with engine_of(folder, cache_gb=1e-9, keep_memory_gb=0) as engine:
        ask(engine, "What is the year?")
        (sizes,) = engine.kept_texts()
        replies, usage = ask(engine, "Who sold the corn?")
    assert sizes.memory_bytes == 0
    assert sizes.disk_bytes > 0
    assert replies == plain
    assert usage.cached_tokens > 0.75 * usage.prompt_tokens


def test_another_adapter_or_other_weights_get_nothing(
    folder: Path, tmp_path: Path, cache_folder: Path
) -> None:
    with engine_of(folder) as engine:
        ask(engine, "What is the year?")
    adapter = make_tiny_adapter(folder, tmp_path / "adapter")
    other = make_tiny_model(tmp_path / "other", "llama", seed=1, max_position_embeddings=2048)
    for changed in (engine_of(folder, adapter), engine_of(other)):
        with changed:
            usage = ask(changed, "Who sold the corn?")[1]
        assert computed(usage) > 0.8 * usage.prompt_tokens
    assert len(TextFiles(max_bytes=1).texts()) == 3


def test_new_weights_in_the_same_engine_drop_what_was_kept(folder: Path) -> None:
    with engine_of(folder, keep_disk_gb=0, cache_gb=1e-9) as engine:
        ask(engine, "What is the year?")
        with torch.no_grad():
            weight = engine._loaded.model.model.layers[0].mlp.up_proj.weight
            engine.update_weights({"model.layers.0.mlp.up_proj.weight": weight * 1.5})
        assert computed(ask(engine, "Who sold the corn?")[1]) > 1500


def test_the_key_covers_every_parameter_and_the_adapter(folder: Path, tmp_path: Path) -> None:
    model = load(str(folder)).model
    key = weights_key(model)
    assert weights_key(load(str(folder)).model) == key
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    assert weights_key(model) != key
    adapter = make_tiny_adapter(folder, tmp_path / "adapter")
    assert weights_key(load(str(folder), adapter=str(adapter)).model) != key


def test_what_is_kept_for_one_owner_is_used_for_no_other(folder: Path, plain: list[str]) -> None:
    with engine_of(folder, keep_memory_gb=0) as engine:
        calls = ReadingCalls(engine, 4)
        anna, bert = calls.of_owner("anna"), calls.of_owner("bert")
        first = ask(anna, "What is the year?")[1]
        replies, others = ask(bert, "Who sold the corn?")
        again = ask(anna, "Who sold the corn?")[1]
        assert ask(engine, "Who sold the corn?")[1].cached_tokens < 0.2 * first.prompt_tokens
        owners = [sizes.num_sections for sizes in engine.kept_texts()]
    assert replies == plain
    assert others.cached_tokens < 0.2 * others.prompt_tokens
    assert again.cached_tokens > 0.75 * again.prompt_tokens
    assert owners == [first.calls] * 3
    assert len({text.folder for text in TextFiles(max_bytes=1).texts()}) == 3


def test_items_of_an_evaluation_that_share_a_text_share_what_was_kept(
    folder: Path, tmp_path: Path
) -> None:
    long = f"{TEXT} " * 3  # more than the cache holds

    def suite_of(who: str, **settings: object) -> Suite:
        file = tmp_path / f"{who}.jsonl"
        line = {"id": who, "question": f"What did {who} buy?", "answers": ["x"]}
        file.write_text(json.dumps({**line, "documents": [{"text": long}]}) + "\n")
        values = {"methods": [{"name": "reader"}], "tasks": [{"files": [str(file)]}]}
        return parse_suite({**values, "agent": {**SETTINGS, **settings}})

    def cached(**settings: float | bool) -> list[bool]:
        with engine_of(folder, cache_gb=1e-9, keep_disk_gb=0, **settings) as engine:
            runs = [
                asyncio.run(evaluate(suite_of(who), engine, processes=0)) for who in ("Ada", "Bo")
            ]
        return [one.cached_tokens > 0.5 * one.prompt_tokens for (one,) in runs]

    assert cached() == [False, True]
    assert cached(keep_text=False) == [False, False]
    with (
        engine_of(folder) as engine,
        pytest.raises(ConfigError, match="a reader whose sections stand before"),
    ):
        asyncio.run(evaluate(suite_of("Cy", mode="in_order"), engine, processes=0))


def test_texts_that_were_not_used_for_longest_are_forgotten(folder: Path) -> None:
    texts = KeptTexts(
        model="m", key=lambda: "k", files=None, max_memory_bytes=10**6, max_named_tokens=10
    )
    for number, text in enumerate("abc"):
        texts.name([number, 1, 2, 3], text=text, source=text)
        assert texts.find([0, 1, 2, 3, 4]) is not None  # the first one stays in use
    assert texts.find([1, 1, 2, 3, 4]) is None
    assert texts.find([2, 1, 2, 3, 4]) is not None
    forgotten = KeptPrefix((1, 1, 2, 3), "b", "b")
    texts.put(forgotten, torch.zeros(3))
    assert texts.memory_bytes == 0


def test_keeping_needs_sections_before_the_question(folder: Path) -> None:
    in_order = {name: SETTINGS[name] for name in SETTINGS.keys() - {"mode", "rounds"}}
    with engine_of(folder) as engine:
        with pytest.raises(
            ConfigError, match="`mode=parallel` with `notes=asked`, or `prompts=shared`"
        ):
            Reader(engine, **in_order)  # type: ignore[arg-type]
        Reader(engine, **{**in_order, "prompts": "shared"})  # type: ignore[arg-type]


# --- files -----------------------------------------------------------------------------------------


def about(text: str = "a" * 64, key: str = "k" * 32) -> KeptText:
    return KeptText(text=text, source="mill.txt", model="tiny", key=key)


def test_a_file_is_used_for_its_own_ids_and_key_only(tmp_path: Path) -> None:
    files = TextFiles(tmp_path, max_bytes=10**6)
    values = torch.arange(12.0).reshape(1, 2, 1, 3, 2)
    assert files.save(about(), [1, 2, 3], values)
    loaded = files.load(about(), [1, 2, 3])
    assert loaded is not None
    assert torch.equal(loaded, values)
    assert files.load(about(), [1, 2, 4]) is None
    assert files.load(about(key="l" * 32), [1, 2, 3]) is None
    (path,) = tmp_path.rglob("*.safetensors")
    other = tmp_path / about(key="l" * 32).folder / path.name
    other.parent.mkdir()
    path.rename(other)  # a file in the wrong place
    assert files.load(about(key="l" * 32), [1, 2, 3]) is None


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40])
def test_a_damaged_file_is_removed_and_not_used(tmp_path: Path, damage: bytes) -> None:
    files = TextFiles(tmp_path, max_bytes=10**6)
    files.save(about(), [1, 2], torch.zeros(1, 2, 1, 2, 2))
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(damage)
    assert files.load(about(), [1, 2]) is None
    assert not path.exists()


def test_texts_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    dropped: list[str] = []
    files = TextFiles(tmp_path, max_bytes=100, on_drop=lambda text: dropped.append(text.text[0]))
    values = torch.zeros(1, 2, 1, 2, 2)  # 32 bytes
    for name in "abc":
        assert files.save(about(name * 64), [1, 2], values)
    files.load(about("a" * 64), [1, 2])
    assert files.save(about("d" * 64), [1, 2], values)
    assert dropped == ["b"]
    assert {text.text[0] for text in files.texts()} == {"a", "c", "d"}
    assert not files.save(about("e" * 64), [1, 2], torch.zeros(1, 2, 1, 20, 2))
