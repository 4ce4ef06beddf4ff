"""`memagent serve --cluster --engine vllm:MODEL`: Ray's own application for vLLM, on a cluster of this machine.

    make test-vllm

Skipped unless MEMAGENT_TEST_VLLM names a Python that has vLLM, Ray and memagent: vLLM runs in processes of Ray.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from memagent import blocking
from memagent.engines.base import open_engine
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_model

PYTHON = os.environ.get("MEMAGENT_TEST_VLLM")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm starts vLLM"),
    pytest.mark.timeout(1800),
]
START = "from memagent.cli.main import main; main()"
START_SECONDS = 1200.0
MESSAGES = [{"role": "user", "content": "Where is the red ledger kept?"}]
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, the smallest of vLLM on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, "llama", hidden_size=256, max_position_embeddings=1024)


def ask(url: str, model: str) -> Any:
    body = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def until_ready(url: str, log: Path, process: subprocess.Popen[str]) -> None:
    """The command names the address when all replicas are healthy; Ray answers there before."""
    end = time.monotonic() + START_SECONDS
    while url not in log.read_text():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end
        time.sleep(1.0)


def test_it_serves_what_the_local_engine_says_at_one_address_and_ends(
    model: Path, unused_tcp_port: int, tmp_path: Path
) -> None:
    assert PYTHON is not None
    url = f"http://127.0.0.1:{unused_tcp_port}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--cluster", "auto", "--replicas", "1", "--port", str(unused_tcp_port)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, "-c", START, "serve", "--engine", f"vllm:{model}", *options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        until_ready(url, log, process)
        answer = ask(url, str(model))
        assert answer.status_code == 200, answer.text
        ids = answer.json()["choices"][0]["token_ids"]
        with open_engine(f"local:{model}", device="cpu", cache_gb=0.1) as local:
            expected = blocking.run(
                local.complete(MESSAGES, Sampling(max_tokens=12, temperature=0))
            )
        assert tuple(ids) == expected.completion_ids
        assert ask(url, "no-such-model").status_code == 404
        process.send_signal(signal.SIGINT)
        process.wait(180)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/v1/models", timeout=5)
