"""Configs that come with the package are found by name, from any folder."""

import tomllib
from pathlib import Path

import pytest

from memagent import config as shipped
from memagent.config import config_names, configs_folder, find_config
from memagent.data.recipes import BuildRequest, read_recipe
from memagent.data.tasks.registry import TASKS
from memagent.errors import ConfigError
from memagent.eval.suites import read_suite
from memagent.rl.settings import read_config, read_warm_start

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_configs_are_read_by_name_in_an_empty_folder() -> None:
    assert read_config("tiny_cpu").steps == 60
    assert read_suite("smoke").tasks
    assert read_recipe("smoke").datasets
    assert read_warm_start("tiny_cpu").steps == 0
    assert read_config("reader_1.5b/rl").steps > 0


def test_every_config_of_the_repository_has_a_name() -> None:
    for kind in ("train", "eval", "data"):
        folder = ROOT / "configs" / kind
        expected = {
            path.relative_to(folder).as_posix().removesuffix(".toml")
            for path in folder.rglob("*.toml")
            if not path.name.startswith("prompts")
        }
        assert set(config_names(kind)) == expected
        assert expected


def test_no_recipe_is_called_like_a_task() -> None:
    assert not set(config_names("data")) & TASKS.keys()


def test_a_recipe_by_name_is_built_like_its_file() -> None:
    by_name, by_path = (
        BuildRequest(what=what, out=Path("out"))
        for what in ("smoke", str(ROOT / "configs" / "data" / "smoke.toml"))
    )
    assert by_name.is_recipe
    assert by_name.jobs() == by_path.jobs()


def test_a_file_takes_precedence_over_a_name(tmp_path: Path) -> None:
    (tmp_path / "tiny_cpu").write_text("")
    assert find_config("train", "tiny_cpu") == Path("tiny_cpu")
    (tmp_path / "smoke").mkdir()
    assert find_config("eval", "smoke") == configs_folder() / "eval" / "smoke.toml"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny_cp", "there is no file tiny_cp, and no config called so .* did you mean tiny_cpu?"),
        ("zzz", "known: .*tiny_calculator, tiny_cpu"),
        ("mine.toml", "^there is no config mine.toml$"),
        ("configs/train/tiny_cpu.toml", "`tiny_cpu` names the one that comes with memagent"),
        ("prompts_tiny", "there is no file prompts_tiny"),
    ],
)
def test_a_name_that_is_unknown_gets_a_hint(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(name)


def test_prompts_beside_a_config_are_found_from_any_folder(tmp_path: Path) -> None:
    prompts = read_config("tiny_cpu").agent.settings["prompts"]
    assert prompts == str(ROOT / "configs" / "train" / "prompts_tiny.toml")
    (tmp_path / "mine.toml").write_text("")
    changed = read_config("tiny_cpu", changes=["agent.settings.prompts=mine.toml"])
    assert changed.agent.settings["prompts"] == "mine.toml"


def test_the_wheel_holds_the_configs_where_they_are_looked_for() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    package = Path(shipped.__file__).parent
    assert (package.parent / included["configs"]) == shipped.PACKAGED
    assert "configs" in build["targets"]["sdist"]["include"]


def test_an_installed_package_has_its_own_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "memagent" / "configs"
    (packaged / "train").mkdir(parents=True)
    (packaged / "train" / "only_here.toml").write_text("")
    monkeypatch.setattr(shipped, "PACKAGED", packaged)
    assert config_names("train") == ["only_here"]
    assert find_config("train", "only_here") == packaged / "train" / "only_here.toml"
