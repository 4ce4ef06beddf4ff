"""Failures of the embedded engine: out of memory, invalid values, files that are not models.

A failure is a one-line error for the caller, and the engine keeps running.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from memagent import open_engine
from memagent.config import LocalConfig
from memagent.engines.base import opener_of
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.errors import ConfigError, EngineRefused
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the red ledger?"}]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory as Linux does")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        yield engine


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_gb", [1e5, 9e8])
def test_a_cache_larger_than_the_machine_is_refused_at_once(folder: Path, cache_gb: float) -> None:
    with pytest.raises(ConfigError, match=r"does not fit the memory of cpu .* lower `cache_gb`$"):
        open_engine(f"local:{folder}", cache_gb=cache_gb, device="cpu")


@pytest.mark.parametrize("cache_gb", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_cache_of_no_size_is_refused(folder: Path, cache_gb: float) -> None:
    with pytest.raises(ConfigError, match="cache_gb: input should be"):
        open_engine(f"local:{folder}", cache_gb=cache_gb)


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.errors import ConfigError, EngineError
from memagent.types import Sampling

def limit(spare):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))

loaded = load(sys.argv[1])
limit(100_000_000)
try:
    LocalEngine(loaded, LocalConfig(cache_gb=0.5))
except ConfigError as error:
    print("open:", error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

async def main():
    short, long = [5, 6, 7], [100 + n % 400 for n in range(450)]
    async with LocalEngine(loaded, LocalConfig(cache_gb=0.01)) as engine:
        first = await engine.generate(short, Sampling(max_tokens=4))
        limit(160_000_000)
        in_parts = await engine.generate([3, *long], Sampling(max_tokens=4))
        print("in parts:", len(in_parts.completion_ids))
        limit(20_000_000)
        calls = [engine.generate([n, *long], Sampling(max_tokens=4)) for n in (1, 2)]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, EngineError), result
            print("step:", result)
        again = await engine.generate(short, Sampling(max_tokens=4))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        after = await engine.generate(long, Sampling(max_tokens=4))
        assert again.completion_ids == first.completion_ids
        engine.weights_changed()  # fails if anything is in use
        print("after:", len(after.completion_ids), engine.load.num_used_slots)

asyncio.run(main())
"""


@LINUX
def test_a_machine_without_memory_fails_requests_and_the_engine_keeps_running(
    tmp_path: Path,
) -> None:
    # a step of the whole long prompt needs 180 MB for one of several activations, the smallest batch 26 MB
    wide = make_tiny_model(tmp_path / "wide", "llama", intermediate_size=100_000)
    # what is freed is given back to the system at once
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", LIMITED, str(wide)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.stderr == ""
    out_of_memory = "the model ran out of memory; lower `cache_gb`, `max_running` or `window`"
    assert done.stdout.splitlines() == [
        "open: a cache of 0.5 GB does not fit the memory of cpu beside the model; lower `cache_gb`",
        "in parts: 4",
        f"step: {out_of_memory}",
        f"step: {out_of_memory}",
        "after: 4 0",
    ]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("",), "a stop text must not be empty"),
        (("end", ""), "a stop text must not be empty"),
        ("end", "stop must be a tuple of texts, not 'end'"),
        ((7,), r"stop must be a tuple of texts, not \(7,\)"),
    ],
)
async def test_invalid_stop_texts_are_refused(engine: LocalEngine, stop: Any, message: str) -> None:
    with pytest.raises(EngineRefused, match=message):
        await engine.complete(MESSAGES, Sampling(max_tokens=5, stop=stop))
    assert (await engine.complete(MESSAGES, Sampling(max_tokens=5))).completion_ids


async def test_a_stop_text_that_never_comes_changes_nothing(engine: LocalEngine) -> None:
    whole = await engine.complete(MESSAGES, Sampling(max_tokens=15))
    same = await engine.complete(MESSAGES, Sampling(max_tokens=15, stop=("never said 漢",)))
    assert (same.text, same.finish_reason) == (whole.text, whole.finish_reason)


async def test_a_prompt_that_just_fits_the_window_is_answered(engine: LocalEngine) -> None:
    ids = [100 + n % 400 for n in range(engine.served_window - 3)]
    completion = await engine.generate(ids, Sampling(max_tokens=3))
    assert len(completion.completion_ids or ()) == 3
    with pytest.raises(EngineRefused, match="more than the 512"):
        await engine.generate(ids, Sampling(max_tokens=4))


# --- files and libraries --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [b"GGML" + bytes(200), b"PK\x03\x04" + bytes(200), b"FUGG" + bytes(200), b"a text\n" * 50],
    ids=["older", "zip", "reversed", "text"],
)
def test_a_file_that_is_not_gguf_is_named(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=r"model\.gguf is not a readable GGUF file") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_extra_names_both_remedies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    opener_of("local")
    with pytest.raises(ConfigError) as caught:
        open_engine(f"local:{folder}")
    assert str(caught.value) == (
        'a local model in torch needs torch; pip install "memagent[gpu]", or name an endpoint with `base_url`'
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError) as caught:
        opener_of("local")
    assert str(caught.value) == (
        'the local engine needs xllamacpp; install it with pip install "memagent[local]", or name '
        "an endpoint with `base_url`"
    )
