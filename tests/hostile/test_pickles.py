"""No pickle is ever read: files of others run no code."""

import ast
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.data.formats.files import read_examples
from memagent.documents.loaders import load
from memagent.engines.local.loading import load as load_model
from memagent.errors import MemagentError
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model

SOURCE = Path(__file__).parents[2] / "src" / "memagent"
READERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "joblib.load", "dill.load"),
    *("shelve.open", "marshal.load", "marshal.loads", "pandas.read_pickle", "yaml.load"),
}
"""Functions that may run code of a file."""


def called(tree: ast.AST) -> Iterator[str]:
    """Functions that a module calls or refers to, with the name of their module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            yield f"{node.arg}={ast.unparse(node.value)}"


@pytest.mark.parametrize(
    "code",
    ["import pickle\npickle.load(f)", "from torch import load", "np.load(f, allow_pickle=True)"],
)
def test_readers_of_pickles_are_recognised(code: str) -> None:
    assert set(called(ast.parse(code))) & {*READERS, "allow_pickle=True"}


def test_the_package_calls_no_reader_of_pickles() -> None:
    refused = {*READERS, "allow_pickle=True", "trust_remote_code=True"}
    found = {
        (path.name, name)
        for path in SOURCE.rglob("*.py")
        for name in called(ast.parse(path.read_text(encoding="utf-8")))
        if name in refused
    }
    assert found == {("processes.py", "pickle.loads")}, "from pipes to processes started here"


class Malicious:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


_unpickled: list[str] = []


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _unpickled.append(".".join(map(str, arguments)))


@pytest.fixture(scope="module", autouse=True)
def watched() -> None:
    sys.addaudithook(_on_event)


def refused_without_unpickling(mark: Path, read: Any) -> None:
    _unpickled.clear()
    with pytest.raises(MemagentError):
        read()
    assert not mark.exists()
    assert [name for name in _unpickled if name.startswith(("os", "posix"))] == []


def test_a_pickle_does_leave_its_mark(tmp_path: Path) -> None:
    _unpickled.clear()
    pickle.loads(pickle.dumps(Malicious(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()
    assert _unpickled == ["posix.mkdir"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_in_a_pickle_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.save({"weight": Malicious(tmp_path / "mark")}, folder / name)
    refused_without_unpickling(tmp_path / "mark", lambda: load_model(str(folder)))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter_in_a_pickle_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(model, tmp_path / "adapter")
    for weights in adapter.glob("*.safetensors"):
        weights.unlink()
    torch.save({"weight": Malicious(tmp_path / "mark")}, adapter / name)
    read = lambda: load_model(str(model), adapter=str(adapter))  # noqa: E731
    refused_without_unpickling(tmp_path / "mark", read)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.pkl"])
def test_a_dataset_in_a_pickle_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "mark")))
    refused_without_unpickling(tmp_path / "mark", lambda: list(read_examples(path)))
    if name == "a.pkl":
        refused_without_unpickling(tmp_path / "mark", lambda: load([path]))
