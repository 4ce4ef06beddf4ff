"""The mixture of tasks: the same for a seed and a position, in proportion to weights, unbounded."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from memagent.data.example import Example, Passage
from memagent.data.formats.files import read_examples, write_examples
from memagent.errors import ConfigError, DataError
from memagent.rl.rollouts.tasks import (
    OpenSource,
    TasksAhead,
    TaskSource,
    TaskStream,
    check_apart,
    check_ids,
    first_examples,
    open_sources,
)

EXAMPLE = Example(
    id="one",
    task="mine",
    question="Which?",
    answers=("this",),
    documents=(Passage(text="It is this."),),
)


def opened(*sources: TaskSource, seed: int = 3) -> list[OpenSource]:
    return open_sources(sources, seed=seed, tokenizer="bytes", paths={})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    some = [replace(EXAMPLE, id=f"mine/{n}", answers=(f"this {n}",)) for n in range(5)]
    write_examples(path, some)
    return path


def arithmetic(weight: float = 1.0, **settings: int) -> TaskSource:
    return TaskSource(tasks=["arithmetic"], weight=weight, settings=settings)


def test_the_same_seed_and_position_give_the_same_tasks(file: Path) -> None:
    sources = opened(arithmetic(), TaskSource(files=[str(file)]))
    whole = TaskStream(sources, seed=1).draw(40)
    for position in (0, 1, 17, 39):
        stream = TaskStream(sources, seed=1, position=position)
        assert stream.draw(40 - position) == whole[position:]
        assert stream.position == 40
    assert TaskStream(sources, seed=2).draw(40) != whole


def test_moving_back_and_forth_changes_nothing() -> None:
    stream = TaskStream(opened(arithmetic(), arithmetic(num_steps=2)), seed=1)
    first = stream.draw(10)
    stream.move_to(4)
    assert stream.draw(3) == first[4:7]
    stream.move_to(9)
    assert stream.draw(1) == first[9:]


def test_tasks_are_drawn_in_proportion_to_their_weights(file: Path) -> None:
    sources = opened(arithmetic(weight=3.0), TaskSource(files=[str(file)], weight=1.0))
    names = Counter(example.task for example in TaskStream(sources, seed=1).draw(2000))
    assert names["arithmetic"] / 2000 == pytest.approx(0.75, abs=0.04)


def test_a_weight_is_shared_by_the_tasks_and_lengths_of_a_source() -> None:
    needles = TaskSource(tasks=["ruler/niah_single_1", "ruler/vt"], tokens=[500, 900], weight=2.0)
    assert [source.weight for source in opened(needles, arithmetic())] == [0.5, 0.5, 0.5, 0.5, 1.0]


def test_a_file_is_read_completely_before_it_repeats(file: Path) -> None:
    drawn = TaskStream(opened(TaskSource(files=[str(file)])), seed=1).draw(15)
    rounds = [[one.id for one in drawn[start : start + 5]] for start in (0, 5, 10)]
    bare = [[name.partition("~")[0] for name in names] for names in rounds]
    assert all(sorted(names) == [f"mine/{number}" for number in range(5)] for names in bare)
    assert len({tuple(names) for names in bare}) > 1, "another order each time"
    assert len({name for names in rounds for name in names}) == 15, "ids never repeat"


def test_validation_on_training_questions_is_refused(file: Path) -> None:
    training = opened(TaskSource(files=[str(file)]), arithmetic())
    with pytest.raises(ConfigError, match="another file or split"):
        check_apart(training, opened(TaskSource(files=[str(file)])))
    others = opened(arithmetic(), seed=4)
    check_apart(training, others)
    trained = {one.question for one in TaskStream(training, seed=1).draw(50)}
    assert not trained & {one.question for one in first_examples(others, 20)}


def test_validation_takes_the_first_examples_of_each_source(file: Path) -> None:
    sources = opened(TaskSource(files=[str(file)]), arithmetic())
    assert len(first_examples(sources, 20)) == 25
    assert first_examples(sources, 2)[0].id == "mine/0"


def test_tasks_prepared_ahead_are_those_of_the_stream() -> None:
    sources = opened(arithmetic())
    ahead = TasksAhead(TaskStream(sources, seed=1), 4)
    try:
        assert [next(ahead) for _ in range(10)] == TaskStream(sources, seed=1).draw(10)
        assert ahead.position == 10, "what is only made does not count"
    finally:
        ahead.close()


def test_wrong_settings_and_empty_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"arithmetic: .*num_stepps"):
        opened(arithmetic(num_stepps=2))
    empty = tmp_path / "none.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="holds no example"):
        opened(TaskSource(files=[str(empty)]))


def copy(file: Path, name: str, **changes: str) -> TaskSource:
    """A file with the examples of another one, changed."""
    path = file.with_name(name)
    write_examples(path, [replace(example, **changes) for example in read_examples(file)])
    return TaskSource(files=[str(path)])


def test_equal_ids_of_two_files_are_refused_before_a_task_is_drawn(file: Path) -> None:
    training = opened(TaskSource(files=[str(file)]), copy(file, "other.jsonl", question="Where?"))
    with pytest.raises(DataError, match=r"mine\.jsonl and other\.jsonl.*5 ids.*mine/0"):
        check_ids(training)
    check_ids(training[:1])


def test_an_id_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    write_examples(path, [EXAMPLE, replace(EXAMPLE, question="Where?")])
    with pytest.raises(DataError, match=r"twice\.jsonl.*id one.*twice"):
        opened(TaskSource(files=[str(path)]))


def test_a_generated_task_named_twice_is_refused_with_its_settings() -> None:
    again = TaskSource(tasks=["ruler/vt"], tokens=[500])
    with pytest.raises(DataError, match=r"ruler/vt and ruler/vt.*`seed`"):
        check_ids(opened(again, again.model_copy(update={"settings": {"num_chains": 2}})))
    check_ids(opened(again, again.model_copy(update={"settings": {"seed": 9}})))
    check_ids(opened(again, TaskSource(tasks=["ruler/vt"], tokens=[900]), arithmetic()))


def test_a_file_that_was_built_from_a_task_of_the_run_is_refused(tmp_path: Path) -> None:
    vt = TaskSource(tasks=["ruler/vt"], tokens=[500])
    path = tmp_path / "built.jsonl"
    write_examples(path, first_examples(opened(vt), 3))
    with pytest.raises(DataError, match=r"built\.jsonl and ruler/vt"):
        check_ids(opened(TaskSource(files=[str(path)]), vt))


def test_validation_on_a_copy_of_a_training_file_is_refused(file: Path) -> None:
    training = opened(TaskSource(files=[str(file)]))
    with pytest.raises(ConfigError, match=r"5 of 5 questions of copied\.jsonl.*mine\.jsonl"):
        check_apart(training, opened(copy(file, "copied.jsonl")))
    check_apart(training, opened(copy(file, "other.jsonl", question="Where?")))


def test_validation_with_the_seed_of_training_is_refused() -> None:
    training = opened(arithmetic(seed=5))
    with pytest.raises(ConfigError, match=r"training questions of arithmetic.*seed"):
        check_apart(training, opened(arithmetic(seed=5), seed=4))
    check_apart(training, opened(arithmetic(seed=6), seed=4))
