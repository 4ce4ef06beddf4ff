"""A model on all nodes of a cluster behind one address, with Ray Serve.

    client ──▶ proxy of the head node ──▶ replica 1: our app over a local engine      local:MODEL
                                      ──▶ replica 2: ...
               or, where vLLM generates   Ray's own application for it (`ray.serve.llm`)   vllm:MODEL

    with open_cluster("10.0.0.1:6379") as cluster:
        with serving_on(cluster, choice, ServeConfig(host="0.0.0.0"), num_replicas=4) as url:
            ...

Ray Serve checks the health of the replicas and replaces those that die. At the end it sends no further requests to them,
waits up to `drain_seconds` for running ones, and ends them. Other applications of the cluster are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI

from memagent.cluster import Bundle, Cluster
from memagent.config import ServeConfig
from memagent.engines.base import EngineChoice
from memagent.engines.replicas import replica_resources
from memagent.errors import ClusterError, ConfigError, MachineError
from memagent.serve.app import make_app

if TYPE_CHECKING:
    from memagent.serve.app import ServedEngine

APPLICATION = "memagent"
"""Name of the application in Ray Serve."""
START_SECONDS = 1800.0
"""How long the replicas may take to load the model."""
HEALTH_SECONDS = 10.0
"""Time between two checks of a replica."""
CONSTRUCTOR_TRIES = 2
"""How often a replica that cannot be started is tried."""
VLLM_CPUS = 2.0
"""CPUs of a replica in Ray's application for vLLM: one for it, one for a worker of vLLM."""
NOT_FOR_VLLM = ("vllm_python", "vllm_args", "vllm_log_dir", "data_parallel_size")
"""Settings of vLLM servers that memagent starts itself."""


@contextmanager
def serving_on(
    cluster: Cluster,
    choice: EngineChoice,
    config: ServeConfig,
    *,
    num_replicas: int,
    start_seconds: float = START_SECONDS,
) -> Iterator[str]:
    """Serve while the block runs; yields the base URL. Mistakes are raised before a model is loaded."""
    check_choice(choice, config)
    asyncio.run(_check_room(cluster, choice, num_replicas))
    serve = _ray_serve()
    has_others = bool(_applications())
    if APPLICATION in _applications():
        raise ConfigError(
            f"the cluster serves an application called {APPLICATION} already; end that one first"
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = {"host": config.host, "port": config.port}
    serve.start(proxy_location="HeadOnly", http_options=options)
    try:
        resources = replica_resources(cluster, choice)
        _deploy(_application(choice, config, num_replicas, resources), start_seconds)
        host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host  # for clients
        yield f"http://{host}:{config.port}"
    finally:
        with suppress(Exception):  # the cluster may be gone
            serve.delete(APPLICATION)
            if not has_others and not cluster.is_local:  # a local one ends with everything in it
                serve.shutdown()


def check_choice(choice: EngineChoice, config: ServeConfig) -> None:
    """Raise ConfigError for an engine or settings that cannot be served so."""
    if choice.kind not in ("local", "vllm"):
        raise ConfigError(
            f"{choice.spec!r} does not run on a cluster; use `engine=vllm:MODEL` or `engine=local:MODEL`"
        )
    if config.port == 0:
        raise ConfigError("on a cluster the port must be named; set `port`")
    if choice.kind == "local":
        return
    if config.api_key is not None:
        raise ConfigError(
            "Ray's application for vLLM checks no key; leave out `api_key`, and put a gateway with keys "
            "before the address"
        )
    for name in NOT_FOR_VLLM:
        if choice.settings.get(name) is not None:
            raise ConfigError(f"`{name}` is for a vLLM server of this machine; leave it out here")
    if find_spec("vllm") is None:
        raise ConfigError('serving vLLM on a cluster needs vllm; pip install "memagent[vllm]"')
    _ray_llm()


async def _check_room(cluster: Cluster, choice: EngineChoice, num_replicas: int) -> None:
    """Wait for room within the cluster's time: Ray Serve would wait without end, and say nothing."""
    needed = replica_resources(cluster, choice)
    if choice.kind == "vllm":
        needed = {**needed, "CPU": VLLM_CPUS}
    bundles = [needed] * num_replicas
    group = await cluster.place(bundles, what=f"{num_replicas} replicas of {choice.spec}")
    cluster.release(group)


def _application(
    choice: EngineChoice, config: ServeConfig, num_replicas: int, resources: Bundle
) -> Any:
    if choice.kind == "vllm":
        llm = _ray_llm()
        settings = llm_settings(choice, config, num_replicas, on_gpu="GPU" in resources)
        return llm.build_openai_app(
            {
                "llm_configs": [llm.LLMConfig(**settings)],
                "ingress_deployment_config": {"ray_actor_options": {"num_cpus": 0}},
            }
        )
    serve = _ray_serve()

    def build() -> FastAPI:  # Ray Serve calls functions only, on each replica
        engine = choice.open()
        app = make_app(cast("ServedEngine", engine), config)
        app.state.engine = engine
        return app

    deployment = serve.deployment(
        serve.ingress(build)(_ServedModel),
        name=APPLICATION,
        ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0.0)},
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        **deployment_settings(config, num_replicas),
    )
    return deployment.bind()


