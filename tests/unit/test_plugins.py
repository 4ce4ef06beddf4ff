"""Functions in files of the user: found, checked, sent to other processes, blamed by line."""

import pickle
import sys
from pathlib import Path

import pytest

from memagent.errors import ConfigError
from memagent.plugins import error_line, is_file_spec, load_file, load_function, portable

SOURCE = """
from dataclasses import dataclass
from helper_beside import DOUBLE

@dataclass
class Number:
    value: int

def score(task, outcome, scale=1):
    return task * DOUBLE + outcome * scale

def explode(task, outcome):
    raise ValueError("bad\\n  luck")

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper_beside", raising=False)
    (tmp_path / "helper_beside.py").write_text("DOUBLE = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def loaded(spec: str) -> object:
    return load_function(spec, what="reward", parameters=("task", "outcome"))


def test_a_function_is_found_and_imports_what_lies_beside_it(file: Path) -> None:
    score = load_function(f"{file}:score", what="reward", parameters=("task", "outcome"))
    assert score(3, 4) == 10


def test_a_file_is_run_once(file: Path) -> None:
    assert load_file(file, "reward") is load_file(file, "reward")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("scor", r"mine\.py has no scor; did you mean score\?"),
        ("xyz", r"mine\.py has no xyz; it has score, explode"),
        ("constant", r"constant is no function; the reward is def constant\(task, outcome\)"),
        ("Number", r"is no function"),
    ],
)
def test_a_missing_function_is_a_one_line_error(file: Path, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(f"{file}:{function}")


def test_other_parameters_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"score takes \(task, outcome, scale=1\); the agent is"):
        load_function(f"{file}:score", what="agent", parameters=("a", "b", "c", "d"))


@pytest.mark.parametrize("spec", ["mine.py", "mine:score", "mine.py:", "score"])
def test_a_name_of_another_form_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"name the reward as path\.py:function"):
        loaded(spec)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*none\.py with the reward"):
        loaded(f"{tmp_path / 'none.py'}:score")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def f(:", "SyntaxError"),
        ("\n\nraise SystemExit(3)", r"SystemExit: 3 \(broken\.py, line 3\)"),
    ],
)
def test_a_file_that_does_not_run_is_reported_with_its_line(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    for _ in range(2):  # the second time too: a broken module is not kept
        with pytest.raises(ConfigError, match=rf"broken\.py does not run: {message}"):
            loaded(f"{tmp_path / 'broken.py'}:f")


def test_an_error_names_the_last_line_of_the_user(file: Path) -> None:
    explode = load_function(f"{file}:explode", what="reward", parameters=("task", "outcome"))
    with pytest.raises(ValueError, match="bad") as caught:
        explode(1, 2)
    assert error_line(caught.value) == "ValueError: bad luck (mine.py, line 13)"


def test_a_portable_function_survives_pickling(file: Path) -> None:
    score = load_function(f"{file}:score", what="reward", parameters=("task", "outcome"))
    again = pickle.loads(pickle.dumps(portable(score)))
    assert again(3, 4, scale=10) == 46
    assert portable(len) is len, "found by every process anyway"


def test_a_file_spec_is_recognized_by_its_ending() -> None:
    assert is_file_spec("my_reward.py:score")
    assert not is_file_spec("strict")
