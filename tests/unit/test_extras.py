"""Libraries that load jax or TensorFlow where they are installed do not load them for us."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memagent.plugins import hidden

NAMES = ("jax", "jaxlib", "flax", "tensorflow")
FAKE = """
import os
with open(os.environ["IMPORTED"], "a") as log:
    log.write(__name__ + " imported\\n")
"""
LAX = """
def top_k(*arguments):
    with open({path!r}, "a") as log:
        log.write("top_k called\\n")
    raise RuntimeError("it takes 75 % of a GPU")
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Packages by the names of jax and TensorFlow, and a file in which they write that they are used."""
    for name in NAMES:
        package = tmp_path / "packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"__version__ = '9.0'\n{FAKE}")
        facts = tmp_path / "packages" / f"{name}-9.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
    path = str(tmp_path / "log")
    (tmp_path / "packages" / "jax" / "lax.py").write_text(LAX.format(path=path))
    return tmp_path / "packages"


def run(installed: Path, script: str) -> list[str]:
    """What was used of the packages while a script ran."""
    log = installed.parent / "log"
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"IMPORTED": str(log), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(installed.parent)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines() if log.exists() else []


RANK = """
from memagent.documents.ranking import rank_by_words
found = rank_by_words(["It rained.", "The mill was sold.", "Snow."], "Who sold the mill?", what="it")
assert [one.number for one in found] == [1, 0, 2], found
assert found[0].score > 0 == found[1].score
"""


def test_our_libraries_load_neither_jax_nor_tensorflow(installed: Path) -> None:
    script = f"""{RANK}
import sys
from pathlib import Path
import memagent.engines.local.engine, memagent.engines.local.embedding, peft
from memagent.tracking import Tracker
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast
folder = Path(sys.argv[1])
with Tracker(folder / "run", config={{}}, name="run") as tracker:
    tracker.log(1, {{"loss": 0.5}})
assert list((folder / "run").rglob("events.out.tfevents.*"))
"""
    assert run(installed, script) == []


def test_jax_of_the_user_is_left_as_it_was(installed: Path) -> None:
    script = f"""
import sys
import jax.lax
before = {{name: module for name, module in sys.modules.items() if name.startswith("jax")}}
{RANK}
assert "bm25s" in sys.modules
after = {{name: module for name, module in sys.modules.items() if name.startswith("jax")}}
assert after == before and jax is sys.modules["jax"] and len(after) == 2
"""
    assert run(installed, script) == ["jax imported"]


def test_jax_can_be_imported_afterwards(installed: Path) -> None:
    script = f"{RANK}\nimport sys\nassert 'jax' not in sys.modules\nimport jax.lax\n"
    assert run(installed, script) == ["jax imported"]


def test_a_hidden_library_is_not_found_and_comes_back_after_an_error() -> None:
    import json.decoder

    def look() -> None:
        with hidden("json"), hidden("json"):
            assert "json.decoder" not in sys.modules
            __import__("json.decoder")

    with pytest.raises(ImportError):
        look()
    assert sys.modules["json.decoder"] is json.decoder
