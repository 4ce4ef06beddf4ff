"""Lessons of a warm start: reproducible steps, and each pass over a file is complete."""

import json
from pathlib import Path
from typing import Any

import pytest

from memagent.data.example import Example
from memagent.data.tasks.arithmetic import problem
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import ConfigError
from memagent.rl.rollouts.tasks import TaskSource, open_sources
from memagent.rl.settings import ScratchSettings, SftSettings
from memagent.rl.warmstart import lessons
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.lessons import FileLessons, LessonBatch, TaskLessons, ahead
from memagent.rl.warmstart.traces import TraceRefused
from memagent.rl.weights.models import build_scratch

ANSWERS = ("red", "green", "blue", "white")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    settings = ScratchSettings(vocab_size=300, hidden_size=16, num_layers=1, num_heads=2)
    texts = [problem(index, seed=9).question for index in range(5)]
    return load(str(build_scratch(settings, texts, tmp_path_factory.mktemp("model"), seed=5)))


def conversation(name: str, reply: str) -> Conversation:
    question = {"role": "user", "content": "Which?"}
    return Conversation(id=name, messages=(question, {"role": "assistant", "content": reply}))  # type: ignore[arg-type]


def replies(batch: LessonBatch, model: LoadedModel) -> list[str]:
    """What each row of a batch teaches to say."""
    found = []
    for sample in (sample for rows in batch.examples for sample in rows):
        marked = zip(sample.ids, sample.is_sampled, strict=True)
        found.append(model.vocabulary.decode([token for token, is_sampled in marked if is_sampled]))
    return found


def from_file(folder: Path, model: LoadedModel, **settings: Any) -> FileLessons:
    path = folder / "shown.jsonl"
    lines = [
        {"id": reply, "messages": list(conversation(reply, reply).messages)} for reply in ANSWERS
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    chosen = SftSettings(files=[str(path)], **settings)
    return FileLessons(chosen, model=model, max_tokens=512, seed=2)


def from_tasks(show: Any, model: LoadedModel, *, batch: int = 3) -> TaskLessons:
    sources = open_sources([TaskSource(tasks=["arithmetic"])], seed=1, tokenizer="bytes", paths={})
    return TaskLessons(SftSettings(batch=batch), sources, show, model=model, max_tokens=512, seed=1)


def test_each_pass_over_a_file_is_complete_and_in_another_order(
    tmp_path: Path, model: LoadedModel
) -> None:
    found = from_file(tmp_path, model, batch=3)
    said = [reply for step in range(4) for reply in replies(found.batch(step), model)]
    rounds = [said[start : start + 4] for start in (0, 4, 8)]
    assert [sorted(one) for one in rounds] == [sorted(ANSWERS)] * 3
    assert len({tuple(one) for one in rounds}) > 1, "another order each time"


def test_a_step_does_not_depend_on_earlier_ones(tmp_path: Path, model: LoadedModel) -> None:
    found = from_file(tmp_path, model, batch=3)
    in_order = [found.batch(step) for step in range(6)]
    assert [from_file(tmp_path, model, batch=3).batch(step) for step in (5, 2)] == [
        in_order[5],
        in_order[2],
    ]
    assert list(ahead(found, 2, 6)) == in_order[2:]


def test_examples_without_a_rule_are_skipped_and_counted(model: LoadedModel) -> None:
    def show(example: Example) -> list[Conversation]:
        if int(example.id.rpartition("/")[2]) % 3 == 0:
            raise TraceRefused("divisible by three")
        return [conversation(example.id, example.id)]

    batch = from_tasks(show, model).batch(0)
    numbers = [int(reply.rpartition("/")[2]) for reply in replies(batch, model)]
    assert numbers == [1, 2, 4]
    assert batch.num_refused == 2
    again = from_tasks(show, model)
    later = again.batch(1)
    assert (again.batch(0), again.batch(1)) == (batch, later), "steps can be asked for in any order"
    assert not {*replies(later, model)} & {*replies(batch, model)}


def test_tasks_without_any_demonstration_are_an_error(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(example: Example) -> list[Conversation]:
        raise TraceRefused("it has no evidence")

    monkeypatch.setattr(lessons, "MAX_REFUSED", 5)
    with pytest.raises(ConfigError, match=r"it has no evidence; set other `warm_start.tasks`"):
        from_tasks(show, model).batch(0)
