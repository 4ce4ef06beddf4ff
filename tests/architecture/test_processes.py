"""Processes that the package starts: modules that start any are listed with the tests that kill those."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "memagent"
KILLED_IN = {
    "data/build.py": ("integration/test_killed_workers.py", "integration/test_data_build.py"),
    "eval/items.py": ("integration/test_killed_workers.py", "integration/test_eval.py"),
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
    "engines/wheels.py": "an installer, whose end is waited for",
}
STARTS = re.compile(r"\bPopen\(|create_subprocess|subprocess\.run\(|\bProcessPool\b|\.Process\(")
KILLS = re.compile(r"SIGKILL|\.kill\(|\bkill\(|os\.kill")


def test_each_process_that_the_package_starts_is_killed_in_a_test() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if STARTS.search(path.read_text("utf-8"))
    }
    assert found == {*KILLED_IN, *SHORT}


def test_those_tests_kill() -> None:
    for files in KILLED_IN.values():
        for file in files:
            assert KILLS.search((ROOT / "tests" / file).read_text("utf-8")), file
