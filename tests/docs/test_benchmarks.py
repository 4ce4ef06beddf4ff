"""Benchmarks of training run, tiny and on a CPU, and what they compare is the same."""

from __future__ import annotations

import importlib
import json
import sys

import pytest


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


def test_parts_of_an_update_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_step_parts", "--smoke"])
    importlib.import_module("benchmarks.train_step_parts").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step, parts", "head", "attention, parts"]
    assert not any("cannot" in line for line in lines)
