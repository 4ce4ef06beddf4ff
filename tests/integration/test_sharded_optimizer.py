"""Two processes that share a model make the optimizer steps of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.optimizer_ranks import make_model, stepped

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)], ids=str
)
def test_two_processes_step_as_one(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(NUM_RANKS), str(tmp_path), str(dtype).removeprefix("torch.")]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.optimizer_ranks", str(rank), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    expected = stepped(make_model(dtype))
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"stepped-{rank}.pt")
        for one, other in zip(found["metrics"], expected["metrics"], strict=True):
            assert one == pytest.approx(other, rel=tolerance)
            assert other["grad_norm"] > 0.5  # it was clipped, with the norm of all shards
        for part in ("weights", "state"):
            assert found[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                assert found[part][name].dtype == value.dtype
                torch.testing.assert_close(
                    found[part][name], value, rtol=tolerance, atol=tolerance, msg=name
                )
