"""Benchmarks of training run, tiny and on a CPU, and what they compare is the same."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.agent.reader import Reader
from memagent.data.example import Evidence, Example, Passage
from memagent.engines.scripted import ScriptedEngine
from memagent.types import Message, Sampling
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize("name", ["train_step", "rl_step"])
def test_a_benchmark_of_training_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    importlib.import_module(f"benchmarks.{name}").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    if name == "train_step":
        assert result["tree"]["tokens"] < 0.4 * result["rows"]["tokens"]
        assert result["errors"]["tree"] < 0.02
    else:
        assert result["metrics"]["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert result["metrics"]["mismatch_max"] < 0.02


def test_a_step_of_a_reader_is_measured_with_and_without_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama")
    options = ["--smoke", "--model", str(model)]
    monkeypatch.setattr(sys, "argv", ["rl_step", *options])
    importlib.import_module("benchmarks.rl_step").main()
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    num_sampled = 8 * (4 * 6 + 4)
    assert [one["signal"] for one in result["updates"]] == [1.0, 0.5]
    for line, one in zip(lines[-2:], result["updates"], strict=True):
        assert line.startswith(f"{one['signal']:.0%} of the groups with signal: update")
        assert one["metrics"]["num_tokens"] == pytest.approx(num_sampled)
        assert one["metrics"]["num_updates"] == 1
        assert one["metrics"]["mismatch_max"] < 0.02
        assert one["step"] == pytest.approx(result["adapter"] + one["update"])
    assert result["speed"] == pytest.approx(result["base"] / result["adapter"])


def test_parts_of_an_update_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_step_parts", "--smoke"])
    importlib.import_module("benchmarks.train_step_parts").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step, parts", "head", "attention, parts"]
    assert not any("cannot" in line for line in lines)


def test_evidence_in_view_is_measured_for_every_method() -> None:
    measure = importlib.import_module("benchmarks.evidence_in_view").measure
    rows = {row.view: row for row in measure("ruler/niah_single_1", 24_000, 2)}
    assert rows["reader, window 8K"].num_in_view == 2
    assert rows["BM25, window 8K"].num_in_view == 2
    assert rows["one prompt, window 128K"].num_in_view == 2
    assert rows["one prompt, window 8K"].num_in_view < 2
    assert rows["reader, window 8K"].calls > 5
    assert rows["one prompt, window 8K"].prompt_tokens < 8192


def test_parallel_reading_has_few_calls_in_a_row_and_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    benchmark = importlib.import_module("benchmarks.parallel_reading")
    options = [
        "--tokens",
        "40000",
        "--chunk-tokens",
        "2000",
        "--latency-ms",
        "5",
        "--questions",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["parallel_reading", *options])
    rows = {row.mode: row for row in benchmark.measure(benchmark.parse_options())}
    assert {row.num_right for row in rows.values()} == {2}
    assert rows["in order"].in_a_row == rows["in order"].calls > 20
    assert rows["parallel"].in_a_row == 3


@pytest.mark.parametrize(
    ("part", "task", "num_modes"),
    [
        ("modes", "beyond/two_hop", 7),
        ("reader", "ruler/niah_multikey_2", 6),
        ("counting", "beyond/counting", 3),
        ("citations", "beyond/two_hop", 2),
    ],
)
def test_a_table_of_reading_modes_is_one_command_and_goes_on_after_a_kill(
    part: str,
    task: str,
    num_modes: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bytes_only = 'length_tokenizer="bytes"'
    options = ["--engine", "scripted", "--lengths", "12K:1", "--tasks", task, "--set", bytes_only]
    monkeypatch.setattr(sys, "argv", [part, part, *options, "--run-dir", str(tmp_path)])
    main = importlib.import_module("benchmarks.mode_tables").main
    main()
    first, count, head, *table = capsys.readouterr().out.splitlines()
    assert "prompt tokens" in first
    assert first.endswith(" at 150,000 a second")
    assert count.startswith(f"0 of {num_modes} answers are in ")
    assert head.split()[:4] == ["reader", "task", "length", "mode"]
    assert len(table) == num_modes

    journal = tmp_path / f"{part}-scripted" / "steps.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    main()
    _, count, _, *again = capsys.readouterr().out.splitlines()
    assert count.startswith(f"{num_modes - 1} of {num_modes} answers are in ")
    assert [line.split()[:6] for line in again] == [line.split()[:6] for line in table]


def test_many_questions_share_a_text_and_the_measurement_goes_on_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.json"
    sizes = ["--tokens", "600", "--chunk-tokens", "300", "--window", "1200", "--cache-gb", "0.1"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the benchmark sets one of its own
    monkeypatch.setattr(sys, "argv", ["many", *sizes, "--device", "cpu", "--rows", str(rows)])
    benchmark = importlib.import_module("benchmarks.many_questions")
    benchmark.main()
    *_, last = capsys.readouterr().out.splitlines()
    stored = json.loads(rows.read_bytes())
    alone, together, kept, disk = (benchmark.Row(**row) for row in stored["rows"])
    assert alone.computed_tokens > 4 * together.computed_tokens
    assert last.startswith("eight questions together: ")
    for row in (kept, disk):
        assert row.computed_tokens < 0.3 * alone.per_question  # of sections as short as these

    monkeypatch.setattr(benchmark, "_alone", None)  # what is stored is not measured again
    monkeypatch.setattr(benchmark, "_shared", lambda *_: [together, kept, disk])
    rows.write_text(json.dumps({**stored, "rows": stored["rows"][:1]}))
    benchmark.main()
    assert json.loads(rows.read_bytes()) == stored


def test_the_last_step_answers_one_reading_in_several_ways() -> None:
    last_step = importlib.import_module("benchmarks.last_step")
    facts = ("Ann Holm bought the mill.", "She paid 900 crowns for it.")
    filler = "Nothing happened on that day. " * 8
    text = f"{filler}\n\n{facts[0]} {facts[1]}\n\n{filler}"
    example = Example(
        id="mill",
        question="What did Ann pay?",
        answers=("900 crowns",),
        documents=(Passage(text=text),),
        evidence=(
            Evidence(
                document=0, start=(start := text.index(facts[1])), end=start + 27, text=facts[1]
            ),
        ),
    )

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        if "<section>" in prompt:
            is_whole = "Nothing happened" not in prompt
            return " ".join(facts) if is_whole else facts[0] if facts[0] in prompt else "No change."
        return "\\boxed{900 crowns}" if facts[1] in prompt else f"\\boxed{{{sampling.seed}}}"

    reader = Reader(
        ScriptedEngine(script),
        tokenizer="bytes",
        **{"window": 4000, "chunk_tokens": 400, "memory_tokens": 100, "answer_tokens": 60},
        prompts="add",
        paragraph_tokens=500,
    )

    async def record() -> dict[str, Any]:
        reading = await last_step.read(reader, example)
        return dict(last_step.record_of(reading, await last_step.answers(reading, votes=3)))

    found = asyncio.run(record())
    assert {way: one["strict"] for way, one in found["scores"].items()} == {
        "memory": 0.0,
        "beside": 1.0,
        "paragraphs": 1.0,
        "again": 1.0,
        "vote": 0.0,
    }
    assert found["replies"]["vote"] == "\\boxed{0}"
    assert (found["in_memory"], found["in_paragraphs"]) == (False, True)
    head, memory, beside, *_ = last_step.table([found, found])
    assert head.startswith(
        "2 questions; all evidence is in the memory of 0, in the paragraphs of 2"
    )
    assert memory.startswith("memory      strict 0.0 (0.0 to 65.8), +0.0")
    assert beside.startswith("beside      strict 100.0 (34.2 to 100.0), +100.0")


def test_weights_of_a_file_are_read_by_torch_and_by_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(make_tiny_model(tmp_path / "model", "llama"), tmp_path / "model.gguf")
    num_threads = torch.get_num_threads()
    try:
        importlib.import_module("benchmarks.loading").main(["--model", str(path)])
    finally:
        torch.set_num_threads(num_threads)
    weights, whole = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"weights: [\d.]+ s; gguf library [\d.]+ s, [\d.]+ times as long", weights)
    assert re.fullmatch(r"load: [\d.]+ s", whole)
