"""Processes that the package starts: modules that start any are listed with the tests that kill those at random moments."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "memagent"
KILLED_IN = {
    "data/build.py": ("integration/test_killed_workers.py",),
    "eval/items.py": ("integration/test_killed_workers.py",),
    "launcher.py": ("unit/engines/test_vllm.py", "unit/engines/test_llamacpp.py"),
    "processes.py": ("unit/test_processes.py",),
    "rl/agents/command.py": ("integration/test_agent_programs.py",),
    "rl/agents/offload.py": ("unit/rl/rollouts/test_drivers.py",),
    "tokens/templates.py": ("unit/tokens/test_templates.py",),
    "watchdog.py": ("unit/engines/test_vllm.py", "unit/engines/test_llamacpp.py"),
}
SHORT = {
    "cluster_workers.py": "names the pool that it stands for",
    "engines/vllm/servers.py": "questions to a Python and to the driver, within a time",
    "engines/store.py": "an installer, whose end is waited for",
}
STARTS = re.compile(r"\bPopen\(|create_subprocess|subprocess\.run\(|\bProcessPool\b|\.Process\(")
KILLS = re.compile(r"kill_after\(|\bkill\(")


def test_each_process_that_the_package_starts_is_killed_in_a_test() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if STARTS.search(path.read_text("utf-8"))
    }
    assert found == {*KILLED_IN, *SHORT}


def test_those_tests_kill_at_random_moments_and_more_often_with_the_hostile_inputs() -> None:
    hostile = (ROOT / "Makefile").read_text("utf-8").partition("LARGER :=")[2]
    for file in {file for files in KILLED_IN.values() for file in files}:
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert KILLS.search(text), file
        assert re.search(r"sized\(2, [24]0\)", text), file
        assert "random.Random(" in text, file
        assert Path(file).name.removeprefix("test_") in hostile, file
