"""llama.cpp in its own process: what it replies, whom it answers, and how it ends."""

import asyncio
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memagent.config import LocalConfig
from memagent.engines.base import EngineChoice, open_engine, runtime_of
from memagent.engines.llamacpp import engine as llamacpp
from memagent.engines.llamacpp.engine import LlamaEngine
from memagent.engines.local.gguf_files import open_header
from memagent.errors import ConfigError, MachineError, PromptTooLong
from memagent.launcher import HOST
from memagent.types import Completion, Message, Sampling, TokenEngine
from tests.support.processes import children, is_running, kill_after, marked
from tests.support.sizes import sized
from tests.support.timing import wait_until
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_hybrid import write_gemma3, write_lfm2
from tests.support.tiny_models import KINDS, Kind, make_tiny_adapter, make_tiny_model

MESSAGES: list[Message] = [{"role": "user", "content": "Where is the ledger?"}]
SAMPLING = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=400)
CONTROL = "<|im_end|>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    base = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(base / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def files(folders: dict[Kind, Path]) -> dict[Kind, Path]:
    return {
        kind: write_gguf(folder, folder / "m.gguf", pre="qwen2" if kind != "llama" else "gpt-2")
        for kind, folder in folders.items()
    }


@pytest.fixture
def path(files: dict[Kind, Path]) -> Path:
    return files["llama"]


def opened(path: Path, **settings: Any) -> LlamaEngine:
    engine = open_engine(f"local:{path}", device="cpu", **settings)
    assert isinstance(engine, LlamaEngine)
    return engine


def server_pid(engine: LlamaEngine) -> int:
    return children(engine.server.process.pid)[0]


# --- replies --------------------------------------------------------------------------------------


