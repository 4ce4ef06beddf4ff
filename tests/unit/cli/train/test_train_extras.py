"""Commands of training name the extra that is missing."""

import subprocess
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


def test_a_wrong_config_is_reported_before_torch_is_loaded() -> None:
    program = (
        "import sys; from memagent.cli.main import run; code = run(['train', 'tiny_cpuu']); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2 False\n"
    assert "did you mean tiny_cpu?" in done.stderr
