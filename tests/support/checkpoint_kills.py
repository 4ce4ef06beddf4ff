"""Kills a process that writes checkpoints, at random moments: the worker of test_checkpoint.py.

python -m tests.support.checkpoint_kills MODEL RUN NUM_KILLS

Forks writers one after the other, kills each, and looks at what it left: all parts of the
checkpoints must be of the same step, and no step may be lost. Prints the last step, and how many kills
came while a folder was being written or removed.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from memagent.engines.local.loading import load
from memagent.rl.weights.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_weights,
    new_checkpoint,
    read_optimizer,
    read_state,
    write_optimizer,
    write_weights,
)

KEEP = 2


def save_checkpoint(
    run: Path, name: str, *, model: Any, tokenizer: Any, optimizer: Any, **settings: Any
) -> Path:
    """Write a checkpoint as a run of one process does."""
    with new_checkpoint(run, name, **settings) as part:
        write_weights(model, tokenizer, part)
        write_optimizer(optimizer, part)
    return run / "checkpoints" / name


def write(run: Path, loaded: Any, step: int) -> None:
    """A checkpoint that has the number of its step everywhere."""
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.fill_(step)
    save_checkpoint(
        run,
        f"step-{step:06}",
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        optimizer={"moments": torch.full((1000,), float(step))},
        state={"step": step},
        keep=KEEP,
    )


def write_for_ever(run: Path, loaded: Any, step: int, pipe: int) -> None:
    """Write one checkpoint after the other, and report each when it is written."""
    while True:
        step += 1
        write(run, loaded, step)
        os.write(pipe, step.to_bytes(4, "big"))


def killed(run: Path, loaded: Any, step: int, seconds: float) -> int:
    """Let a writer run for some time; the last step that it reported."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            write_for_ever(run, loaded, step, writing)
        finally:
            os._exit(1)  # never back into the parent's code
    os.close(writing)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the writer failed"
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read()
    return int.from_bytes(reported[-4:], "big") if reported else step


def checked(run: Path, loaded: Any) -> int:
    """The step of the newest checkpoint. All that are there must be whole."""
    for checkpoint in list_checkpoints(run):
        step = int(checkpoint.name.removeprefix("step-"))
        assert read_state(checkpoint) == {"step": step}
        assert torch.equal(
            read_optimizer(checkpoint, dict.fromkeys)["moments"], torch.full((1000,), float(step))
        )
        load_weights(loaded.model, checkpoint)
        assert all(bool((parameter == step).all()) for parameter in loaded.model.parameters())
    newest = latest_checkpoint(run)
    assert newest is not None
    load(str(newest / "model"))
    return int(newest.name.removeprefix("step-"))


def main(source: Path, run: Path, num_kills: int) -> None:
    torch.set_num_threads(1)
    loaded = load(str(source))
    write(run, loaded, 1)
    started = time.perf_counter()
    write(run, loaded, 2)
    seconds = time.perf_counter() - started
    step, num_hidden = 2, 0
    chance = random.Random(0)
    for _ in range(num_kills):
        reported = killed(run, loaded, step, chance.uniform(0, 3 * seconds))
        found = checked(run, loaded)
        assert found in (reported, reported + 1), "a checkpoint that was written is gone"
        seconds *= 1.3 if found == step else 0.8  # the machine may be slower than it was
        step = found
        num_hidden += any((run / "checkpoints").glob(".*"))
    write(run, loaded, step + 1)
    names = [path.name for path in list_checkpoints(run)]
    assert names == [f"step-{number:06}" for number in (step, step + 1)]
    assert len(list((run / "checkpoints").iterdir())) == KEEP, "something torn is left"
    print(json.dumps({"step": step, "num_hidden": num_hidden}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
