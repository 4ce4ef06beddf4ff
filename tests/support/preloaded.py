"""Commands without their imports: each is forked from a process that has imported torch and its like.

    with preloaded(folder) as path:                                  # path holds `memagent` and `python`
        subprocess.run(["memagent", "ask", ...], env={"PATH": f"{path}:...", ...})

A command takes arguments, folder, environment and standard streams from the caller, ends with its exit
code, and is killed when the caller is:

    caller ── memagent (CLIENT) ──arguments, environment, streams──▶ server ──fork──▶ command
                      ◀───────────────────── exit code ─────────────────────────────────┘
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "torch",
    "torch._dynamo",
    "transformers.generation.configuration_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
    "openai",
    "memagent.cli.ask",
    "memagent.cli.data",
    "memagent.cli.eval",
    "memagent.cli.train",
    "memagent.engines.local.engine",
    "memagent.engines.openai",
    "memagent.eval.setup",
    "memagent.rl.trainer",
)
"""What most commands of the documentation import."""
CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({socket!r})
request = dict(program={program!r}, arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
body = json.dumps(request).encode()
socket.send_fds(link, [len(body).to_bytes(8, "little")], [0, 1, 2])
link.sendall(body)
os._exit(int(link.makefile().read() or 1))
"""


@contextmanager
def preloaded(folder: Path) -> Iterator[Path]:
    """A folder with the commands, while the server runs."""
    address = folder / "server"
    for program in ("memagent", "python"):
        script = CLIENT.format(python=sys.executable, socket=str(address), program=program)
        (folder / program).write_text(script)
        (folder / program).chmod(0o755)
    command = [sys.executable, "-W", "error", "-m", "tests.support.preloaded", str(address)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # read when its library is imported, so not by each command
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
    }
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder
    finally:
        server.kill()
        server.communicate()


def serve(address: str) -> None:
    """Fork a command for each connection."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # a collection would touch, and so copy, all of it in each command
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guards
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                break
            link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    guard(link)


def guard(link: socket.socket) -> None:
    """Fork the command, report how it ended, and kill it if the caller goes away."""
    head, streams, _, _ = socket.recv_fds(link, 8, 3)
    request = json.loads(link.makefile("rb").read(int.from_bytes(head, "little")))
    if (process := os.fork()) == 0:
        link.close()
        os._exit(code_of(request, streams))
    for stream in streams:
        os.close(stream)
    handle = os.pidfd_open(process)
    ready, _, _ = select.select([handle, link], [], [])
    if handle not in ready:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):
        link.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def code_of(request: dict[str, Any], streams: Sequence[int]) -> int:
    """Run the program to its end, as an interpreter would but for the seconds of taking torch apart."""
    code: Any = 0
    try:
        run(request, streams)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        return 1
    return int(code or 0)


def run(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Take over the caller's folder, environment and streams, and run the program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    if request["program"] == "memagent":
        from memagent.cli.main import main

        sys.argv = ["memagent", *arguments]
        main()
    else:
        program = arguments[arguments.index("-c") + 1]  # warnings are errors in any case
        sys.argv = ["-c"]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    serve(sys.argv[1])
