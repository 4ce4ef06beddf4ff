"""The adapter half-way between two."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes import mean_adapter


def adapter(folder: Path, **parts: torch.Tensor) -> str:
    """A folder with each of the weights in a file of its own."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"from": "{folder.name}"}}')
    for name, weight in parts.items():
        save_file({name: weight}, folder / f"{name}.safetensors")
    return str(folder)


def test_each_weight_is_the_mean_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = adapter(
        tmp_path / "first", a=torch.tensor([1.0, 2.0]), b=torch.tensor([4.0]).bfloat16()
    )
    second = adapter(
        tmp_path / "second", a=torch.tensor([3.0, 2.0]), b=torch.tensor([0.0]).bfloat16()
    )
    monkeypatch.setattr(sys, "argv", ["mean", first, second, "--out", str(tmp_path / "mean")])

    mean_adapter.main()

    found = load_file(tmp_path / "mean" / "adapter_model.safetensors")
    assert found["a"].tolist() == [2.0, 2.0]
    assert found["b"].dtype == torch.bfloat16
    assert found["b"].tolist() == [2.0]
    assert "first" in (tmp_path / "mean" / "adapter_config.json").read_text()


def test_adapters_of_other_ranks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = adapter(tmp_path / "first", a=torch.zeros(2))
    second = adapter(tmp_path / "second", a=torch.zeros(3))
    monkeypatch.setattr(sys, "argv", ["mean", first, second, "--out", str(tmp_path / "mean")])

    with pytest.raises(SystemExit):
        mean_adapter.main()

    assert "give two of one model and rank" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()
