"""Work of minutes in seconds, for a disk whose operations fail: run on a folder, and run again to go on.

    python -m tests.support.disk_programs checkpoints MODEL FOLDER
    python -m tests.support.disk_programs gateway FOLDER

What is printed is acknowledged: `step N` is a checkpoint, `call` a call that leaves with what came before, and a
line of JSON an answer of the gateway.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memagent.errors import MemagentError
from memagent.types import Completion, Message, Sampling

NUM_STEPS = 3


def checkpoints(model: Path, folder: Path) -> None:
    """A checkpoint after each step, of which two are kept, and its metrics."""
    from memagent.engines.local.loading import load
    from memagent.rl.weights.checkpoint import latest_checkpoint, read_state
    from memagent.tracking import Tracker
    from tests.support.checkpoint_kills import write

    loaded = load(str(model))
    newest = latest_checkpoint(folder)
    first = 0 if newest is None else read_state(newest)["step"]
    options: dict[str, Any] = {"config": {}, "name": "tiny", "trackers": []}
    with Tracker(folder, **options, num_lines=first) as tracker:
        for step in range(first + 1, NUM_STEPS + 1):
            tracker.log(step, {"reward": step / 8})
            write(folder, loaded, step)
            say(f"step {step}")


def gateway(folder: Path) -> None:
    """A file is sent, if it is not there, and a question asked about it."""
    from tests.support.gateways import QUESTION, PatientEngine, novel, serving_gateway

    class Engine(PatientEngine):
        async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
            say("call")
            return await super().complete(messages, sampling)

    text = novel(60)
    with serving_gateway(folder, Engine()) as served:
        listed = answered(served.send("GET", "/v1/files"))
        names = [one["filename"] for one in listed.get("data", [])]
        if "novel.txt" not in names:
            sent = {"file": ("novel.txt", text.encode())}
            answered(served.send("POST", "/v1/files", files=sent, data={"purpose": "user_data"}))
        messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
        body = {"model": "memagent", "messages": messages}
        answered(served.send("POST", "/v1/chat/completions", json=body))


def answered(response: Any) -> dict[str, Any]:
    """The body of a response, of which the part that matters is printed."""
    body: dict[str, Any] = response.json()
    if response.status_code != 200:
        assert 400 <= response.status_code < 600
        say(json.dumps({"status": response.status_code, "error": body["error"]["message"]}))
    elif "choices" in body:
        say(json.dumps({"answer": body["choices"][0]["message"]["content"]}))
    elif "filename" in body:
        say(json.dumps({"file": body["filename"]}))
    return body


def say(line: str) -> None:
    """Print a line at once."""
    os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
    except MemagentError as error:
        sys.exit(f"memagent: {error}")