async def replies_of(path: Path, **settings: Any) -> list[Completion]:
    """To single words, a few tokens each: tiny models say halves of characters, too."""
    async with open_engine(f"local:{path}", device="cpu", **settings) as engine:
        words = [
            "ledger",
            "cellar",
            "key",
            "captain",
            "gate",
            "salt",
            "wife",
            "house",
            "north",
            "stone",
        ]
        prompts: list[list[Message]] = [[{"role": "user", "content": word}] for word in words]
        return [await engine.complete(prompt, Sampling(max_tokens=2)) for prompt in prompts]


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    """Keys and values have 16 bits in llama.cpp, so some ties go the other way."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[1].text.isascii()]
    equal = [(one, two) for one, two in pairs if one.completion_ids == two.completion_ids]
    assert len(equal) >= max(3, 0.5 * len(pairs))
    for mine, other in equal:
        assert (mine.prompt_ids, mine.text) == (other.prompt_ids, other.text)
        assert (mine.finish_reason, mine.logprobs) == (
            other.finish_reason,
            pytest.approx(other.logprobs, abs=0.05),
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_it_replies_as_torch_does(kind: Kind, files: dict[Kind, Path]) -> None:
    assert_same(await replies_of(files[kind]), await replies_of(files[kind], runtime="torch"))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
async def test_it_replies_as_torch_does_with_an_adapter(
    kind: Kind, files: dict[Kind, Path], folders: dict[Kind, Path], tmp_path: Path
) -> None:
    adapter = str(make_tiny_adapter(folders[kind], tmp_path / "adapter"))
    ours = await replies_of(files[kind], adapter=adapter)
    assert_same(ours, await replies_of(files[kind], adapter=adapter, runtime="torch"))
    bare = await replies_of(files[kind])
    assert [one.text for one in ours] != [one.text for one in bare]


async def test_a_longer_window_gives_the_tokens_of_torch(path: Path) -> None:
    prompt, replies = [number % 97 + 10 for number in range(700)], []
    for runtime in ("llama.cpp", "torch"):
        settings = {"runtime": runtime, "yarn_factor": 2.0, "device": "cpu"}
        async with open_engine(f"local:{path}", **settings) as engine:
            assert isinstance(engine, TokenEngine)
            assert engine.served_window == 1024
            replies.append((await engine.generate(prompt, Sampling(max_tokens=1))).logprobs)
    assert replies[0] == pytest.approx(replies[1], abs=0.05)
    with pytest.raises(ConfigError, match="`yarn_window=100` is less than the model's own 512"):
        opened(path, yarn_window=100)


async def test_a_stop_text_and_a_limit_end_a_reply(path: Path) -> None:
    async with opened(path) as engine:
        whole = await engine.complete(MESSAGES, SAMPLING)
        stop = whole.text[3:6]
        cut = await engine.complete(MESSAGES, Sampling(max_tokens=12, stop=(stop,)))
        again = [
            await engine.complete(MESSAGES, Sampling(max_tokens=12, temperature=1.0, seed=7))
            for _ in range(2)
        ]
    assert whole.finish_reason == "length"
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert again[0].text == again[1].text != whole.text


async def test_control_strings_in_a_text_stay_text(path: Path) -> None:
    async with opened(path) as engine:
        (end,) = engine.vocabulary._backend.encode(CONTROL, add_special_tokens=False).ids
        plain = await engine.complete([{"role": "user", "content": "a b"}], SAMPLING)
        marked = await engine.complete([{"role": "user", "content": f"a {CONTROL} b"}], SAMPLING)
    assert plain.prompt_ids is not None
    assert marked.prompt_ids is not None
    assert marked.prompt_ids.count(end) == plain.prompt_ids.count(end)
    assert CONTROL in engine.decode(marked.prompt_ids)


async def test_a_prompt_that_does_not_fit_is_refused(path: Path) -> None:
    async with opened(path) as engine:
        assert engine.served_window == 512
        with pytest.raises(PromptTooLong, match="512 tokens"):
            await engine.complete(MESSAGES, Sampling(max_tokens=600))


async def test_what_prompts_share_is_computed_once(path: Path) -> None:
    text = "The ledger is in the cellar, and nobody has the key. " * 12
    prompts: list[list[Message]] = [
        [{"role": "user", "content": f"{text}Question {number}"}] for number in range(8)
    ]
    async with opened(path) as engine:
        replies = await asyncio.gather(*(engine.complete(one, SAMPLING) for one in prompts))
    used = [one.usage for one in replies if one.usage]
    total = sum(one.prompt_tokens for one in used)
    assert total - sum(one.cached_tokens for one in used) <= 0.2 * total


async def test_a_prompt_that_has_left_its_slot_is_known_to_its_owner_only(path: Path) -> None:
    async def num_cached(text: str, salt: str | None) -> int:
        messages: list[Message] = [{"role": "user", "content": f"{text} " * 60}]
        sampling = Sampling(max_tokens=2, cache_salt=salt)
        usage = (await engine.complete(messages, sampling)).usage
        assert usage is not None
        return usage.cached_tokens

    async with opened(path, max_running=1) as engine:
        known = [await num_cached(text, "a") > 100 for text in ("key", "gate", "key")]
        assert known == [False, False, True]
        assert [await num_cached("key", salt) for salt in ("b", "b", "a")] == [0, 0, 0]
        await engine.drop_prompts("a")
        assert [await num_cached("key", "a") > 100 for _ in range(2)] == [False, True]


# --- who is answered, and when it ends ------------------------------------------------------------


async def test_the_port_needs_the_secret_which_nobody_can_see(path: Path) -> None:
    async with opened(path) as engine:
        for key, expected in (("", 401), ("wrong", 401), (engine._key, 200)):
            connection = http.client.HTTPConnection(HOST, engine.server.port)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request("POST", "/completion", '{"prompt": [5], "n_predict": 1}', headers)
            assert connection.getresponse().status == expected
            connection.close()
        pids = [engine.server.process.pid, *children(engine.server.process.pid)]
        assert len(pids) == 2
        for pid in pids:
            assert engine._key not in Path(f"/proc/{pid}/cmdline").read_text()


async def test_two_engines_at_once_and_one_that_is_opened_again(path: Path) -> None:
    async with opened(path) as first, opened(path) as second:
        one, two = await asyncio.gather(
            first.complete(MESSAGES, SAMPLING), second.complete(MESSAGES, SAMPLING)
        )
        pids = [server_pid(first), server_pid(second)]
    assert not any(map(is_running, pids))
    assert not first.server.launch.log.exists()
    async with opened(path) as again:
        three = await again.complete(MESSAGES, SAMPLING)
    assert one.text == two.text == three.text


async def test_a_call_that_is_cancelled_leaves_its_slot(path: Path) -> None:
    async with opened(path) as engine:
        tasks = [asyncio.create_task(engine.complete(MESSAGES, LONG)) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await engine.complete(MESSAGES, SAMPLING)).text


@pytest.mark.parametrize("victim", ["server", "watchdog"])
async def test_a_server_that_is_killed_at_whatever_moment_is_started_again(
    path: Path, victim: str
) -> None:
    rng, seen = random.Random(1), []
    async with opened(path) as engine:
        for _ in range(sized(2, 20)):
            watchdog, pid = engine.server.process.pid, server_pid(engine)
            chosen = [pid if victim == "server" else watchdog]
            seen += [pid, watchdog]
            timer = kill_after(rng.uniform(0, 0.5), lambda chosen=chosen: chosen)
            calls = [engine.complete(MESSAGES, LONG) for _ in range(3)]
            used = [one.usage for one in await asyncio.gather(*calls)]
            assert min(one.completion_tokens for one in used if one) > 100
            timer.join()
            wait_until(lambda pid=pid: not is_running(pid))
            await engine.complete(MESSAGES, SAMPLING)
    assert not any(map(is_running, seen))


async def test_a_server_that_dies_twice_in_a_call_is_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as engine:
        reply = engine._post

        async def deadly(*arguments: Any) -> Any:
            os.kill(server_pid(engine), signal.SIGKILL)
            return await reply(*arguments)

        monkeypatch.setattr(engine, "_post", deadly)
        with pytest.raises(
            MachineError, match=r"llama\.cpp with m\.gguf ended with status 137"
        ) as caught:
            await engine.complete(MESSAGES, SAMPLING)
    assert "\n" not in str(caught.value)


PROGRAM = """
import asyncio, sys
from memagent.engines.base import open_engine
from memagent.types import Sampling

