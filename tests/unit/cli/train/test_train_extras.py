"""Commands of training name the extra that is missing."""

from __future__ import annotations

import sys

import pytest

from memagent.cli.main import run


@pytest.mark.parametrize(
    "arguments",
    [["train", "tiny_cpu"], ["train", "sft", "tiny_cpu"], ["train", "export", "a", "b"]],
)
def test_training_without_its_libraries_names_the_extra(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said == 'memagent: training needs torch; pip install "memagent[train]"\n'
