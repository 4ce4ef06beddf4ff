"""Settings of a run: errors name the remedy, presets fill what is not set, changes take precedence."""

from pathlib import Path
from typing import Any

import pytest

from memagent.agent.prompts import open_prompts
from memagent.config import Settings
from memagent.errors import ConfigError
from memagent.rl.agents.api import open_agent
from memagent.rl.resume import remember_named, resumed_config
from memagent.rl.settings import (
    PRESETS,
    ClusterSettings,
    TrainConfig,
    parse_config,
    read_config,
    read_warm_start,
)

LEAST: dict[str, Any] = {
    "model": {"source": "smollm2-135m"},
    "tasks": [{"tasks": ["ruler/niah_single_1"], "tokens": ["4k"]}],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("rolout.prompts=4", "rolout"),
        ("rollout.promts=4", "promts"),
        ("rollout.group_size=1", "use at least 2"),
        ("update.updates=17", "17 optimizer steps (`update.updates`)"),
        ("objective.loss_mean=0", "objective.loss_mean: input should be 'token', 'group' or"),
        ("objective.clip_low=1.5", "clip_low"),
        ("optim.betas=[0.9, 1.0]", "below 1"),
        ("preset=papers", "did you mean paper?"),
        ("tasks.0.tasks=['ruler/niah_singel_1']", "did you mean ruler/niah_single_1?"),
        ("tasks.0.tokens=['4kb']", "write it as 8192 or 8k"),
        ("tasks=[]", "[[tasks]]"),
        ("steps=0", "trains nothing"),
        ("model.scratch={}", "either `source` or `scratch`"),
        ("rollout.engine=openai:x", "model.lora_rank"),
        ("rollout.merged=true", "`rollout.merged` is for an adapter"),
        ("rollout.driver=lokstep", "lockstep"),
        (
            "warm_start={tasks=[{tasks=['arithmetic']}], files=['a.jsonl']}",
            "either `tasks` or `files`",
        ),
    ],
)
def test_an_error_names_the_setting_or_the_remedy(change: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(LEAST, changes=[change])
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_preset_fills_what_the_file_does_not_set() -> None:
    config = parse_config({**LEAST, "preset": "paper", "optim": {"lr": 5e-6}})
    assert (config.rollout.prompts, config.rollout.group_size) == (128, 16)
    assert config.update.updates == 16
    assert (config.optim.lr, config.optim.warmup_steps) == (5e-6, 20)
    assert (config.objective.kl_coef, config.objective.clip_high) == (1e-3, 0.2)
    assert not config.objective.scale_by_std
    assert config.agent.settings["chunk_tokens"] == 5000
    assert config.agent.settings["max_sections"] == 8
    assert config.agent.reward == "strict"


def test_the_paper_preset_is_the_papers() -> None:
    validation = {"tasks": [{"tasks": ["ruler/niah_single_2"], "tokens": ["4k"]}]}
    config = parse_config({**LEAST, "preset": "paper", "validation": validation})
    agent = open_agent("memory", config.agent.settings)
    settings = agent.keywords["settings"]  # type: ignore[attr-defined]
    assert (settings.prompts, settings.section_ends) == ("paper", "exact")
    assert (settings.empty_replies, settings.long_texts) == ("overwrite", "cut_middle")
    read = open_prompts(settings.prompts).read
    places = [read.index(slot) for slot in ("{question}", "{memory}", "{section}")]
    assert places == sorted(places), "the memory stands before the section"
    assert not config.has_adapter
    objective = config.objective
    assert (objective.old_logprobs, objective.importance_cap) == ("recompute", None)
    assert (objective.loss_mean, objective.scale_by_std) == ("token", False)
    found = config.validation
    assert found is not None
    assert (found.every, found.num, found.samples) == (5, 128, 4)
    assert (found.temperature, found.top_p) == (1.0, 0.7)
    assert parse_config({**LEAST, "preset": "paper"}).validation is None
    own = parse_config({**LEAST, "preset": "paper", "validation": {**validation, "every": 7}})
    assert own.validation is not None
    assert (own.validation.every, own.validation.samples) == (7, 4)


def test_settings_of_a_presets_agent_are_not_those_of_another() -> None:
    config = parse_config({**LEAST, "preset": "paper", "agent": {"name": "calculator"}})
    assert config.agent.settings == {}
    assert config.agent.reward == "strict"


def test_changes_take_precedence_over_the_file_and_the_file_over_the_preset() -> None:
    values = {**LEAST, "preset": "dapo", "rollout": {"prompts": 8}}
    config = parse_config(values, changes=["rollout.group_size=4", "rollout.prompts=6"])
    assert (config.rollout.prompts, config.rollout.group_size) == (6, 4)
    assert config.update.updates == PRESETS["dapo"]["update"]["updates"]


def test_a_config_round_trips_through_json() -> None:
    config = parse_config({**LEAST, "preset": "dapo", "warm_start": {"steps": 3}})
    assert parse_config(config.model_dump(mode="json")) == config


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="there is no config"):
        read_config(path)
    path.write_text("steps = ")
    with pytest.raises(ConfigError, match=r"run\.toml cannot be read"):
        read_config(path)
    path.write_text("[model]\nsource = 'x'\nsouce = 'y'\n")
    with pytest.raises(ConfigError, match=r"run\.toml: .*souce"):
        read_config(path)


