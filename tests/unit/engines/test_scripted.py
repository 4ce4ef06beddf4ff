"""The scripted engine, and the opening of engines by name."""

import json
from functools import partial
from pathlib import Path

import pytest

from memagent import Reader, open_engine
from memagent.engines.base import split_spec
from memagent.engines.scripted import ScriptedEngine, text_units
from memagent.errors import ConfigError
from memagent.types import Sampling
from tests.conftest import prose
from tests.support.timing import growth


def test_the_keyword_rule_finds_a_sentence_in_a_long_text() -> None:
    text = prose(300, 1) + "The harbour bell was cast in Lisbon. " + prose(300, 2)
    reader = Reader(open_engine("scripted"), window=4000, chunk_tokens=1000, memory_tokens=400)
    trace = reader.ask("Where was the harbour bell cast?", text)
    assert trace.num_chunks > 10
    assert trace.answer == "The harbour bell was cast in Lisbon."


def test_the_keyword_rule_says_when_nothing_was_found() -> None:
    reader = Reader(open_engine("scripted"), window=4000, chunk_tokens=1000, memory_tokens=400)
    assert reader.ask("Quetzalcoatl?", prose(50)).answer == "The text does not tell."


LOG = """\
2026-03-01T02:13:58Z INFO  db: checkpoint complete: wrote 3.5 MB to 10.0.0.7
2026-03-01T02:14:07Z ERROR db: disk full on /var/lib/db, writes refused
2026-03-01T02:14:09Z WARN  web: upstream timed out (110) for req 8812
2026-03-01T02:15:30Z INFO  db: writes accepted again. Took 83 s
"""


def test_the_keyword_rule_answers_with_one_line_of_a_log() -> None:
    log = (
        "".join(f"2026-03-01T01:{n:02}:00Z INFO  web: GET /item/{n} 200\n" for n in range(60)) + LOG
    )
    reader = Reader("scripted", window=4000, chunk_tokens=1000, memory_tokens=400)
    trace = reader.ask("Which error made the db refuse writes on a full disk?", log)
    assert trace.answer == LOG.splitlines()[1]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (
            "Where did Dr. Lund meet Prof. Berg?",
            "Dr. A. Lund met Prof. Berg at St. Olav's at 5 p.m. on Dec. 3.",
        ),
        ("What did the bell weigh?", "The bell weighed approx. 3.5 t, i.e. 3,500 kg (see Fig. 2)."),
        ("Who founded the mill?", "The mill was founded by J. R. Holm Jr. and sold in 1902."),
        ("What was whispered?", 'She whispered: "Not now!"'),
    ],
)
def test_abbreviations_initials_and_numbers_end_no_sentence(question: str, answer: str) -> None:
    text = (
        "It rained all day. Dr. A. Lund met Prof. Berg at St. Olav's at 5 p.m. on Dec. 3. They talked "
        "until 9 p.m. The bell weighed approx. 3.5 t, i.e. 3,500 kg (see Fig. 2). Nobody knew. The\n"
        'mill was founded by J. R. Holm Jr. and sold in 1902. She whispered: "Not now!" Then he left.'
    )
    assert Reader("scripted").ask(question, text).answer == answer


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("They met at 9 p.m. The bell rang.", ["They met at 9 p.m.", "The bell rang."]),
        ("A wrapped\nsentence. Another\none here.", ["A wrapped sentence.", "Another one here."]),
        ("Title\n\nFirst line\nof prose", ["Title", "First line of prose"]),
        ("- tea. Hot.\n- milk", ["- tea. Hot.", "- milk"]),
        ("name = x\nsize = 3.4", ["name = x", "size = 3.4"]),
        (
            "Nov 16 02:01 host a\nNov 16 02:02 host b",
            ["Nov 16 02:01 host a", "Nov 16 02:02 host b"],
        ),
        ("\u96e8\u3002\u98a8\uff01", ["\u96e8\u3002", "\u98a8\uff01"]),
        ("x" * 1200, ["x" * 500, "x" * 500, "x" * 200]),
        ("", []),
        (
            "f a line\n[1] one\n  at x.py\n[2] two\n[3] three\n[4] four\n[5] 5\n[6] 6",
            [
                "f a line",
                "[1] one",
                "at x.py",
                "[2] two",
                "[3] three",
                "[4] four",
                "[5] 5",
                "[6] 6",
            ],
        ),
    ],
)
def test_texts_are_parted_into_sentences_or_lines(text: str, units: list[str]) -> None:
    assert list(text_units(text)) == units


def units_of(part: str, repeats: int) -> list[str]:
    return list(text_units(part * repeats))


def test_parting_a_hostile_text_takes_time_of_its_length() -> None:
    for part in (".", "a.", "Dr. ", "\n", "\n \t"):
        assert growth(partial(units_of, part), 10_000, 100_000) < 40


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


async def test_an_engine_that_is_opened_by_its_name_keeps_no_prompts() -> None:
    engine = open_engine("scripted")
    assert isinstance(engine, ScriptedEngine)
    await engine.complete([{"role": "user", "content": "Hello?"}], Sampling(max_tokens=5))
    assert engine.prompts == []
