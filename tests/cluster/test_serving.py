"""`memagent serve --cluster`: replicas on two nodes behind one address."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from memagent.cluster import Cluster, node_ids, open_cluster
from memagent.config import ServeConfig
from memagent.engines.base import EngineChoice, choose_engine
from memagent.errors import ClusterError, ConfigError
from memagent.serve.cluster import check_choice, deployment_settings, llm_settings, serving_on
from tests.support.broken_gpu import REASON, BrokenChoice
from tests.support.ray_nodes import ray_nodes
from tests.support.tiny_models import make_tiny_model

on_cluster = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray Serve's, about its own code
]
VLLM = choose_engine("vllm:Qwen/Qwen2.5-7B-Instruct", {"tensor_parallel_size": 2})


def clustered(test: Any) -> Any:
    for mark in on_cluster:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes(2), open_cluster("auto", wait_seconds=120) as joined:
        yield joined


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineChoice:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")
    return choose_engine(f"local:{folder}", {"device": "cpu"})


def ask(url: str, text: str, *, key: str = "secret", max_tokens: int = 8) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)


def reply(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def replica_nodes() -> dict[str, int]:
    """The process of each replica by its node."""
    from ray._private.state import actors  # the public one needs the dashboard

    alive = [one for one in actors().values() if one["State"] == "ALIVE"]
    replicas = [one for one in alive if "ServeReplica" in one["ActorClassName"]]
    return {one["Address"]["NodeID"]: one["Pid"] for one in replicas}


@clustered
def test_replicas_on_all_nodes_answer_at_one_address_and_a_dead_one_is_replaced(
    cluster: Cluster, tiny: EngineChoice, unused_tcp_port: int
) -> None:
    config = ServeConfig(
        port=unused_tcp_port, api_key=SecretStr("secret"), drain_seconds=30, request_log=False
    )
    with tiny.open() as engine:
        from memagent import blocking
        from memagent.types import Sampling

        sampling = Sampling(max_tokens=8, temperature=0.0)
        asked = [{"role": "user", "content": "box 3"}]
        alone = blocking.run(engine.complete(asked, sampling)).text  # type: ignore[arg-type]
    with serving_on(cluster, tiny, config, num_replicas=2, start_seconds=120) as url:
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        assert ask(url, "box 3", key="wrong").status_code == 401
        assert {reply(ask(url, "box 3")) for _ in range(6)} == {alone}
        nodes = replica_nodes()
        assert set(nodes) == set(node_ids())
        os.kill(next(iter(nodes.values())), 9)
        assert {reply(ask(url, "box 3")) for _ in range(6)} == {alone}
        slow: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: slow.append(ask(url, "box 5", max_tokens=200)))
        asking.start()
        threading.Event().wait(0.5)
    asking.join(60)
    assert reply(slow[0]) is not None, "a running request finishes while the server drains"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)


@clustered
def test_a_replica_whose_gpu_fails_is_replaced(
    cluster: Cluster, tiny: EngineChoice, unused_tcp_port: int, tmp_path: Path
) -> None:
    broken = BrokenChoice(spec=tiny.spec, settings=tiny.settings, marker=tmp_path / "opened")
    config = ServeConfig(port=unused_tcp_port, request_log=False)
    with serving_on(cluster, broken, config, num_replicas=1, start_seconds=120) as url:
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        failed = ask(url, "box 3")
        assert failed.status_code >= 500
        assert REASON in failed.text
        unhealthy = httpx.get(f"{url}/health", timeout=30)
        assert (unhealthy.status_code, unhealthy.json()["error"]["code"]) == (503, "engine_ended")
        end = time.monotonic() + 120
        while (answered := ask(url, "box 3")).status_code != 200:
            assert time.monotonic() < end, answered.text
            time.sleep(1)


@clustered
def test_a_model_that_cannot_be_loaded_is_one_line_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, unused_tcp_port: int
) -> None:
    wrong = EngineChoice(spec=f"local:{tmp_path}/none", settings={"device": "cpu"})
    refused = pytest.raises(ClusterError, match="could not be started")
    with refused, serving_on(cluster, wrong, ServeConfig(port=unused_tcp_port), num_replicas=1):
        pass
    assert replica_nodes() == {}


@clustered
def test_more_replicas_than_there_is_room_for_are_refused(
    cluster: Cluster, tiny: EngineChoice, unused_tcp_port: int
) -> None:
    too_many = pytest.raises(ClusterError, match=r"50 replicas of .* need 50 CPU")
    config = ServeConfig(port=unused_tcp_port)
    hasty = open_cluster("auto", wait_seconds=2.0)
    with hasty as joined, too_many, serving_on(joined, tiny, config, num_replicas=50):
        pass


# --- options of Ray Serve -------------------------------------------------------------------------


def test_vllm_gets_its_model_its_gpus_and_the_limits_of_the_server() -> None:
    config = ServeConfig(max_concurrency=64, drain_seconds=20)
    assert llm_settings(VLLM, config, 4, on_gpu=True) == {
        "model_loading_config": {
            "model_id": "Qwen/Qwen2.5-7B-Instruct",
            "model_source": "Qwen/Qwen2.5-7B-Instruct",
        },
        "accelerator_config": {"kind": "gpu"},
        "deployment_config": {
            "num_replicas": 4,
            "max_ongoing_requests": 64,
            "health_check_period_s": 10.0,
            "graceful_shutdown_timeout_s": 20,
            "graceful_shutdown_wait_loop_s": 1.0,
        },
        "engine_kwargs": {"tensor_parallel_size": 2},
    }
    assert deployment_settings(ServeConfig(drain_seconds=0.5), 1)[
        "graceful_shutdown_wait_loop_s"
    ] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("choice", "config", "expected"),
    [
        (choose_engine("scripted", {}), ServeConfig(), "does not run on a cluster"),
        (VLLM, ServeConfig(port=0), "the port must be named"),
        (VLLM, ServeConfig(api_key=SecretStr("k")), "checks no key"),
        (
            choose_engine("vllm:M", {"vllm_args": "--dtype half"}),
            ServeConfig(),
            "`vllm_args` is for a vLLM server of this machine",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_cluster_is_asked(
    choice: EngineChoice, config: ServeConfig, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_choice(choice, config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve, about its own code
def test_what_rays_application_for_vllm_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memagent.serve.cluster.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "ray.serve.llm", None)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*\); pip install .*\[ray,vllm\]"):
        check_choice(VLLM, ServeConfig())
