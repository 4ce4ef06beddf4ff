"""Recipes: every one we ship can be read, and what they expand to."""

from pathlib import Path
from typing import Any

import pytest

from memagent.config import with_override
from memagent.data.choices import SOURCES, SOURCES_OF, named_sources, source_settings
from memagent.data.recipes import BuildRequest, build_datasets, read_recipe
from memagent.data.tasks.registry import TASKS, open_task
from memagent.errors import ConfigError, DataError, MemagentError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs" / "data").glob("*.toml"))


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


SMALL = """\
seed = 3
tokenizer = "bytes"
[[datasets]]
tasks = ["hotpotqa", "ruler/qa_2"]
num = 5
tokens = [1000, 2000]
settings = { seed = 4 }
[[datasets]]
tasks = ["hotpotqa"]
num = 6
docs = [50]
file = "train-{length}-{seed}.parquet"
store = "origin"
settings = { split = "train" }
"""


# --- what we ship ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_can_be_read_and_says_how_to_use_it(path: Path) -> None:
    recipe = read_recipe(path)
    jobs = recipe.jobs(Path("out"))
    assert path.read_text().startswith(f"# memagent data build {path.stem} ")
    assert len({job.out for job in jobs}) == len(jobs)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_gives_only_settings_that_its_tasks_know(
    path: Path, tmp_path: Path
) -> None:
    essays = tmp_path / "essays"
    essays.mkdir()
    (essays / "one.txt").write_text("It rained. Then it stopped. Nobody minded.")
    gone = [f"{name}={tmp_path / 'gone'}" for name in SOURCES if name != "essays"]
    for job in read_recipe(path, changes=["tokenizer=bytes"]).jobs(
        Path("out"), sources=[*gone, f"essays={essays}"]
    ):
        # settings are read first, then the sources
        assert refusal(job.task, job.settings) in ("", f"{tmp_path / 'gone'} does not exist")


def refusal(task: str, settings: dict[str, Any]) -> str:
    """Why a task cannot be opened, as far as the first semicolon."""
    try:
        open_task(task, settings)
    except DataError as error:
        return str(error).partition(";")[0]
    return ""


def test_the_series_is_the_papers() -> None:
    jobs = read_recipe(ROOT / "configs/data/hotpotqa_series.toml").jobs(Path())
    assert [job.settings["docs"] for job in jobs] == [50 * 2**n for n in range(10)]
    assert {(job.num, job.settings["split"], job.settings["seed"]) for job in jobs} == {
        (128, "dev", 7)
    }
    (train,) = read_recipe(ROOT / "configs/data/hotpotqa_train.toml").jobs(Path())
    assert (train.num, train.settings["docs"], train.settings["split"]) == (32768, 200, "train")


@pytest.mark.parametrize("family", ["ruler", "beyond"])
def test_the_recipe_of_a_family_has_all_its_tasks(family: str) -> None:
    jobs = read_recipe(ROOT / f"configs/data/{family}.toml").jobs(Path())
    assert {job.task for job in jobs} == {task for task in TASKS if task.startswith(f"{family}/")}
    assert len(jobs) % len({job.task for job in jobs}) == 0


# --- expanding ------------------------------------------------------------------------------------


def test_a_recipe_expands_to_tasks_and_lengths(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, SMALL))
    jobs = recipe.jobs(Path("out"), sources=["hotpotqa-dev=d.json", "essays=books"])
    assert [str(job.out) for job in jobs] == [
        "out/hotpotqa-1000.jsonl",
        "out/hotpotqa-2000.jsonl",
        "out/ruler-qa_2-1000.jsonl",
        "out/ruler-qa_2-2000.jsonl",
        "out/train-50-docs-3.parquet",
    ]
    assert jobs[0].settings == {"seed": 4, "tokenizer": "bytes", "dev": "d.json", "tokens": 1000}
    assert jobs[3].settings == {
        "seed": 4,
        "tokenizer": "bytes",
        "questions": "d.json",
        "tokens": 2000,
    }
    assert (jobs[4].store, jobs[4].num, jobs[4].settings["split"]) == ("origin", 6, "train")
    assert [job.store for job in jobs[:4]] == ["auto"] * 4


def test_changes_are_put_into_a_recipe(tmp_path: Path) -> None:
    changes = ["datasets.0.tokens=[77]", "datasets.1.settings.split=dev", "store=text"]
    jobs = read_recipe(written(tmp_path, SMALL), changes=changes).jobs(Path())
    assert [job.settings.get("tokens") for job in jobs] == [77, 77, None]
    assert jobs[2].settings["split"] == "dev"
    assert [job.store for job in jobs] == ["text", "text", "origin"]


