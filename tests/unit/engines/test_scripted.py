"""The scripted engine, and the opening of engines by name."""

import json
from pathlib import Path

import pytest

from memagent import Reader, open_engine
from memagent.engines.base import split_spec
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError
from tests.conftest import prose


def test_the_keyword_rule_finds_a_sentence_in_a_long_text() -> None:
    text = prose(300, 1) + "The harbour bell was cast in Lisbon. " + prose(300, 2)
    reader = Reader(open_engine("scripted"), window=4000, chunk_tokens=1000, memory_tokens=400)
    trace = reader.ask("Where was the harbour bell cast?", text)
    assert trace.num_chunks > 10
    assert trace.answer == "The harbour bell was cast in Lisbon."


def test_the_keyword_rule_says_when_nothing_was_found() -> None:
    reader = Reader(open_engine("scripted"), window=4000, chunk_tokens=1000, memory_tokens=400)
    assert reader.ask("Quetzalcoatl?", prose(50)).answer == "The text does not tell."


def test_replies_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "replies.json").write_text(json.dumps(["memory", "answer"]))
    engine = open_engine(f"scripted:{tmp_path / 'replies.json'}")
    assert Reader(engine).ask("what?", "short text").answer == "answer"


@pytest.mark.parametrize("content", ["{", '{"a": 1}', "[1]"])
def test_a_file_that_holds_no_replies_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "replies.json").write_text(content)
    with pytest.raises(ConfigError, match=r"replies\.json"):
        open_engine(f"scripted:{tmp_path / 'replies.json'}")


def test_settings_that_a_scripted_engine_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="`base_url` does not go with the engine 'scripted'"):
        open_engine("scripted", base_url="http://x")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("openai:gpt-x", ("openai", "gpt-x")),
        ("gpt-x", ("openai", "gpt-x")),
        ("org/model", ("openai", "org/model")),
        ("qwen2.5:7b", ("openai", "qwen2.5:7b")),
        ("llama3:8b", ("openai", "llama3:8b")),
        ("mistral:7b", ("openai", "mistral:7b")),
        ("scripted", ("scripted", "")),
    ],
)
def test_a_spec_is_kind_and_model(spec: str, expected: tuple[str, str]) -> None:
    assert split_spec(spec) == expected


def test_an_unknown_kind_is_refused_with_the_nearest_or_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown engine 'vlllm'; did you mean vllm\?"):
        split_spec("vlllm:model")
    with pytest.raises(ConfigError, match="unknown engine 'xyz'; known: local, openai, scripted"):
        split_spec("xyz:model")


async def test_engines_close_at_the_end_of_a_block() -> None:
    async with ScriptedEngine(["x"]) as engine:
        assert engine.model == "scripted"
    with ScriptedEngine(["x"]) as engine:
        assert engine.model == "scripted"
