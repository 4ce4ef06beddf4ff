"""Benchmarks of training run, tiny and on a CPU, and what they compare is the same."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize("arguments", ["train_step", "train_step --lora", "rl_step"])
def test_a_benchmark_of_training_runs(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *options = arguments.split()
    monkeypatch.setattr(sys, "argv", [name, "--smoke", *options])
    importlib.import_module(f"benchmarks.{name}").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    if name == "train_step":
        assert result["tree"]["tokens"] < 0.4 * result["rows"]["tokens"]
        assert result["rows"]["share_of_possible"] > 0
        assert result["errors"]["tree"] < 0.02
    else:
        assert result["metrics"]["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert result["metrics"]["mismatch_max"] < 0.02


def test_a_step_of_rollouts_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["decoding", "--smoke"])
    importlib.import_module("benchmarks.decoding").main()
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("model  load")
    seconds, prompt_seconds, clock = map(float, row.split()[4:7])
    assert seconds > prompt_seconds > 0
    assert clock > 0


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
        ("modes", "beyond/two_hop", 6),
        ("reader", "ruler/niah_multikey_2", 4),
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
    alone, together, kept = (benchmark.Row(**row) for row in stored["rows"])
    assert alone.computed_tokens > 4 * together.computed_tokens
    assert last.startswith("eight questions together: ")
    assert kept.computed_tokens < 0.3 * alone.per_question  # of sections as short as these

    monkeypatch.setattr(benchmark, "_alone", None)  # what is stored is not measured again
    monkeypatch.setattr(benchmark, "_shared", lambda *_: [together, kept])
    rows.write_text(json.dumps({**stored, "rows": stored["rows"][:1]}))
    benchmark.main()
    assert json.loads(rows.read_bytes()) == stored
