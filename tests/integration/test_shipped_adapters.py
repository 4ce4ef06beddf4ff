"""The adapters in the repository: complete, small files, and a config that names no machine."""

import json
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open

from memagent.engines import store

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = sorted(path.parent for path in store.ADAPTERS.glob("*/adapter_config.json"))
SPLIT = sorted(path.parent for path in ROOT.glob("adapters/*/adapter_config.json"))
ADAPTERS = [*PACKAGED, *SPLIT]
MAX_FILE_BYTES, MAX_BYTES, MAX_PACKAGED_BYTES = 16_000_000, 40_000_000, 10_000_000


@pytest.mark.parametrize("folder", PACKAGED, ids=lambda path: path.name)
def test_the_adapters_of_the_package_are_small(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_PACKAGED_BYTES
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("folder", SPLIT, ids=lambda path: path.name)
def test_an_adapter_is_complete_and_its_files_are_small(folder: Path) -> None:
    index = json.loads((folder / "adapter_model.safetensors.index.json").read_text())
    files = {path.name: path for path in folder.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files.keys()
    sizes = [path.stat().st_size for path in files.values()]
    assert max(sizes) < MAX_FILE_BYTES
    assert sum(sizes) < MAX_BYTES
    found = {}
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), name)
    assert found == index["weight_map"]


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_names_its_base_model_and_has_a_card(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    base = config["base_model_name_or_path"]
    assert base.count("/") == 1
    assert not base.startswith("/")
    card = (folder / "README.md").read_text()
    assert base in card
    for heading in ("## Use", "## Results", "## Data", "## Recipe", "## Limits"):
        assert heading in card


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda path: path.name)
def test_an_adapter_has_a_short_name_with_the_settings_of_its_card(folder: Path) -> None:
    assert store.shipped_adapter(folder.name) == folder
    card = (folder / "README.md").read_text()
    for name, value in store.reading_defaults(folder.name).items():
        shown = f"prompts `{value}`" if name == "prompts" else f"`{name}` {value}"
        assert shown in card


def test_packages_contain_only_adapters_within_the_package() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert targets["targets"]["wheel"]["packages"] == ["src/memagent"]
    included = targets["targets"]["sdist"]["include"]
    assert "adapters" not in included
    assert not any(pattern.startswith("*") for pattern in included), "it would match in all folders"
