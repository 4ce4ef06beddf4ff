"""Files of runs have one door. Modules that open files are listed here with what they open, and no run is in the list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "memagent"
DOOR = "run_files.py"
OTHERS = {
    "agent/prompts.py": "prompts that are shipped or named",
    "agent/work.py": "the record of speeds in the state folder",
    "agent/reader.py": "a file of questions",
    "cli/demo.py": "the text of the demo",
    "cli/main.py": "/dev/null",
    "config.py": "configs and suites",
    "data/build.py": "a dataset that is being built",
    "data/formats/files.py": "datasets",
    "data/formats/json_stream.py": "datasets",
    "data/inspection.py": "the manifest of a dataset",
    "data/sources/cache.py": "published files",
    "data/tasks/hotpotqa_store.py": "paragraphs in the cache",
    "documents/loaders.py": "texts to read",
    "documents/sample.py": "words of the sample",
    "documents/tree.py": ".gitignore",
    "engines/llamacpp/adapters.py": "models",
    "engines/llamacpp/engine.py": "cores in /sys",
    "engines/local/embedding.py": "models",
    "engines/local/gguf_files.py": "models",
    "gguf_format.py": "models",
    "engines/local/loading.py": "models",
    "engines/scripted.py": "scripted replies",
    "engines/store.py": "models",
    "launcher.py": "logs of servers",
    "engines/vllm/servers.py": "models",
    "watchdog.py": "/proc",
    "eval/items.py": "datasets",
    "eval/methods.py": "the code of a method",
    "eval/prompts.py": "prompts that are shipped",
    "eval/report/anchors/__init__.py": "results that are shipped or named",
    "eval/report/report.py": "the template of the page, and a report in a folder that the user names",
    "files.py": "new files, before they have their names",
    "foreign.py": "tokenizers",
    "rl/distributed/opening.py": "models",
    "rl/distributed/vllm_replica.py": "models",
    "rl/sizes.py": "models",
    "rl/warmstart/trace_files.py": "a dataset that is being built",
    "rl/weights/checkpoint.py": "a new checkpoint before it has its name, and models",
    "rl/weights/sync.py": "an adapter that was just written",
    "serve/keys.py": "the file of keys",
    "tokens/control.py": "tokenizers",
    "tokens/tokenizers.py": "tokenizers",
    "viewer/app.py": "the page",
}
"""Modules that open files which are in no run directory."""
METHODS = ("read_text", "write_text", "read_bytes", "write_bytes", "touch")
FUNCTIONS = ("os.open", "os.fdopen", "os.truncate", "io.open", "shutil.copy", "shutil.copyfile")
_mode = re.compile(r"[rwxa][bt]?\+?")


def opened(source: str) -> Iterator[str]:
    """The calls in a module that open a file by its path, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            has_mode = any(
                isinstance(value, ast.Constant) and _mode.fullmatch(str(value.value))
                for value in [*node.args[:1], *(word.value for word in node.keywords)]
            )
            if name in ("open", *FUNCTIONS) or last in METHODS or (last == "open" and has_mode):
                yield f"{node.lineno}: {name}"


def test_only_the_door_opens_files_of_a_run() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): calls
        for path in PACKAGE.rglob("*.py")
        if (calls := [*opened(path.read_text(encoding="utf-8"))])
    }
    strangers = {name: calls for name, calls in found.items() if name not in {DOOR, *OTHERS}}
    assert strangers == {}, "open files of runs with memagent.run_files, or say here what these are"
    assert {DOOR, *OTHERS} - set(found) == set(), "these open no files: take them out"
