"""A small program in the place of vLLM's server: it starts late, crashes or hangs on demand.

    install(folder, monkeypatch)     from then on `python -m vllm.entrypoints.openai.api_server` is this

It has vLLM's paths, key and reply fields, and its own worker process, as vLLM has. With
`--fake-notes FOLDER` it writes down what it was started with. An adapter answers with the `note` that
its adapter_config.json had when it was loaded.

With `--fake-token-seconds` replies take their time, and weights can be changed meanwhile: a token is 1000 times
the version of the weights plus its position, and the weights in a folder are a file `version`. Weights that are
transferred have as handle of a GPU their version; the order of requests and their fields are checked as vLLM 0.32 does.
"""

import argparse
import base64
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CRASH_LOG = """\
(APIServer pid=1) INFO 11-15 07:47:52 [api_server.py:100] starting
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-15 07:47:52 [core.py:1512] ValueError: head size 7 is not supported
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
WINDOW = 4096
PROMPT = [3, 1, 4, 1]


def install(folder: Path, monkeypatch: Any) -> None:
    """Make this program the vllm of every Python that is started from now on."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    shutil.copy(__file__, package / "api_server.py")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="api_server.py")
    for name in ("--model", "--served-model-name", "--host", "--logprobs-mode", "--hf-overrides"):
        parser.add_argument(name)
    for name in ("--generation-config", "--middleware"):
        parser.add_argument(name)
    for name in ("--port", "--tensor-parallel-size", "--max-model-len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--weight-transfer-config.backend", dest="transfer")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--fake-delay", type=float, default=0.0)
    parser.add_argument("--fake-crash", action="store_true")
    parser.add_argument("--fake-crash-on", metavar="GPUS", help="crash only there, beside another")
    parser.add_argument("--fake-stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--fake-notes", type=Path)
    parser.add_argument("--fake-token-seconds", type=float)
    return parser.parse_args(argv)


class Weights:
    """Of the whole server."""

    def __init__(self) -> None:
        self.version = 0
        self.num_pauses = 0
        self.is_paused = False
        self.is_packed = False
        self.coming: list[int] | None = None
        """Versions of the buckets of an update that has started."""
        self.changed = threading.Condition()

    def transfer(self, path: str, body: dict[str, Any]) -> str | None:
        """A request of the transfer engine; why it is refused."""
        if not self.is_paused:
            return "the fake wants a pause first"
        if path == "/init_weight_transfer_engine":
            self.is_packed = bool(body["init_info"]["packed"])
        elif path == "/start_weight_update":
            if not self.is_packed or self.coming is not None:
                return "start_weight_update called while a weight update is already active"
            self.coming = []
        elif self.coming is None:
            return f"start_weight_update must be called before {path}"
        elif path == "/update_weights":
            return self.take_bucket(**body["update_info"])
        else:
            (self.version,) = set(self.coming)
            self.coming = None
        return None

    def take_bucket(
        self,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        tensor_sizes: list[int],
        ipc_handles_pickled: str,
    ) -> str | None:
        if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") != "1":
            return "Refusing to deserialize `ipc_handles_pickled`"
        if not len(names) == len(dtype_names) == len(shapes) == len(tensor_sizes):
            return "`shapes` should be of the same size as `names`"
        handles = pickle.loads(base64.b64decode(ipc_handles_pickled))
        if "GPU-0" not in handles:
            return "IPC handle not found for GPU UUID GPU-0"
        assert self.coming is not None
        self.coming.append(*handles["GPU-0"])
        return None

    def control(self, path: str, body: dict[str, Any]) -> None:
        with self.changed:
            if path.startswith("/pause"):
                self.is_paused = True
                self.num_pauses += 1
            elif path == "/resume":
                self.is_paused = False
            elif path == "/collective_rpc":
                assert self.is_paused
                folder = Path(body["kwargs"]["weights_path"])
                self.version = int((folder / "version").read_text())
            self.changed.notify_all()

    def sample(self, body: dict[str, Any], seconds: float) -> tuple[list[int], str]:
        """Tokens until the limit or the next pause; during a pause nothing starts."""
        first = len(body.get("prompt", PROMPT)) - len(PROMPT)
        with self.changed:
            self.changed.wait_for(lambda: not self.is_paused)
            num_pauses = self.num_pauses
        ids: list[int] = []
        while len(ids) < body["max_tokens"]:
            time.sleep(seconds)
            with self.changed:
                if self.num_pauses > num_pauses:
                    return ids, "abort"
                ids.append(1000 * self.version + first + len(ids))
        return ids, "length"


