"""Below the command line nobody knows options: messages name settings, in backticks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "memagent"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "cli"
)
OF_OTHER_PROGRAMS: dict[str, tuple[str, ...]] = {
    "cluster.py": ("--object-store-memory",),
    "config.py": ("--max-model-len", "--dtype"),
    "documents/formats/pdf.py": ("--decrypt", "--password"),
    "engines/vllm/servers.py": (
        *("--model", "--served-model-name", "--host", "--port", "--api-key", "--logprobs-mode"),
        *("--tensor-parallel-size", "--data-parallel-size", "--enable-prompt-tokens-details"),
        *("--hf-overrides", "--query-gpu", "--format", "--middleware"),
    ),
    "engines/store.py": (
        *("--no-deps", "--no-cache-dir", "--quiet", "--disable-pip-version-check"),
        *("--only-binary", "--dest"),
    ),
    "engines/yarn.py": ("--hf-overrides", "--max-model-len"),
    "rl/distributed/opening.py": ("--enable-sleep-mode",),
    "rl/distributed/vllm_replica.py": (
        *("--enable-lora", "--max-lora-rank", "--max-loras"),
        *("--weight-transfer-config",),
    ),
    "rl/update/agreement.py": ("--generation-config", "--logprobs-mode"),
    "rl/weights/models.py": ("--generation-config",),
    "rl/weights/sync.py": ("--enable-lora", "--max-lora-rank"),
}
"""Options of vLLM, pip, qpdf and nvidia-smi, by the module that needs them."""

_flag = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def flags(source: str) -> Iterator[tuple[int, str]]:
    """Options in the strings of a module, with their lines; lines that call a command are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                if not line.strip().startswith("memagent "):
                    yield from ((node.lineno + offset, flag) for flag in _flag.findall(line))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_message_names_an_option_of_the_command_line(path: Path) -> None:
    allowed = OF_OTHER_PROGRAMS.get(str(path.relative_to(PACKAGE)), ())
    found = [(line, flag) for line, flag in flags(path.read_text()) if flag not in allowed]
    assert not found, f"write a setting as `name` or `name=value`: {found}"


def test_every_exception_is_needed() -> None:
    for name, allowed in OF_OTHER_PROGRAMS.items():
        used = {flag for _, flag in flags((PACKAGE / name).read_text())}
        assert set(allowed) <= used, name