def test_only_settings_that_keep_the_run_the_same_change_when_it_is_resumed() -> None:
    stored = parse_config({**LEAST, "preset": "dapo"}).model_dump(mode="json")
    changes = ["steps=7", "checkpoint.every=2", "update.max_tokens=4096"]
    config = resumed_config(stored, changes=changes)
    assert (config.steps, config.checkpoint.every, config.update.max_tokens) == (7, 2, 4096)
    for change in ("optim.lr=1e-3", "update.updates=2", "stepsize=3"):
        with pytest.raises(ConfigError, match="cannot change when a run is resumed"):
            resumed_config(stored, changes=[change])


def test_a_warm_start_alone_needs_no_tasks_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nsource = 'x'\n[warm_start]\ntasks = [{tasks = ['arithmetic']}]\n")
    with pytest.raises(ConfigError, match=r"\[\[tasks\]\]"):
        read_config(path)
    config = read_warm_start(path, changes=["warm_start.steps=3"])
    assert config.warm_start is not None
    assert (config.steps, config.warm_start.steps) == (0, 3)
    config = read_warm_start(path, files=[Path("a.jsonl"), Path("b'c.jsonl")])
    assert config.warm_start is not None
    assert (config.warm_start.files, config.warm_start.tasks) == (["a.jsonl", "b'c.jsonl"], [])
    path.write_text("[model]\nsource = 'x'\n[[tasks]]\ntasks = ['arithmetic']\n")
    with pytest.raises(ConfigError, match=r"has no \[warm_start\]"):
        read_warm_start(path)


