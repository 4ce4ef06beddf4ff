"""`memagent plan`: what it prints and returns."""

import json

import pytest

from memagent.cli.main import run


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "smollm2_reader", "--gpu", "h100", "--price", "2"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert "GPUs: 1 x H100, which trains and generates in turn" in text
    assert "KV cache" in text
    assert "rollouts: 256 of 6 calls" in text
    assert "cost: " in text


def test_no_cell_of_the_table_is_blank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "tiny_cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, last = (lines.index(line) for line in lines if line.startswith(("memory of", "of 139")))
    cells = {line[:22].strip(): line[22:].split() for line in lines[first + 1 : last]}
    assert cells["weights"] == ["<0.1", "<0.1"]
    assert cells["activations"] == ["<0.1", "-"]
    assert cells["KV cache"] == ["-", "<0.1"]
    assert all(len(values) == 2 for values in cells.values())


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tiny_cpu", "--json", "--reply-tokens", "10"]
    assert run(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["workload"]["calls"][0]["reply_tokens"] == 10
    assert plan["chosen"]["layout"]["num_trainers"] == 1
    assert plan["cost"] is None


def test_a_run_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "paper_7b", "--gpus", "1", "--set", "rollout.prompts=16"]) == 1
    text = capsys.readouterr().out
    assert "does not fit: a trainer GPU needs" in text
    assert "--set cluster.trainer_ranks=2" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny_cpu", "--gpu", "H300"], "there is no accelerator 'H300'"),
        (["tiny_cpuu"], "did you mean tiny_cpu"),
        (["smollm2_reader", "--model", "nosuch"], "sizes of the model nosuch are not known"),
        (["tiny_cpu", "--signal", "2"], "signal: input should be less"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
