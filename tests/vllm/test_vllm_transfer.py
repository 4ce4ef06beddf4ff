"""Our requests of vLLM's weight transfer against its own classes and its server. Without a GPU no memory can be opened:
what comes before that is checked, and that a server which cannot take a bucket is an error.

    make test-vllm

Skipped unless MEMAGENT_TEST_VLLM names a Python that has vLLM.
"""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from memagent.engines.base import open_engine
from memagent.engines.vllm.engine import CONTROL_VARIABLES, HANDLE_VARIABLES, VllmEngine
from memagent.errors import EngineError
from memagent.rl.distributed.vllm_replica import TRANSFER_ARGUMENTS, update_request
from memagent.rl.distributed.weights import Bucket, TensorSpec
from memagent.types import Sampling
from tests.support.tiny_models import make_tiny_model

PYTHON = os.environ.get("MEMAGENT_TEST_VLLM")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-vllm starts vLLM"),
    pytest.mark.timeout(1800),
]
BUCKET = Bucket(
    (
        TensorSpec("model.norm.weight", "bfloat16", (4,)),
        TensorSpec("lm_head.weight", "bfloat16", (2, 4)),
    )
)
HANDLES: dict[str, tuple[Any, ...]] = {"GPU-0": ("handle", 1), "GPU-1": ("handle", 2)}
PARSE = """
import json, sys
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

given = json.load(sys.stdin)
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
arguments = parser.parse_args(given["arguments"])
init = IPCWeightTransferInitInfo(**given["init"])
update = IPCWeightTransferUpdateInfo(**given["update"])
print(json.dumps({
    "backend": arguments.weight_transfer_config.backend,
    "packed": init.packed,
    "names": update.names,
    "sizes": update.tensor_sizes,
    "handles": update.ipc_handles,
}))
"""


def test_requests_are_what_the_classes_of_vllm_take() -> None:
    assert PYTHON is not None
    given = {
        "arguments": TRANSFER_ARGUMENTS.split(),
        "init": {"packed": True},
        "update": update_request(BUCKET, HANDLES),
    }
    done = subprocess.run(
        [PYTHON, "-c", PARSE],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **HANDLE_VARIABLES},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "backend": "ipc",
        "packed": True,
        "names": ["model.norm.weight", "lm_head.weight"],
        "sizes": [8, 16],
        "handles": {name: list(one) for name, one in HANDLES.items()},
    }


async def test_a_server_starts_an_update_and_refuses_memory_that_it_cannot_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(
        tmp_path / "model", "llama", hidden_size=256, max_position_embeddings=1024
    )
    for name, value in {**CONTROL_VARIABLES, **HANDLE_VARIABLES}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engine = open_engine(
        f"vllm:{model}",
        vllm_python=PYTHON,
        vllm_args=f"--enforce-eager --dtype float32 --max-num-seqs 8 {TRANSFER_ARGUMENTS}",
        vllm_log_dir=str(tmp_path / "logs"),
        start_seconds=900,
    )
    assert isinstance(engine, VllmEngine)
    asked = []

    async def updates() -> AsyncIterator[dict[str, Any]]:
        asked.append(engine.is_alive)
        yield update_request(BUCKET, HANDLES)

    async with engine:
        await engine.complete([{"role": "user", "content": "Hello"}], Sampling(max_tokens=4))
        with pytest.raises(EngineError, match=r"^vLLM refuses /update_weights \(HTTP 5"):
            await engine.update_weights(updates(), 1)
        assert asked == [True], "pause, init and start were accepted"
        root = engine.servers[0].base_url.removesuffix("/v1")
        async with httpx.AsyncClient(trust_env=False) as stranger:
            statuses = [
                (await stranger.post(f"{root}/{route}")).status_code
                for route in ("pause", "update_weights", "collective_rpc", "v1/completions")
            ]
            assert statuses == [401] * 4
            assert (await stranger.get(f"{root}/health")).status_code == 200
