"""`memagent data build` as a process: recipes, killing and resuming, full disks, refusals."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from memagent.data.formats.files import read_examples
from memagent.data.tasks.registry import rebuild
from tests.integration.conftest import Cli, Outcome, finish, num_lines, on_a_small_disk, wait_until
from tests.support.hotpot import HotpotFiles, fillers, item, write_hotpot
from tests.support.processes import children, is_running
from tests.support.sizes import sized

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "configs" / "data" / "smoke.toml"
NUM = sized(400, 2000)
"""More than are built before all kills have arrived, on a busy machine too."""


@pytest.fixture
def files(tmp_path: Path) -> HotpotFiles:
    dev = [item(f"d{n}") for n in range(NUM)]
    return write_hotpot(tmp_path / "sources", dev=dev, paragraphs=fillers(400))


def arguments(files: HotpotFiles, out: Path, num: int, processes: int = 2) -> list[str | Path]:
    return [
        *("data", "build", "hotpotqa", "--tokens", "60000", "--num", str(num), "--seed", "7"),
        *("--tokenizer", "bytes", "--source", files.dev.parent, "--out", out, "--no-figure"),
        *("--processes", str(processes)),
    ]


def test_a_killed_build_resumes_and_ends_with_the_same_bytes(
    cli: Cli, files: HotpotFiles, tmp_path: Path
) -> None:
    out, straight = tmp_path / "killed.jsonl", tmp_path / "straight.jsonl"
    part = tmp_path / "killed.jsonl.part"
    num_kills = sized(2, 20)
    workers: list[int] = []
    for _ in range(num_kills):
        least = num_lines(part) + 5
        with cli.started(*arguments(files, out, NUM)) as process:
            wait_until(lambda least=least: num_lines(part) >= least)
            workers += children(process.pid)
            finish(process, number=signal.SIGKILL)
    assert not out.exists()
    assert 5 * num_kills <= num_lines(part) < NUM
    if Path("/proc/self/task").exists():
        assert len(workers) >= 4
        wait_until(lambda: not any(map(is_running, workers)))
    done = cli(*arguments(files, out, NUM))
    assert done.code == 0, done.stderr
    assert "resuming after" in done.stderr
    assert cli(*arguments(files, straight, NUM, processes=1)).code == 0
    assert out.read_bytes() == straight.read_bytes()
    assert not part.exists()


def test_a_full_disk_is_reported_and_the_build_resumes_later(
    cli: Cli, files: HotpotFiles, tmp_path: Path
) -> None:
    out = tmp_path / "full.jsonl"
    assert cli(*arguments(files, tmp_path / "first.jsonl", 1)).code == 0  # fills the cache
    with cli.started(*arguments(files, out, 20, processes=1), via=on_a_small_disk(400)) as process:
        code, _, stderr = finish(process)
    assert code == 2
    assert stderr.splitlines()[-1] == (
        f"memagent: cannot write {out}: File too large; free some space and run it again"
    )
    num_kept = num_lines(tmp_path / "full.jsonl.part") - 1  # the first says what is built
    assert 1 <= num_kept < 20
    done = cli(*arguments(files, out, 20, processes=1))
    assert f"resuming after {num_kept} examples" in done.stderr
    straight = tmp_path / "straight.jsonl"
    cli(*arguments(files, straight, 20, processes=1))
    assert out.read_bytes() == straight.read_bytes()


def test_the_smoke_recipe_is_built_once(here: Callable[..., Outcome], tmp_path: Path) -> None:
    done = here("data", "build", SMOKE, "--out", tmp_path, "--processes", "1", "--no-figure")
    assert done.code == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    assert len(files) == 5
    for path in files:
        manifest = json.loads(Path(f"{path}.manifest.json").read_text())
        examples = list(read_examples(path))
        assert manifest["num_examples"] == len(examples)
        target = manifest["settings"]["tokens"]
        assert all(0.98 * target <= (one.num_tokens or 0) <= target for one in examples)
        assert all(len(rebuild(one).text().encode()) == one.num_tokens for one in examples)
    long = tmp_path / "ruler-niah_single_1-200000.jsonl"
    assert long.stat().st_size < 5000
    before = {path: os.stat(path).st_mtime_ns for path in files}
    again = here("data", "build", SMOKE, "--out", tmp_path, "--processes", "1", "--no-figure")
    assert again.code == 0
    assert again.stderr.count("exists and is complete") == 5
    assert {path: os.stat(path).st_mtime_ns for path in files} == before


def test_a_dry_run_says_what_would_be_built(here: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "data" / "hotpotqa_series.toml"
    done = here(
        *("data", "build", recipe, "--out", tmp_path, "--num", "16", "--dry-run"),
        *("--set", "datasets.0.docs=[50, 100]", "--source", "hotpotqa-dev=mine.json"),
    )
    assert done.code == 0
    assert done.stdout.splitlines() == [
        f"{tmp_path}/hotpotqa-dev-{docs}-docs.jsonl: 16 x hotpotqa, "
        f"seed=7, dev=mine.json, split=dev, docs={docs}"
        for docs in (50, 100)
    ]
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vt"], "there is no task or recipe 'vt'; did you mean ruler/vt?"),
        (["smok"], "there is no task or recipe 'smok'; did you mean smoke?"),
        (
            ["hotpot", "--num", "3", "--out", "x.jsonl"],
            "there is no task or recipe 'hotpot'; did you mean",
        ),
        (["hotpotqa", "--out", "x.jsonl"], "give --num: how many examples to build"),
        (["hotpotqa", "--num", "3"], "give --out: the file to write, such as dev.jsonl"),
        (["none.toml"], "there is no recipe none.toml"),
        ([str(SMOKE), "--docs", "5"], "--docs is for a single task; change a recipe with --set"),
        (["hotpotqa", "--num", "3", "--out", "x.jsonl"], "give the length of the text as docs=200"),
    ],
)
def test_a_wrong_call_is_one_line(
    here: Callable[..., Outcome], words: list[str], message: str
) -> None:
    done = here("data", "build", *words)
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("memagent: ")
    assert message in line