class Handler(BaseHTTPRequestHandler):
    weights = Weights()
    arguments: argparse.Namespace
    adapters: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - of the whole server

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(200, {})
        elif self.is_allowed():
            model = {"id": self.arguments.served_model_name, "root": self.arguments.model}
            window = self.arguments.max_model_len or WINDOW
            adapters = [{"id": name, "root": one["path"]} for name, one in self.adapters.items()]
            self.send(200, {"data": [{**model, "max_model_len": window}, *adapters]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        if "weight" in self.path:
            refusal = self.weights.transfer(self.path, body)
            if self.arguments.transfer != "ipc":
                refusal = "Weight transfer not configured."
            self.send(500 if refusal else 200, failure(500, refusal) if refusal else {})
        elif not self.path.startswith("/v1/"):
            self.weights.control(self.path, body)
            self.send(200, {})
        elif self.arguments.fake_token_seconds is not None:
            sampled = self.weights.sample(body, self.arguments.fake_token_seconds)
            self.send(200, slow_reply(body, *sampled))
        elif self.path.endswith("_lora_adapter"):
            self.send(*self.change_adapters(body))
        elif adapter := self.adapters.get(body["model"]):
            self.send(200, reply(body, f"{adapter['note']} at port {self.arguments.port}"))
        elif body["model"] == self.arguments.served_model_name:
            self.send(200, reply(body, f"port {self.arguments.port}"))
        else:
            self.send(404, failure(404, f"The model `{body['model']}` does not exist."))

    def change_adapters(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Load or unload, with the words and statuses of vLLM 0.32."""
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "True":
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if self.path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return 404, failure(404, f"The lora adapter '{name}' cannot be found.")
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if name in self.adapters:
            return 400, failure(400, f"The lora adapter '{name}' has already been loaded.")
        if not self.arguments.enable_lora:
            return 500, failure(500, "LoRA is not enabled.")
        path = Path(body["lora_path"])
        if not path.is_dir():
            return 404, failure(404, f"No adapter found for {path}")
        config = json.loads((path / "adapter_config.json").read_text())
        if config["r"] > self.arguments.max_lora_rank:
            return 500, failure(500, f"LoRA rank {config['r']} is greater than max_lora_rank")
        self.adapters[name] = {"path": str(path), "note": config.get("note")}
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def is_allowed(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}":
            return True
        self.send(401, {"error": {"message": "Unauthorized"}})
        return False

    def send(self, status: int, body: Any) -> None:
        is_text = isinstance(body, str)  # sent as it is, without a type, as vLLM does
        data = body.encode() if is_text else json.dumps(body).encode()
        self.send_response(status)
        if not is_text:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *values: object) -> None:
        pass


def failure(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "param": None, "code": status}}


def reply(body: dict[str, Any], text: str) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    whole: dict[str, Any] = {"choices": [choice], "usage": usage}
    if body.get("return_token_ids"):
        choice["token_ids"] = [7, 1]
        whole["prompt_token_ids"] = PROMPT
    if body.get("logprobs"):
        entries = [{"token": "port", "logprob": -0.5}, {"token": "", "logprob": -0.25}]
        choice["logprobs"] = {"content": entries}
    return whole


def slow_reply(body: dict[str, Any], ids: list[int], reason: str) -> dict[str, Any]:
    """In the format of chat, or of prompts of tokens."""
    text = "".join(f"{token} " for token in ids)
    choice: dict[str, Any] = {"finish_reason": reason, "token_ids": ids}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ids)}
    logprobs = [-token / 1000 for token in ids]
    if "prompt" in body:
        assert body["logprobs"] == 0, "a number, where chat has a switch"
        choice |= {"text": text, "logprobs": {"token_logprobs": logprobs}}
        choice["prompt_token_ids"] = body["prompt"]
        return {"choices": [choice], "usage": usage}
    entries = [{"token": "", "logprob": one} for one in logprobs]
    choice |= {"message": {"content": text}, "logprobs": {"content": entries}}
    return {"choices": [choice], "usage": usage, "prompt_token_ids": PROMPT}


def await_another(notes: Path) -> None:
    """Wait until another server runs, so that there is one to end when this one crashes."""
    while not any(notes.glob("*.json")):
        time.sleep(0.01)


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    is_there = os.environ.get("CUDA_VISIBLE_DEVICES", "") == arguments.fake_crash_on
    if is_there:
        await_another(arguments.fake_notes)
    if arguments.fake_crash or is_there:
        sys.stderr.write(CRASH_LOG)
        sys.exit(1)
    if arguments.fake_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if arguments.fake_notes:
        note = {
            "argv": argv,
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "pids": [os.getpid(), worker.pid],
        }
        part = arguments.fake_notes / f"{arguments.port}.part"
        part.write_text(json.dumps(note))
        part.rename(part.with_suffix(".json"))
    time.sleep(arguments.fake_delay)
    Handler.arguments = arguments
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
