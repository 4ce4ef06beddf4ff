"""Commands without their imports: each is forked from a process that has imported torch and its like.

    with preloaded(folder) as path:                                  # path holds `memagent` and `python`
        subprocess.run(["memagent", "ask", ...], env={"PATH": f"{path}:...", ...})

A command takes arguments, folder, environment, standard streams and the limit on file sizes from the caller,
gets its signals, ends with its exit code, and is killed when the caller is:

    caller ── memagent (CLIENT) ──arguments, environment, streams, signals──▶ server ──fork──▶ command
                      ◀────────────────────────── exit code ─────────────────────────────────────┘

The fixture `programs` starts the server once for all tests of a process. A file of tests that uses it starts at
least one command as users do, with all its imports.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
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
    "torch.utils.tensorboard",
    "transformers.generation.configuration_utils",
    "transformers.models.auto.configuration_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
    "openai",
    "matplotlib.figure",
    "pypdf",
    "memagent.cli.ask",
    "memagent.cli.data",
    "memagent.cli.eval",
    "memagent.cli.train",
    "memagent.engines.local.engine",
    "memagent.engines.openai",
    "memagent.eval.setup",
    "memagent.rl.trainer",
    "memagent.serve.reading.app",
    "memagent.serve.http",
)
"""What most commands of the documentation import."""
CLIENT = """\
#!{python} -IS
import json, os, resource, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({socket!r})
request = dict(program={program!r}, arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
request["max_file_bytes"] = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
body = json.dumps(request).encode()
socket.send_fds(link, [len(body).to_bytes(8, "little")], [0, 1, 2])
link.sendall(body)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: link.sendall(bytes([number])))
os._exit(int(link.makefile().read() or 1))
"""


@contextmanager
def preloaded(folder: Path, **variables: str) -> Iterator[Path]:
    """A folder with the commands, while the server runs; `variables` are in its environment."""
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
        **variables,
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
    signal.signal(signal.SIGCHLD, reap)
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


def reap(*_: object) -> None:
    """Wait for the guards that have ended, so that their time is counted as the caller's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def guard(link: socket.socket) -> None:
    """Fork the command, pass signals on, report how it ended, and kill it if the caller goes away."""
    head, streams, _, _ = socket.recv_fds(link, 8, 3)
    request = json.loads(link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
    if (process := os.fork()) == 0:
        link.close()
        os._exit(code_of(request, streams))
    for stream in streams:
        os.close(stream)
    handle = os.pidfd_open(process)
    while handle not in select.select([handle, link], [], [])[0]:
        for number in link.recv(16) or [signal.SIGKILL]:
            os.kill(process, number)
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
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (request["max_file_bytes"], hard))
    arguments = request["arguments"]
    if request["program"] == "memagent":
        from memagent.cli.main import main

        sys.argv = ["memagent", *arguments]
        main()
    else:
        run_python(arguments)


def run_python(arguments: Sequence[str]) -> None:
    """`-m MODULE ARGUMENT...` or `-c PROGRAM`; warnings are errors in any case."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        program = arguments[arguments.index("-c") + 1]
        sys.argv = ["-c"]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    serve(sys.argv[1])