def test_an_override_leaves_the_values_it_was_applied_to() -> None:
    values: dict[str, Any] = {"a": [{"b": 1}, {"b": 2}]}
    assert with_override(values, "a.1.b=true") == {"a": [{"b": 1}, {"b": True}]}
    assert with_override(values, "a.1.c=two words") == {"a": [{"b": 1}, {"b": 2, "c": "two words"}]}
    assert values == {"a": [{"b": 1}, {"b": 2}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed", r"'seed' changes no setting; write it as name=value"),
        ("datasets.\u00b2.num=1", r"there is no entry \u00b2 among 2, counted from 0"),
        ("a." * 5000 + "b=1", r"is no setting; none is inside more than 20"),
        ("datasets.2.num=1", r"datasets.2.num: there is no entry 2 among 2, counted from 0"),
        ("seed.x=1", r"seed.x: there is nothing inside that x could name"),
        ("sede=1", r"unknown setting sede; did you mean seed\?"),
        ("datasets.0.num=none", r"datasets.0.num: input should be a valid integer"),
        ("datasets.0.tasks=['hotpot']", r"there is no task 'hotpot'"),
        ("datasets.0.docs=[5]", r"give lengths as tokens or as docs, not both"),
        ("datasets.1.file=x.csv", r"file='x.csv': a dataset ends in .jsonl"),
    ],
)
def test_a_wrong_change_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(written(tmp_path, SMALL), changes=[change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("datasets.0.file=same.jsonl", r"two datasets would be called same.jsonl"),
        ("datasets.0.file={other}.jsonl", r"only \{task\}, \{length\} and \{seed\}"),
    ],
)
def test_file_names_must_differ_and_be_known(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(written(tmp_path, SMALL), changes=[change]).jobs(Path())


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe.toml cannot be read: .*line 1"):
        read_recipe(written(tmp_path, "seed = = 3"))
    with pytest.raises(ConfigError, match=r"there is no recipe .*none.toml"):
        read_recipe(tmp_path / "none.toml")


# --- sources --------------------------------------------------------------------------------------


def test_a_folder_stands_for_all_the_sources_in_it(tmp_path: Path) -> None:
    for name in ("train.jsonl.gz", "dev.json", "paragraphs.jsonl"):
        (tmp_path / name).touch()
    paths = named_sources([str(tmp_path), "hotpotqa-dev=other.json"])
    assert source_settings("hotpotqa", paths) == {
        "train": str(tmp_path / "train.jsonl.gz"),
        "dev": "other.json",
        "paragraphs": str(tmp_path / "paragraphs.jsonl"),
    }


def test_a_folder_of_texts_is_essays(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Once.")
    assert named_sources([str(tmp_path)]) == {"essays": str(tmp_path)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hotpot-dev=x", r"there is no source 'hotpot-dev'; did you mean hotpotqa-dev\?"),
        (
            "nowhere",
            r"`source=nowhere`: name a folder, or a file as name=path with one of hotpotqa",
        ),
    ],
)
def test_a_wrong_source_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_sources([given])


@pytest.mark.parametrize("task", SOURCES_OF)
def test_a_task_takes_the_sources_it_is_said_to_take(task: str, tmp_path: Path) -> None:
    gone = {source: str(tmp_path / "gone") for source in SOURCES_OF[task]}
    settings = {"tokens": 4096, "tokenizer": "bytes", **source_settings(task, gone)}
    assert len(settings) == 2 + len(gone)
    with pytest.raises(MemagentError, match=r"gone does not exist"):
        open_task(task, settings)


# --- requests -------------------------------------------------------------------------------------


def test_a_recipe_is_built_and_skips_what_is_complete(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'tokenizer = "bytes"\n[[datasets]]\ntasks = ["beyond/two_hop"]\nnum = 5\n'
        'tokens = ["2k", 3000]\n'
    )
    request = BuildRequest(what=str(recipe), out=tmp_path, num=2, seed=3)
    built = list(build_datasets(request, processes=1, figure=False))
    assert [job.out.name for job, _ in built] == [
        "beyond-two_hop-2048.jsonl",
        "beyond-two_hop-3000.jsonl",
    ]
    assert [manifest and manifest.num_examples for _, manifest in built] == [2, 2]
    again = list(build_datasets(request, processes=1, figure=False))
    assert [manifest for _, manifest in again] == [None, None]


def test_a_task_is_built_once(tmp_path: Path) -> None:
    out = tmp_path / "one.jsonl"
    request = BuildRequest(
        what="beyond/two_hop", tokens=2000, tokenizer="bytes", num=2, out=out, changes=["seed=9"]
    )
    seen: list[tuple[str, int]] = []
    ((job, manifest),) = build_datasets(
        request,
        processes=1,
        figure=False,
        on_progress=lambda job, progress: seen.append((job.out.name, progress.num_done)),
    )
    assert job.settings == {"tokens": 2000, "tokenizer": "bytes", "seed": 9}
    assert manifest is not None
    assert manifest.settings["seed"] == 9
    assert seen == [("one.jsonl", 0), ("one.jsonl", 1), ("one.jsonl", 2)]
    with pytest.raises(MemagentError, match="exists; name another `out`, or replace it"):
        list(build_datasets(request, processes=1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"what": "hotpotqa", "num": 3}, "give `out`: the file to write"),
        ({"what": "hotpotqa", "out": Path("x.jsonl")}, "give `num`: how many examples"),
        ({"what": "r.toml", "docs": 5}, "`docs` is for a single task; change a recipe with"),
    ],
)
def test_an_incomplete_request_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildRequest(**values).jobs()