async def main():
    async with open_engine(f"local:{sys.argv[1]}", device="cpu") as engine:
        print("open", flush=True)
        while True:
            await engine.complete([{"role": "user", "content": "x"}], Sampling(max_tokens=400))

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_server_ends_with_its_parent_at_whatever_moment(
    path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIED", number.name)
    command = [sys.executable, "-c", PROGRAM, str(path)]
    rng, seconds = random.Random(number), 0.0
    for attempt in range(1 + sized(2, 20)):
        started = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as program:
            assert program.stdout is not None
            if attempt == 0:  # how long a start takes here
                assert program.stdout.readline() == b"open\n"
                seconds = time.monotonic() - started
                assert len(marked(f"TRIED={number.name}")) >= 3
            else:
                time.sleep(rng.uniform(0, 1.3 * seconds))
            program.send_signal(number)
        wait_until(lambda: not marked(f"TRIED={number.name}"))


ASK = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "numpy", "gguf", "safetensors")))
from memagent.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_question_needs_no_torch(path: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("The ledger is in the cellar. " * 40)
    settings = "--window 512 --chunk-tokens 128 --set memory_tokens=24 --set answer_tokens=24 --prompts small"
    question = [
        "ask",
        str(tmp_path / "note.txt"),
        "-q",
        "Where?",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-c", ASK, *question, "--engine", f"local:{path}", *settings.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "llama.cpp" in json.dumps(kept["command"])


# --- files and settings ---------------------------------------------------------------------------


def test_a_damaged_file_is_one_line(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for contents in (data[:200], data[:-5000], b"GGUF" + os.urandom(4000), b""):
        broken.write_bytes(contents)
        with pytest.raises(ConfigError) as caught:
            opened(broken, runtime="llama.cpp")
        assert "\n" not in str(caught.value)
        assert str(broken) in str(caught.value)


def test_what_llama_cpp_refuses_is_one_line(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(b"blk.1.attn_q.weight")
    data[place : place + 5] = b"blx.1"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(
        MachineError, match=r"llama\.cpp with broken\.gguf ended with status 1: .*attn_q"
    ) as caught:
        opened(broken, runtime="llama.cpp")
    assert "\n" not in str(caught.value)


def test_a_gguf_file_runs_in_llama_cpp_where_there_is_no_gpu(
    path: Path, folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(model: Path, **settings: Any) -> str:
        return runtime_of(str(model), LocalConfig(**settings))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert chosen(path) == "llama.cpp"
    assert chosen(folders["llama"]) == "torch"
    assert chosen(path, runtime="torch") == "torch"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (chosen(path), chosen(path, device="cpu")) == ("torch", "llama.cpp")


def test_the_runtime_is_kept_with_a_run(path: Path) -> None:
    choice = EngineChoice(spec=f"local:{path}", settings={"device": "cpu"})
    with choice.open() as engine:
        assert choice.kept(engine).settings == {"device": "cpu", "runtime": "llama.cpp"}


def test_window_and_slots_follow_from_the_memory(path: Path) -> None:
    header = open_header(path)
    assert header.cache_bytes == 2 * 3 * 2 * 16 * 2
    planned = [
        llamacpp.plan_parameters(path, header, LocalConfig(**settings))
        for settings in ({}, {"max_running": 3}, {"yarn_factor": 2.0}, {"max_batch_tokens": 64})
    ]
    assert [(one["n_ctx"], one["n_parallel"]) for one in planned] == [
        (1024, 2),
        (1536, 3),
        (2048, 2),
        (1024, 2),
    ]
    assert planned[-1]["n_batch"] == 64


# --- architectures and tokenizers that torch does not have here -----------------------------------

TEXTS = (  # composed characters: llama.cpp leaves out the normalisation of Qwen
    "Where is the ledger? The ledger is in the cellar, it's 1,907 steps away.",
    "  two  spaces,\n\n\tlines \u00e9\u00e8 na\u00efve \u4e2d\u6587 \U0001f511 we'LL see 12345678",
    "\u0915\u094d\u0937 ...!!! x=y+1; don't",
)


def ids_of(engine: LlamaEngine, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text by our tokenizer and by llama.cpp."""
    connection = http.client.HTTPConnection(HOST, engine.server.port)
    headers = {"Authorization": f"Bearer {engine._key}", "Content-Type": "application/json"}
    body = json.dumps({"content": text, "add_special": False, "parse_special": False})
    connection.request("POST", "/tokenize", body, headers)
    theirs = json.loads(connection.getresponse().read())["tokens"]
    connection.close()
    return engine.vocabulary._backend.encode(text, add_special_tokens=False).ids, theirs


@pytest.mark.parametrize("write", [write_gemma3, write_lfm2], ids=["gemma3", "lfm2"])
async def test_other_architectures_read_answer_and_stop(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf")
    async with opened(path) as engine:
        long: list[Message] = [{"role": "user", "content": "the ledger is in the cellar " * 30}]
        first, again = [await engine.complete(long, SAMPLING) for _ in range(2)]
        assert first.usage is not None
        assert first.usage.prompt_tokens > 150
        assert first.text == again.text
        stop = first.text[4:7]
        cut = await engine.complete(long, Sampling(max_tokens=12, stop=(stop,)))
        assert (cut.finish_reason, stop in cut.text) == ("stop", False)
        for text in TEXTS:
            ours, theirs = ids_of(engine, text)
            assert ours == theirs
    with pytest.raises(ConfigError, match="torch runs llama, qwen2, qwen3 here"):
        open_engine(f"local:{path}", device="cpu", runtime="torch")


@pytest.mark.parametrize("part", [b"shortconv.l_cache", b"blk.0.shortconv.in_proj.weight"])
def test_a_hybrid_model_without_one_of_its_parts_is_one_line(part: bytes, tmp_path: Path) -> None:
    path = write_lfm2(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(part, part[:-1] + b"x"))
    with pytest.raises(
        MachineError, match=part.decode().rpartition(".weight")[0] or "l_cache"
    ) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe", "lfm2"])
async def test_tokens_are_those_of_llama_cpp(
    pre: str, folders: dict[Kind, Path], tmp_path: Path
) -> None:
    path = write_gguf(folders["qwen2"], tmp_path / "model.gguf", pre=pre)
    async with opened(path) as engine:
        for text in TEXTS:
            ours, theirs = ids_of(engine, text)
            assert ours == theirs
