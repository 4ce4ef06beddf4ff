"""What servers withhold, refuse or change is said in the summary, the JSON, the trace and in records."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from memagent.agent.trace import Trace
from memagent.cli.main import run
from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.eval.records import read_items
from tests.support.chat_servers import Json, chat_server, prompt_of, said

SMALL = (
    "--set=tokenizer=bytes",
    "--set=window=2000",
    "--set=chunk_tokens=100",
    "--set=memory_tokens=64",
)
MODES: dict[str, tuple[str, ...]] = {"in order": (), "parallel": ("--mode=parallel",)}
FILTERED = {"finish_reason": "content_filter"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of four sections, of which the second and the fourth are about war."""
    path = tmp_path / "text.txt"
    parts = ["Anna planted an oak.", "The war began.", "She painted it red.", "The war ended."]
    path.write_text("\n\n".join(f"{one} ".ljust(95, ".") for one in parts))
    return path


def about_war(request: Json) -> bool:
    return "war" in prompt_of(request).partition("<section")[2].partition("</section>")[0]


def asked(request: Json, reply: Json) -> Json:
    """This reply to sections about war; others get a usual one."""
    return reply if about_war(request) else said("Anna.")


def ask(text: Path, reply: Json, options: Sequence[str] = ()) -> int:
    with chat_server(lambda request: asked(request, reply)) as server:
        return run(
            ["ask", str(text), "-q", "Who?", "--base-url", server.base_url, *SMALL, *options]
        )


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("part", [None, "", "The war beg"])
def test_sections_that_a_filter_withholds_are_named(
    text: Path,
    tmp_path: Path,
    part: str | None,
    mode: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--json", "--run-dir", str(tmp_path / "run"), *mode]
    assert ask(text, said(part, finish_reason="content_filter"), where) == 0
    printed = capsys.readouterr()
    assert "2 of 4 sections were withheld by the server's content filter" in printed.err
    assert json.loads(printed.out)["num_withheld"] == 2
    [trace] = Trace.load(tmp_path / "run")
    reads = sorted((step for step in trace.steps if step.section), key=lambda step: step.start or 0)
    assert ["withheld" in step.flags for step in reads] == [False, True, False, True]
    assert [step.usage.calls for step in reads] == [1, 1, 1, 1]
    assert reads[1].reply == (part or "")


def test_the_text_of_a_refusal_is_kept_and_is_no_memory(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(tmp_path / "run")]
    assert ask(text, said(None, refusal="I cannot help with that."), where) == 0
    assert "2 of 4 sections were refused by the model" in capsys.readouterr().err
    [trace] = Trace.load(tmp_path / "run")
    assert [step.refusal for step in trace.steps if step.flags] == ["I cannot help with that."] * 2
    assert {step.memory for step in trace.steps} == {"Anna."}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (said(None, refusal="I cannot\nhelp."), "the model refused to answer: I cannot help."),
        (said("", finish_reason="content_filter"), "content filter withheld the answer"),
    ],
)
def test_an_answer_that_is_withheld_says_so(
    text: Path, reply: Json, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def chat(request: Json) -> Json:
        return said("noted") if "<section" in prompt_of(request) else reply

    with chat_server(chat) as server:
        assert run(["ask", str(text), "-q", "Who?", "--base-url", server.base_url, *SMALL]) == 3
        assert len(server.chats) == 5
    assert message in capsys.readouterr().err


def test_part_of_an_answer_says_so(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = said("It was Ann", finish_reason="content_filter")
    with chat_server(
        lambda request: part if "<section" not in prompt_of(request) else said("m")
    ) as server:
        where = ["--base-url", server.base_url]
        assert run(["ask", str(text), "-q", "Who?", *where, *SMALL]) == 0
    assert (
        "an answer or a merge was withheld by the server's content filter"
        in capsys.readouterr().err
    )


def test_nothing_is_said_where_nothing_was_withheld(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(text, said("War."), ["--json"]) == 0
    printed = capsys.readouterr()
    assert "withheld" not in printed.err + printed.out
    assert "changed" not in printed.err


def test_records_of_evaluations_count_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = [
        Example(id=str(n), question="Who?", answers=("Anna",), documents=(Passage(text=one),))
        for n, one in enumerate(["Anna planted an oak. " * 8, "The war began. " * 12])
    ]
    write_examples(tmp_path / "examples.jsonl", examples)
    with chat_server(lambda request: asked(request, said("", **FILTERED))) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "run")]
        file = ["--file", str(tmp_path / "examples.jsonl"), "--set=length_tokenizer=bytes"]
        assert run(["eval", *file, "--method=reader", *SMALL, *where]) == 0
    found = {record.id: record.num_withheld for record in read_items(tmp_path / "run")}
    assert found == {"0": 0, "1": 2}
    assert "1 of 2 items had replies that a content filter withheld" in capsys.readouterr().out


# --- another model --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"model": "other-7b"}, "test-model, then other-7b"),
        ({"system_fingerprint": "fp_1"}, "test-model, then test-model fp_1"),
    ],
)
def test_a_change_of_the_model_is_said(
    text: Path, tmp_path: Path, fields: Json, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num = 0

    def chat(request: Json) -> Json:
        nonlocal num
        num += 1
        return said("noted", **(fields if num > 2 else {}))

    run_dir = str(tmp_path / "run")
    with chat_server(chat) as server:
        where = ["--base-url", server.base_url, "--run-dir", run_dir]
        assert run(["ask", str(text), "-q", "Who?", *where, *SMALL, "--max-calls=3"]) == 4
        assert "changed" not in capsys.readouterr().err
        again = ["--base-url", server.base_url, "--max-calls=9"]
        assert run(["ask", "--resume", run_dir, *again]) == 0
    assert f"the model of the server changed in mid-run: {names}" in capsys.readouterr().err
    [trace] = Trace.load(run_dir)
    assert [step.served for step in trace.steps] == [None, None, *[names.split("then ")[1]] * 3]


def test_evaluations_say_it_for_each_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num = 0

    def chat(request: Json) -> Json:
        nonlocal num
        num += 1
        return said("Anna", model="test-model" if num < 3 else "other-7b")

    examples = [
        Example(id=str(n), question="Who?", answers=("Anna",), documents=(Passage(text="Anna."),))
        for n in range(3)
    ]
    write_examples(tmp_path / "examples.jsonl", examples)
    with chat_server(chat) as server:
        where = ["--base-url", server.base_url, "--run-dir", str(tmp_path / "run")]
        file = ["--file", str(tmp_path / "examples.jsonl"), "--set=length_tokenizer=bytes"]
        assert run(["eval", *file, "--method=direct", *SMALL, *where, "--concurrency=1"]) == 0
    names = "test-model, then other-7b"
    assert f"direct: the model of the server changed in mid-run: {names}" in capsys.readouterr().out
    served = sorted(record.served for record in read_items(tmp_path / "run"))
    assert served == [("other-7b",), ("test-model",), ("test-model",)]


def test_one_name_that_is_not_the_requested_one_is_no_change(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(lambda request: said("noted", model="test-model-2026")) as server:
        where = ["--base-url", server.base_url]
        assert run(["ask", str(text), "-q", "Who?", *where, *SMALL]) == 0
    assert "changed" not in capsys.readouterr().err