def test_every_setting_has_a_description() -> None:
    def check(settings: type[Settings]) -> None:
        for name, field in settings.model_fields.items():
            assert settings.help(name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                check(field.annotation)

    check(TrainConfig)


BESIDE = """
[model]
source = "base"
[agent]
name = "mine.py:agent"
reward = "strict"
settings = { prompts = "prompts.toml" }
[sources]
essays = "texts"
[[tasks]]
files = ["train.jsonl", "elsewhere.jsonl"]
[warm_start]
replies = "mine.py:replies"
[validation]
graders = ["mine.py:score", "lenient"]
[[validation.tasks]]
tasks = ["ruler/qa_1"]
settings = { questions = "squad.json" }
"""


def test_paths_are_relative_to_their_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    names = (
        "base",
        "mine.py",
        "prompts.toml",
        "texts",
        "train.jsonl",
        "squad.json",
        "strict",
        "other.py",
    )
    for name in names:
        (there / name).touch()
    (there / "my_run.toml").write_text(BESIDE)
    (here / "elsewhere.jsonl").touch()
    monkeypatch.chdir(here)
    config = read_config(Path("../there/my_run.toml"), changes=["agent.reward=other.py:score"])
    assert config.model.source == f"{there}/base"
    assert config.agent.name == f"{there}/mine.py:agent"
    assert config.agent.settings == {"prompts": f"{there}/prompts.toml"}
    assert config.agent.reward == "other.py:score", "the command line means the working folder"
    assert config.sources == {"essays": f"{there}/texts"}
    assert config.tasks[0].files == [f"{there}/train.jsonl", "elsewhere.jsonl"]
    assert config.warm_start is not None
    assert config.warm_start.replies == f"{there}/mine.py:replies"
    assert config.validation is not None
    assert config.validation.graders == (f"{there}/mine.py:score", "lenient")
    assert config.validation.tasks[0].settings == {"questions": f"{there}/squad.json"}


def test_names_are_not_taken_for_files_beside_a_config(tmp_path: Path) -> None:
    for name in ("smollm2-135m", "memory", "strict", "paper"):
        (tmp_path / name).touch()
    (tmp_path / "my_run.toml").write_text(
        """
        preset = "paper"
        model.source = "smollm2-135m"
        agent = { name = "memory", reward = "strict", settings = { prompts = "paper" } }
        tasks = [{ tasks = ["hotpotqa"], settings = { split = "train" } }]
        """
    )
    config = read_config(tmp_path / "my_run.toml")
    assert (config.model.source, config.agent.name) == ("smollm2-135m", "memory")
    assert (config.agent.reward, config.agent.settings["prompts"]) == ("strict", "paper")


def test_a_resumed_run_keeps_the_preset_of_its_start() -> None:
    stored = parse_config({**LEAST, "preset": "paper"}).model_dump(mode="json")
    del stored["agent"]["settings"]["section_ends"]  # as an earlier version had it
    config = resumed_config(stored)
    assert config.preset == "paper"
    assert "section_ends" not in config.agent.settings


def test_a_cluster_is_optional_and_may_change_when_a_run_is_resumed() -> None:
    values = {"model": {"source": "x"}, "tasks": [{"tasks": ["small/colours"]}]}
    assert parse_config(values).cluster is None
    joined = resumed_config(values, changes=["cluster.address=10.0.0.1:6379"])
    assert joined.cluster is not None
    assert joined.cluster.address == "10.0.0.1:6379"
    assert joined.cluster.trainer_ranks == 1


def test_a_run_may_leave_its_cluster() -> None:
    values = {
        "model": {"source": "x"},
        "tasks": [{"tasks": ["small/colours"]}],
        "cluster": {"address": "10.0.0.1:6379", "trainer_ranks": 8},
    }
    assert parse_config(values, changes=["cluster.address=none"]).cluster is None
    assert resumed_config(values, changes=["cluster.address=none"]).cluster is None


def test_a_cluster_that_only_the_run_directory_names_is_not_joined() -> None:
    stored = {
        "model": {"source": "x"},
        "tasks": [{"tasks": ["small/colours"]}],
        "cluster": {"address": "203.0.113.9:6379"},
    }
    with pytest.raises(ConfigError, match=r"give it again: `cluster.address=203.0.113.9:6379`"):
        resumed_config(stored)
    remember_named(parse_config(stored))
    assert resumed_config(stored).cluster == parse_config(stored).cluster


def test_colocated_replicas_need_a_rank_for_each_of_their_gpus() -> None:
    with pytest.raises(ConfigError, match="4 GPUs of engine replicas"):
        ClusterSettings.parse({"placement": "colocated", "trainer_ranks": 2, "engine_replicas": 4})
