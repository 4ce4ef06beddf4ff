"""Start a command that serves, ask for what it prints as its address, and stop it as Ctrl-C does.

python tests/support/served.py memagent view runs/

The exit code is the command's. It gets any free port.
"""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

WAIT_SECONDS = 60


def served(arguments: list[str]) -> int:
    """Run a command of memagent until it has answered once; its exit code."""
    program = Path(sys.executable).with_name("memagent")
    command = [str(program), *arguments, "--port", "0"]  # the last one counts
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            page = f"{address}/models" if address.endswith("/v1") else address
            with urllib.request.urlopen(page, timeout=WAIT_SECONDS) as response:
                assert response.status == 200
        finally:
            os.kill(process.pid, signal.SIGINT)
            code = process.wait(WAIT_SECONDS)
    return code


if __name__ == "__main__":
    sys.exit(served(sys.argv[2:]))
