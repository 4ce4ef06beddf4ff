"""A small program in the place of vLLM's server: it starts late, crashes or hangs on demand.

    install(folder, monkeypatch)     from then on `python -m vllm.entrypoints.openai.api_server` is this

It has vLLM's paths, key and reply fields, and a worker process of its own, as vLLM has. With
`--fake-notes FOLDER` it writes down what it was started with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
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
    for name in ("--port", "--tensor-parallel-size", "--max-model-len"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--fake-delay", type=float, default=0.0)
    parser.add_argument("--fake-crash", action="store_true")
    parser.add_argument("--fake-crash-on", metavar="GPUS", help="crash only there")
    parser.add_argument("--fake-stubborn", action="store_true", help="do not end when asked to")
    parser.add_argument("--fake-notes", type=Path)
    return parser.parse_args(argv)


class Handler(BaseHTTPRequestHandler):
    arguments: argparse.Namespace

    def do_GET(self) -> None:
        if self.path == "/health":
            self.send(200, {})
        elif self.is_allowed():
            model = {"id": self.arguments.served_model_name, "root": self.arguments.model}
            window = self.arguments.max_model_len or WINDOW
            self.send(200, {"data": [{**model, "max_model_len": window}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_allowed():
            self.send(200, reply(body, self.arguments.port))

    def is_allowed(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}":
            return True
        self.send(401, {"error": {"message": "Unauthorized"}})
        return False

    def send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *values: object) -> None:
        pass


def reply(body: dict[str, Any], port: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": f"port {port}"},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    whole: dict[str, Any] = {"choices": [choice], "usage": usage}
    if body.get("return_token_ids"):
        choice["token_ids"] = [7, 1]
        whole["prompt_token_ids"] = [3, 1, 4, 1]
    if body.get("logprobs"):
        entries = [{"token": "port", "logprob": -0.5}, {"token": "", "logprob": -0.25}]
        choice["logprobs"] = {"content": entries}
    return whole


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    is_there = os.environ.get("CUDA_VISIBLE_DEVICES", "") == arguments.fake_crash_on
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
