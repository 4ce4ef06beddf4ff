"""The viewer over run directories that somebody has damaged: every answer is JSON or an error of one line."""

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from memagent.errors import MemagentError
from memagent.run_files import sealed
from memagent.viewer.api import ViewerApi
from memagent.viewer.app import as_json
from memagent.viewer.export import export_page
from memagent.viewer.library import Library
from memagent.viewer.traces import Json
from tests.hostile.json_damage import damaged_bytes, damaged_json
from tests.support.viewer_runs import make_evaluation, make_reading, make_training

NUM = 3000 if os.environ.get("MEMAGENT_TEST_HOSTILE") else 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_reading(folder / "ask", num_sections=3)
    make_evaluation(folder / "eval", num=1)
    make_training(folder / "train", num_steps=5)
    return folder


def damage(run: Path, rng: random.Random) -> None:
    """Change one line of one file; half of the lines get a checksum that fits."""
    path = rng.choice([each for each in sorted(run.rglob("*.json*")) if each.stat().st_size])
    if path.suffix == ".json":
        path.write_bytes(damaged_json(path.read_text(), rng))
        return
    lines = path.read_bytes().splitlines()
    place = rng.randrange(len(lines))
    changed = damaged_json(lines[place].decode(), rng)
    if rng.random() < 0.5 and changed.endswith(b"}"):
        changed = sealed(changed)
    lines[place] = changed
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(damaged_bytes(data, rng) if rng.random() < 0.1 else data)


def look_at_everything(folder: Path, *, secret: str = "\0") -> list[str]:
    """Ask the viewer for all that it shows; whatever is no answer and no error for users, or has the secret."""
    api = ViewerApi(Library([folder]))
    wrong: list[str] = []

    def tried(ask: Callable[..., Json], *arguments: object) -> Json:
        try:
            found = ask(*arguments)
            if secret in as_json(found).body.decode():
                wrong.append(f"{arguments} shows {secret}")
        except MemagentError as error:
            if "\n" in str(error):
                wrong.append(repr(error))
            return {}
        except Exception as error:
            wrong.append(repr(error))
            return {}
        return found

    for run in tried(api.runs).get("runs", []):
        name = run["id"]
        for ask in (api.version, api.cells, api.metrics):
            tried(ask, name)
        tried(api.compare, name, name)
        items = tried(partial(api.items, text="a"), name).get("items", [])
        keys = ["q0", "v0.0", "v0.1", *(f"i{item['number']}" for item in items[:3])]
        for step in tried(api.run, name).get("samples", []):
            tried(api.rollouts, name, step)
            keys += [f"s{step}.0", f"s{step}.1"]
        for key in keys:
            for number in range(len(tried(api.trace, name, key).get("steps", []))):
                for ask in (api.step, api.prompt, api.section):
                    tried(ask, name, key, number)
    tried(lambda: {"html": export_page(api).html})
    return wrong


def test_a_whole_run_is_shown_without_an_error(whole: Path) -> None:
    assert look_at_everything(whole) == []


@pytest.mark.parametrize("kind", ["ask", "eval", "train"])
def test_a_damaged_run_gives_answers_or_errors_of_a_line(
    whole: Path, tmp_path: Path, kind: str
) -> None:
    for seed in range(NUM // 3):
        run = tmp_path / kind
        shutil.copytree(whole / kind, run)
        damage(run, random.Random(f"{kind}-{seed}"))
        assert look_at_everything(tmp_path) == [], f"seed {seed}"
        shutil.rmtree(run)
