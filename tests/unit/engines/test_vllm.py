"""The vLLM engine: real processes are started and ended; a small program stands in for vLLM."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memagent.config import VllmConfig
from memagent.engines.base import open_engine
from memagent.engines.openai import parse_completion
from memagent.engines.vllm.engine import VllmEngine
from memagent.engines.vllm.servers import find_python, gpu_groups, server_arguments, visible_gpus
from memagent.errors import ConfigError, EngineError, MachineError, MemagentError
from memagent.launcher import free_ports, informative_lines
from memagent.types import Sampling
from memagent.watchdog import ask_to_end
from tests.support import fake_vllm
from tests.support.processes import is_running, kill_after, marked, one_of
from tests.support.sizes import sized
from tests.support.timing import wait_until

MESSAGES = [{"role": "user", "content": "Where is the ledger?"}]
SAMPLING = Sampling(max_tokens=20)
MEMAGENT = [sys.executable, "-c", "from memagent.cli.main import main; main()"]


class Fake:
    """The stand-in for vLLM, and what it wrote down of each start."""

    def __init__(self, folder: Path) -> None:
        self.notes_folder = folder / "notes"
        self.notes_folder.mkdir()
        self.logs = folder / "logs"

    def settings(self, args: str = "", **further: Any) -> dict[str, Any]:
        return {
            "vllm_python": sys.executable,
            "vllm_args": f"--fake-notes {self.notes_folder} {args}",
            "vllm_log_dir": str(self.logs),
            "start_seconds": 30,
            "patience": 5,
            **further,
        }

    def open(self, args: str = "", **further: Any) -> VllmEngine:
        engine = open_engine("vllm:some/model", **self.settings(args, **further))
        assert isinstance(engine, VllmEngine)
        return engine

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.notes_folder.glob("*.json"))]

    def pids(self) -> list[int]:
        return [pid for note in self.notes() for pid in note["pids"]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake_vllm.install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Fake(tmp_path)


# --- from start to end ----------------------------------------------------------------------------


async def test_it_starts_answers_with_exact_tokens_and_ends(fake: Fake) -> None:
    engine = fake.open("--fake-delay 0.5")
    assert (engine.model, engine.tokenizer) == ("some/model", "some/model")
    assert engine.served_window == fake_vllm.WINDOW
    completion = await engine.complete(MESSAGES, SAMPLING)
    assert completion.text.startswith("port ")
    assert completion.prompt_ids == (3, 1, 4, 1)
    assert completion.completion_ids == (7, 1)
    assert completion.logprobs == (-0.5, -0.25)
    pids = fake.pids()
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    await engine.aclose()
    assert not any(is_running(pid) for pid in pids)
    log = engine.servers[0].launch.log
    assert log.parent == fake.logs
    assert log.exists()


async def test_without_token_ids_none_are_asked_for(fake: Fake) -> None:
    async with fake.open(token_ids=False) as engine:
        completion = await engine.complete(MESSAGES, SAMPLING)
    assert (completion.prompt_ids, completion.completion_ids, completion.logprobs) == (None,) * 3
    assert "--logprobs-mode" not in fake.notes()[0]["argv"]


async def test_a_closed_engine_closes_again_and_says_why_it_does_not_answer(fake: Fake) -> None:
    engine = fake.open()
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(MachineError, match="vLLM ended with status"):
        await engine.complete(MESSAGES, SAMPLING)


async def test_a_server_for_each_group_of_gpus_shares_the_calls(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    async with fake.open(tensor_parallel_size=2) as engine:
        replies = {(await engine.complete(MESSAGES, SAMPLING)).text for _ in range(4)}
        assert len(replies) == 2
        assert sorted(note["gpus"] for note in fake.notes()) == ["0,1", "2,3"]
        assert all(note["argv"][4:6] == ["--tensor-parallel-size", "2"] for note in fake.notes())
        # one of them dies: the other keeps running
        os.kill(fake.notes()[0]["pids"][0], signal.SIGKILL)
        wait_until(lambda: sum(server.is_running for server in engine.servers) == 1)
        survivors = {(await engine.complete(MESSAGES, SAMPLING)).text for _ in range(4)}
        assert len(survivors) == 1
    assert not any(is_running(pid) for pid in fake.pids())


async def test_when_no_server_is_left_it_fails_at_once_and_says_why(fake: Fake) -> None:
    async with fake.open(patience=600) as engine:
        os.kill(fake.pids()[0], signal.SIGKILL)
        with pytest.raises(MachineError, match=r"vLLM ended with status 137: .*its log is .*\.log"):
            await asyncio.wait_for(engine.complete(MESSAGES, SAMPLING), 120)  # far below 600


def test_yarn_settings_are_handed_on(fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "qwen2", "max_position_embeddings": 1024, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with open_engine(f"vllm:{folder}", **fake.settings(yarn_window=4096)) as engine:
        assert engine.served_window == 4096
    argv = fake.notes()[0]["argv"]
    overrides = json.loads(argv[argv.index("--hf-overrides") + 1])
    assert overrides["rope_parameters"]["factor"] == 4.0


def test_log_probabilities_that_do_not_match_the_tokens_are_not_believed() -> None:
    whole = fake_vllm.reply({"return_token_ids": True, "logprobs": True}, "port 1")
    assert parse_completion(whole).logprobs == (-0.5, -0.25)
    whole["choices"][0]["logprobs"]["content"].pop()
    short = parse_completion(whole)
    assert (short.completion_ids, short.logprobs) == ((7, 1), None)
    del whole["choices"][0]["token_ids"]
    assert parse_completion(whole).completion_ids is None


# --- when it does not start -----------------------------------------------------------------------


def test_a_crash_at_the_start_is_reported_with_its_cause(fake: Fake) -> None:
    with pytest.raises(MachineError) as caught:
        fake.open("--fake-crash")
    message = str(caught.value)
    assert message.startswith("vLLM ended with status 1: ValueError: head size 7 is not supported")
    assert str(fake.logs) in message
    assert "\n" not in message


def test_an_argument_that_vllm_does_not_know_is_reported(fake: Fake) -> None:
    with pytest.raises(MachineError, match=r"status 2: .*unrecognized arguments: --no-such-thing"):
        fake.open("--no-such-thing")


def test_a_server_that_is_never_ready_is_shut_down(fake: Fake) -> None:
    with pytest.raises(EngineError, match=r"not ready within 1 s; raise `start_seconds`"):
        fake.open("--fake-delay 600", start_seconds=1)
    pids = fake.pids()
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_when_one_of_several_crashes_the_others_are_ended_too(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match="ValueError: head size 7"):
        fake.open("--fake-delay 600 --fake-crash-on 1")
    assert [note["gpus"] for note in fake.notes()] == ["0"]
    assert not any(is_running(pid) for pid in fake.pids())


# --- it ends with us ------------------------------------------------------------------------------

PARENT = """
import json, sys, time
from memagent.engines.base import open_engine
engine = open_engine("vllm:some/model", **json.loads(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def test_it_ends_when_the_process_that_started_it_is_killed_at_whatever_moment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIED", "parent")
    command = [sys.executable, "-c", PARENT, json.dumps(fake.settings("--fake-delay 0.2"))]
    rng, seconds = random.Random(1), 0.0
    for number in range(1 + sized(2, 20)):
        started = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            if number == 0:  # how long a start takes here
                assert parent.stdout.readline() == "ready\n"
                seconds = time.monotonic() - started
                assert all(map(is_running, fake.pids()))
            else:
                time.sleep(rng.uniform(0, 1.1 * seconds))
            parent.kill()
        wait_until(lambda: not marked("TRIED=parent"))


@pytest.mark.parametrize("victim", ["server", "watchdog"])
async def test_a_server_that_is_killed_at_whatever_moment_leaves_its_calls_to_the_other(
    fake: Fake, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TRIED", victim)
    rng = random.Random(2)
    for _ in range(sized(2, 20)):
        async with fake.open("--fake-token-seconds 0.02", patience=60) as engine:
            server = engine.servers[0]
            note = json.loads((fake.notes_folder / f"{server.port}.json").read_text())
            pid = note["pids"][0] if victim == "server" else server.process.pid
            timer = kill_after(rng.uniform(0, 0.6), lambda pid=pid: [pid])
            replies = await asyncio.gather(*(engine.complete(MESSAGES, SAMPLING) for _ in range(6)))
            timer.join()
            assert [len(one.completion_ids or ()) for one in replies] == [20] * 6
        assert not marked(f"TRIED={victim}")


def test_a_start_that_is_killed_at_whatever_moment_is_one_line(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIED", "start")
    rng = random.Random(3)
    for _ in range(sized(2, 20)):
        timer = kill_after(rng.uniform(0.2, 1.5), lambda: one_of(marked("TRIED=start"), rng))
        said = ""
        try:
            fake.open("--fake-delay 1").close()
        except MemagentError as error:
            said = str(error)
        assert "\n" not in said
        timer.join()
        wait_until(lambda: not marked("TRIED=start"))


PARENT_TASK = """
import asyncio, json, sys
from memagent.engines.base import open_engine
async def main():
    open_engine("vllm:some/model", **json.loads(sys.argv[1]))
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [PARENT, PARENT_TASK], ids=["plain", "in_a_task"])
def test_an_interrupt_while_it_starts_ends_it(program: str, fake: Fake) -> None:
    settings = fake.settings("--fake-delay 600")
    command = [sys.executable, "-c", program, json.dumps(settings)]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(fake.pids()) == 2)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert not any(is_running(pid) for pid in fake.pids())


def test_an_engine_that_is_not_closed_ends_with_the_program(fake: Fake) -> None:
    program = PARENT.replace("time.sleep(600)", "")
    subprocess.run([sys.executable, "-c", program, json.dumps(fake.settings())], check=True)
    assert len(fake.pids()) == 2
    wait_until(lambda: not any(is_running(pid) for pid in fake.pids()))


def test_a_process_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    ask_to_end(child.pid, 0.3)
    assert child.wait(timeout=60) == -signal.SIGKILL
    child.stdout.close()


def test_the_command_reads_through_it_and_keeps_no_address(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("The ledger is in the attic.\n" * 20)
    command = [*MEMAGENT, "ask", str(tmp_path / "book.txt")]
    command += ["-q", "Where is the ledger?", "--engine", "vllm:some/model", "--tokenizer", "bytes"]
    command += ["--window", "4000", "--chunk-tokens", "1000", "--set", "memory_tokens=100"]
    command += ["--set", "answer_tokens=100", "--run-dir", str(tmp_path / "run")]
    command += ["--set", f"vllm_python={sys.executable}", "--set", f"vllm_log_dir={fake.logs}"]
    command += ["--set", f"vllm_args=--fake-notes {fake.notes_folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("port ")
    assert "starting vLLM" in done.stderr
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    assert kept["engine"] == "vllm:some/model"
    assert set(kept["engine_settings"]) == {"vllm_python", "vllm_log_dir", "vllm_args"}
    assert not any(is_running(pid) for pid in fake.pids())


# --- before anything is started -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_url": "http://localhost:8000/v1"},
            "for one that runs already use openai:some/model",
        ),
        ({"vllm_args": "--port 8000"}, "leave --port out of `vllm_args`: it is chosen here"),
        ({"vllm_args": "--served_model_name=x"}, "leave --served-model-name out of `vllm_args`"),
        ({"vllm_args": "--a 'b"}, "`vllm_args` cannot be parsed"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"concurrent": 2}, "unknown setting concurrent; did you mean concurrency"),
        ({"yarn_factor": 2.0, "vllm_args": "--hf-overrides {}"}, "or --hf-overrides, not both"),
        ({"vllm_python": "/no/such/python"}, "is no program that can be run"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict[str, Any], message: str, fake: Fake) -> None:
    given = {"vllm_python": sys.executable, **settings}
    with pytest.raises(ConfigError, match=message):
        open_engine("vllm:some/model", **given)


def test_a_python_without_vllm_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match=r"memagent\[vllm\].*`vllm_python`"):
        find_python(None)
    with pytest.raises(ConfigError, match=r"has no vllm; .*memagent\[vllm\].*`vllm_python`"):
        find_python(sys.executable)


def test_without_a_model_the_error_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match="vllm:HUB_ID"):
        open_engine("vllm:")


@pytest.mark.parametrize(
    ("devices", "tensor", "data", "groups"),
    [
        ("", 1, None, [()]),
        ("", 2, 3, [(), (), ()]),
        ("0", 1, None, [("0",)]),
        ("0,1,2,3", 1, None, [("0",), ("1",), ("2",), ("3",)]),
        ("0,1,2,3", 2, None, [("0", "1"), ("2", "3")]),
        ("4,5,6", 2, None, [("4", "5")]),
        ("0,1,2,3", 1, 2, [("0",), ("1",)]),
        ("GPU-a,GPU-b", 2, None, [("GPU-a", "GPU-b")]),
    ],
)
def test_gpus_are_grouped(
    devices: str, tensor: int, data: int | None, groups: list[tuple[str, ...]]
) -> None:
    visible = visible_gpus({"CUDA_VISIBLE_DEVICES": devices})
    assert gpu_groups(visible, tensor_parallel_size=tensor, data_parallel_size=data) == groups


@pytest.mark.parametrize(("tensor", "data"), [(4, None), (2, 2), (1, 4)])
def test_more_gpus_than_there_are_is_refused(tensor: int, data: int | None) -> None:
    with pytest.raises(ConfigError, match="4 GPUs are needed and 3 are here"):
        gpu_groups(["0", "1", "2"], tensor_parallel_size=tensor, data_parallel_size=data)


def test_the_driver_is_asked_where_the_environment_does_not_say(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0\necho 1\n")
    program.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ["0", "1"]
    assert visible_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_gpus({"PATH": str(tmp_path / "empty")}) == []


def test_further_arguments_come_last_so_that_they_win() -> None:
    arguments = server_arguments("m", VllmConfig(vllm_args="--dtype half --seed 3"))
    assert arguments[:4] == ["--model", "m", "--served-model-name", "m"]
    assert arguments[-4:] == ["--dtype", "half", "--seed", "3"]


def test_ports_are_free_and_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5


LOG_WITH_A_WARNING = """\
(APIServer pid=1) WARNING 11-15 07:47:50 [utils.py:9] Found ulimit of 20000 and failed to automatically increase with \
error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512]   File "parallel.py", line 7, in check
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512]     assert self.num_heads % self.tp_size == 0
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512]            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512] AssertionError
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (LOG_WITH_A_WARNING, "assert self.num_heads % self.tp_size == 0 | AssertionError"),
        ("ValueError: a\nOSError: b\nraise it\nlast words", "OSError: b"),
        (
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, too long\n",
            "pydantic_core.ValidationError: 1 validation error for ModelConfig | Value error, too long",
        ),
        (
            "api_server.py: error: argument --port: invalid",
            "api_server.py: error: argument --port: invalid",
        ),
        ("RuntimeError: See root cause above.", "RuntimeError: See root cause above."),
        ("loading\n\nstill loading\n", "loading | still loading"),
        ("", ""),
    ],
)
def test_of_a_log_the_last_exception_is_shown_that_names_a_cause(log: str, shown: str) -> None:
    assert informative_lines(log) == shown