def llm_settings(
    choice: EngineChoice, config: ServeConfig, num_replicas: int, *, on_gpu: bool
) -> dict[str, Any]:
    """Settings of `ray.serve.llm.LLMConfig` for a model."""
    return {
        "model_loading_config": {"model_id": choice.model, "model_source": choice.model},
        "accelerator_config": {"kind": "gpu" if on_gpu else "cpu"},
        "deployment_config": deployment_settings(config, num_replicas),
        "engine_kwargs": {
            "tensor_parallel_size": int(choice.settings.get("tensor_parallel_size") or 1)
        },
    }


def deployment_settings(config: ServeConfig, num_replicas: int) -> dict[str, Any]:
    """Options of the replicas in Ray Serve: how many, their limits, health and draining."""
    return {
        "num_replicas": num_replicas,
        "max_ongoing_requests": config.max_concurrency,
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": config.drain_seconds,
        "graceful_shutdown_wait_loop_s": min(1.0, config.drain_seconds),
    }


class _ServedModel:
    """What Ray Serve places; the application does the work."""

    app: FastAPI
    """Set by Ray Serve."""

    def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if not self.app.state.engine.is_alive:
            raise MachineError("the engine of the replica has ended")


def _deploy(application: Any, seconds: float) -> None:
    """Deploy and wait until all replicas are healthy, within the time."""
    serve = _ray_serve()
    errors: list[Exception] = []

    def run() -> None:
        try:
            serve.run(application, name=APPLICATION, route_prefix="/")
        except Exception as error:
            errors.append(error)

    # a thread, because Ray Serve waits without end for replicas that are never ready
    deploying = threading.Thread(target=run, daemon=True)
    deploying.start()
    deploying.join(seconds)
    if deploying.is_alive():
        raise ClusterError(
            f"the replicas were not ready within {seconds:.0f} s; see `serve status` and the logs of their "
            "nodes"
        )
    if errors:
        reason = " ".join(str(errors[0]).split())[-400:]
        raise ClusterError(f"the replicas could not be started: {reason}")


def _applications() -> list[str]:
    """Names of the applications that the cluster serves."""
    try:
        return list(_ray_serve().status().applications)
    except Exception:  # Ray Serve does not run
        return []


def _ray_serve() -> Any:
    """Ray Serve, whose functions have half of their types."""
    from ray import serve

    return serve


def _ray_llm() -> Any:
    """Ray's application for vLLM, which needs a library that neither Ray nor vLLM brings by itself."""
    try:
        from ray.serve import llm
    except ImportError as error:
        raise ConfigError(
            f"Ray's application for vLLM cannot be loaded ({error}); pip install "
            '"memagent[ray,vllm]"'
        ) from None
    return llm
