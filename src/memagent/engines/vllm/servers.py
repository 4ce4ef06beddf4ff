"""vLLM servers on the GPUs of this machine: which are started, and how.

One server for each group of `tensor_parallel_size` GPUs; `launcher.py` starts them and ends them.

    servers = start_servers(plan_launches(model, config, environment=os.environ), seconds=600)
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from memagent.config import VllmConfig
from memagent.engines import store
from memagent.engines.yarn import vllm_arguments, yarn_settings
from memagent.errors import ConfigError
from memagent.launcher import HOST, Launch, free_ports

INSIDE = Path(__file__).with_name("inside")
ROUTE_GUARD = "memagent_route_guard.RouteGuard"
CONTROL_VARIABLE = "VLLM_SERVER_DEV_MODE"
"""With it a server has routes that change its weights. vLLM asks for no key there; the guard does."""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
OWN_ARGUMENTS: dict[str, str] = {
    "--model": "the name after vllm:",
    "--served-model-name": "the name after vllm:",
    "--host": "chosen here",
    "--port": "chosen here",
    "--api-key": "chosen here",
    "--tensor-parallel-size": "set by `tensor_parallel_size`",
    "-tp": "set by `tensor_parallel_size`",
    "--data-parallel-size": "set by `data_parallel_size`",
    "-dp": "set by `data_parallel_size`",
}
"""Arguments of the server that are not for `vllm_args`, and what sets them."""


def plan_launches(
    model: str, config: VllmConfig, *, environment: Mapping[str, str]
) -> list[Launch]:
    """The servers to start: one for each group of GPUs, or one where there is no GPU."""
    python = find_python(config.vllm_python)
    groups = gpu_groups(
        visible_gpus(environment),
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
    )
    arguments = server_arguments(model, config)
    environment = dict(environment)
    if environment.get(CONTROL_VARIABLE) == "1":
        arguments += ["--middleware", ROUTE_GUARD]
        paths = (str(INSIDE), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    default = user_state_path("memagent", appauthor=False) / "vllm"
    folder = Path(config.vllm_log_dir).expanduser() if config.vllm_log_dir else default
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"`vllm_log_dir={folder}` cannot be created: {error.strerror}") from None
    api_key = secrets.token_urlsafe(24)
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    return [
        Launch(
            name="vLLM",
            command=(python, "-m", SERVER_MODULE, *arguments, "--host", HOST, "--port", str(port)),
            port=port,
            api_key=api_key,
            log=folder / f"{name}-{number}.log",
            environment={
                **environment,
                **({"CUDA_VISIBLE_DEVICES": ",".join(group)} if group else {}),
                "VLLM_API_KEY": api_key,  # not an argument: everybody can see those
                "PYTHONUNBUFFERED": "1",
            },
        )
        for number, (group, port) in enumerate(zip(groups, free_ports(len(groups)), strict=True))
    ]


def server_arguments(model: str, config: VllmConfig) -> list[str]:
    """Arguments that all servers of a model get."""
    try:
        further = shlex.split(config.vllm_args or "")
    except ValueError as error:
        raise ConfigError(f"`vllm_args` cannot be parsed: {error}") from None
    for argument in further:
        name = argument.partition("=")[0].replace("_", "-")
        if name in OWN_ARGUMENTS:
            raise ConfigError(f"leave {name} out of `vllm_args`: it is {OWN_ARGUMENTS[name]}")
    arguments = ["--model", _located(model), "--served-model-name", model]
    arguments += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    arguments += ["--enable-prompt-tokens-details"]  # reports what its prefix cache saved
    if config.token_ids:
        # of the distribution that was sampled from, temperature and top_p included
        arguments += ["--logprobs-mode", "processed_logprobs"]
    return arguments + _yarn_arguments(model, config, further) + further


def _yarn_arguments(model: str, config: VllmConfig, further: Sequence[str]) -> list[str]:
    if config.yarn_window is None and config.yarn_factor is None:
        return []
    if any(argument.partition("=")[0] == "--hf-overrides" for argument in further):
        raise ConfigError("give `yarn_window` and `yarn_factor` or --hf-overrides, not both")
    settings = yarn_settings(
        _model_config(model), window=config.yarn_window, factor=config.yarn_factor
    )
    assert settings is not None, "one of them is given"
    return vllm_arguments(settings)


def _model_config(model: str) -> dict[str, Any]:
    """The config.json of a model in a folder, or of one on the hub."""
    path = Path(_located(model)) / "config.json"
    try:
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # of the network, of the hub, of the file
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"the config.json of {model} cannot be read: {reason}") from None
    return config


def _located(model: str) -> str:
    """Where a model lies, if it is on this machine; else its name, which vLLM looks up itself."""
    store.check_is_whole(model)
    path = store.find(model)
    return model if path is None else str(path)


def find_python(python: str | None) -> str:
    """The Python to start vLLM with. Raises ConfigError where it has none."""
    if python is None:
        if find_spec("vllm") is None:
            raise ConfigError(
                'the vllm engine needs vllm; install it with pip install "memagent[vllm]", or name a '
                "Python that has it with `vllm_python`, or a running server with `base_url`"
            )
        return sys.executable
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ConfigError(f"`vllm_python={python}` is no program that can be run")
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([found, "-c", question], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"`vllm_python={python}` cannot be run: {error}") from None
    if done.returncode:
        raise ConfigError(
            f'{python} has no vllm; install it there with pip install "memagent[vllm]" or pip install '
            "vllm, or name another `vllm_python`"
        )
    return found


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; none where there is no driver."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        listed = _listed_by_driver(environment)
    devices = [device.strip() for device in listed.replace("\n", ",").split(",")]
    return [device for device in devices if device and device != "-1"]


def _listed_by_driver(environment: Mapping[str, str]) -> str:
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return ""
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpu_groups(
    devices: Sequence[str], *, tensor_parallel_size: int, data_parallel_size: int | None = None
) -> list[tuple[str, ...]]:
    """The GPUs of each server; one empty group where there are none, and vLLM takes what it finds."""
    if not devices:
        return [()] * (data_parallel_size or 1)
    num_groups = data_parallel_size or len(devices) // tensor_parallel_size
    needed = max(num_groups, 1) * tensor_parallel_size
    if needed > len(devices):
        raise ConfigError(
            f"{needed} GPUs are needed and {len(devices)} are here; lower "
            "`tensor_parallel_size` or `data_parallel_size`"
        )
    starts = range(0, needed, tensor_parallel_size)
    return [tuple(devices[start : start + tensor_parallel_size]) for start in starts]
