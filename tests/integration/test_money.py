"""Every request that leaves is a call: limited, counted and shown, whatever comes back."""

import re
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.trace import Trace
from memagent.cli.main import run
from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.eval.records import read_items
from tests.support.chat_servers import ChatServer, Json, chat_server, each_second, prompt_of, said

SECTIONS = ("The house stood empty.", "Anna inherited it in 1874.", "She painted it red.")
SMALL = (
    "--set=window=2000",
    "--set=chunk_tokens=100",
    "--set=memory_tokens=64",
    "--set=answer_tokens=64",
)
PRICES = ("--set=price_in=1000", "--set=price_out=1000")
"""With 1000 prompt and 50 completion tokens, a call costs 1.05."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of three sections."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"{one} ".ljust(95, ".") for one in SECTIONS))
    return path


def ask(server: ChatServer, text: Path, *options: str) -> int:
    where = ("--base-url", server.base_url, "--tokenizer=bytes", *SMALL, *PRICES)
    return run(["ask", str(text), "-q", "Who?", *where, *options])


def reply(request: Json) -> Json:
    return said("Anna")


def test_an_empty_reply_costs_what_it_costs(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(each_second(reply)) as server:
        assert ask(server, text, "--run-dir", str(tmp_path / "run")) == 0
    assert len(server.chats) == 2 * (len(SECTIONS) + 1)
    shown = capsys.readouterr().err
    assert "8 calls, 8,000 prompt and 400 completion tokens" in shown
    assert "cost 8.4000" in shown
    [trace] = Trace.load(tmp_path / "run")
    assert [(step.usage.calls, step.num_attempts) for step in trace.steps] == [(2, 2)] * 4


@pytest.mark.parametrize("limit", ["--max-calls=5", "--max-cost=5.9"])
def test_a_limit_holds_for_repeated_requests_and_over_resumed_runs(
    text: Path, tmp_path: Path, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fifth request gets an empty reply, so its section has no step, and yet it was paid."""
    run_dir = str(tmp_path / "run")
    with chat_server(each_second(reply)) as server:
        assert ask(server, text, limit, "--run-dir", run_dir) == 4
        assert len(server.chats) == 5
        assert run(["ask", "--resume", run_dir, "--base-url", server.base_url]) == 4
        assert len(server.chats) == 5
        capsys.readouterr()
        more = limit.partition("=")[0]
        assert run(["ask", "--resume", run_dir, "--base-url", server.base_url, more, "9"]) == 0
        assert len(server.chats) == 8
    assert "8 calls, 8,000 prompt and 400 completion tokens" in capsys.readouterr().err


def test_an_answer_that_never_comes_is_paid_in_resumed_runs_too(text: Path, tmp_path: Path) -> None:
    def silent(request: Json) -> Json:
        return said("noted") if "<section" in prompt_of(request) else said("")

    run_dir = str(tmp_path / "run")
    with chat_server(silent) as server:
        assert ask(server, text, "--max-calls=9", "--run-dir", run_dir) == 3
        assert len(server.chats) == 3 + 4
        again = ["ask", "--resume", run_dir, "--base-url", server.base_url]
        assert run(again) == 4
        assert len(server.chats) == 9
        assert run(again) == 4
        assert len(server.chats) == 9


def test_evaluations_count_every_request(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    documents = (Passage(text=" ".join(SECTIONS)),)
    one = Example(id="1", question="Who?", answers=("Anna",), documents=documents)
    write_examples(examples, [one])
    common = [
        "eval",
        "--file",
        str(examples),
        "--set=tokenizer=bytes",
        "--set=length_tokenizer=bytes",
    ]
    common += [f"--{one[2:]}" for one in SMALL] + ["--method=direct", "--quiet", *PRICES]

    with chat_server(each_second(reply)) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "run")]
        assert run([*common, *where]) == 0
        [record] = read_items(tmp_path / "run")
        assert (record.status, record.num_calls, record.cost) == ("ok", 2, 2.1)
    with chat_server(lambda request: said("")) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "empty")]
        run([*common, *where])
        [record] = read_items(tmp_path / "empty")
        assert (record.status, record.num_calls) == ("failed", len(server.chats)) == ("failed", 4)


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": 900}]
)
def test_a_usage_of_zero_does_not_switch_a_limit_off(
    text: Path, usage: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens are counted here then: with bytes, a reply of 4."""

    def free(request: Json) -> Json:
        return said("Anna") | {"usage": usage}

    with chat_server(free) as server:
        assert ask(server, text, "--max-cost=2.5") == 4
        assert 0 < len(server.chats) < 4
        capsys.readouterr()
        assert ask(server, text) == 0
    shown = re.search(r"4 calls, ([\d,]+) prompt and 16 completion", capsys.readouterr().err)
    assert shown is not None
    assert int(shown[1].replace(",", "")) > 2000


@pytest.mark.parametrize(
    ("given", "missing"),
    [("--set=price_in=1", "--set price_out"), ("--set=price_out=1", "--set price_in")],
)
@pytest.mark.parametrize("command", ["ask", "eval", "serve", "mcp", "filter"])
def test_one_price_is_not_enough(
    command: str, given: str, missing: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: dict[str, list[str]] = {
        "ask": ["ask", str(text), "-q", "Who?"],
        "eval": ["eval", "smoke"],
        "serve": ["serve", "--reader"],
        "mcp": ["mcp"],
        "filter": ["data", "filter", str(text), "--out", str(text.with_suffix(".jsonl"))],
    }
    assert run([*commands[command], "--engine=scripted", given]) == 2
    assert f"{missing} is not given" in capsys.readouterr().err


def test_a_price_of_zero_is_a_price(text: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    with chat_server(reply) as server:
        where = ["--base-url", server.base_url, "--tokenizer=bytes", *SMALL]
        options = ["--set=price_in=1000", "--set=price_out=0"]
        assert run(["ask", str(text), "-q", "Who?", *where, *options]) == 0
    assert "cost 4.0000" in capsys.readouterr().err
