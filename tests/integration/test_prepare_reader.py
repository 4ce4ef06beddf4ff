"""The script that builds the reader's data: what its files contain, and what they must not."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from memagent.config import AgentConfig
from memagent.data.formats.files import read_examples
from memagent.rl.warmstart.conversations import read_conversations
from memagent.tokens.tokenizers import open_tokenizer
from recipes import prepare_1_5b
from recipes.questions import Question, check_apart
from recipes.questions import lessons as lessons_of

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, records: Iterable[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def paragraph(number: int) -> dict[str, Any]:
    sentences = [f"Place {number} is a town.", f"It was built in {1000 + number}.", "It has walls."]
    return {"title": f"Place {number}", "sentences": sentences}


def hotpot(name: str, first: int) -> dict[str, Any]:
    some = [paragraph(first + number) for number in range(4)]
    return {
        "_id": name,
        "question": f"When was place {first} built, and is place {first + 1} a town?",
        "answer": str(1000 + first),
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[f"Place {first}", [1]], [f"Place {first + 1}", [0, 9]]],
        "context": [[one["title"], one["sentences"]] for one in some],
    }


def cut(name: str, *sentences: list[str], answer: str) -> dict[str, Any]:
    return {
        "id": name,
        "question": f"Which {name} town has walls?",
        "answers": [answer],
        "paragraphs": [{"title": "guessed", "sentences": some} for some in sentences],
        "supporting": [],
        "distractors": [3, 4, 5, 20],
    }


KNOWN = [paragraph(30)["sentences"][:1], paragraph(31)["sentences"][1:2]]
CUTS = [
    cut("known", *KNOWN, answer="1031"),
    cut("short", ["Elsewhere Anna was born."], ["Anna has walls in Rome."], answer="Rome"),
    cut("absent", ["Nothing of it."], answer="Paris"),
]
Prepare = Callable[..., subprocess.CompletedProcess[str]]


def run_script(
    name: str,
    folder: Path,
    out: Path,
    *options: str,
    cuts: Iterable[Any] = (),
    official: Iterable[Any] = (),
    dev: Any = None,
) -> subprocess.CompletedProcess[str]:
    qa, published = folder / "qa", folder / "hotpotqa"
    write(qa / "paragraphs.jsonl.gz", [paragraph(number) for number in range(60)])
    write(qa / "hotpotqa_train_halueval.jsonl.gz", cuts)
    for other in ("2wiki_train", "nq_open_gold", "iirc"):
        write(qa / f"{other}.jsonl.gz", [])
    write(published / "train.jsonl.gz", official)
    write(published / "dev.jsonl.gz", [dev or hotpot("dev", 20)])
    values = {"qa": qa, "hotpotqa": published, "tokenizer": "bytes", "out": out}
    named = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", f"recipes.{name}", *named, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Run `prepare.py` on a few questions."""

    def run(
        out: Path,
        share: float,
        *,
        cuts: Iterable[Any] = CUTS,
        official: Iterable[Any] = (hotpot("official", 10),),
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("sources")
        options = ("--counted", "0", "--rl-share", str(share))
        return run_script("prepare_1_5b", folder, out, *options, cuts=cuts, official=official)

    return run


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare_answers.py` writes of the same questions."""
    folder, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("answers")
    dev = {**hotpot("dev", 20), "question": "Is 20 older than 21, 40, 41, 42, 43 and 44?"}
    official = [hotpot("official", 10)]
    done = run_script("prepare_answers", folder, out, cuts=CUTS, official=official, dev=dev)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def lessons(prepare: Prepare, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All questions are for the warm start."""
    out = tmp_path_factory.mktemp("lessons")
    done = prepare(out, 0.0)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def tasks(prepare: Prepare, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All questions are for reinforcement learning."""
    out = tmp_path_factory.mktemp("tasks")
    done = prepare(out, 1.0)
    assert done.returncode == 0, done.stderr
    return out


def question_ids(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {json.loads(line)["id"].rpartition("/")[2] for line in lines}


def test_no_question_is_in_the_warm_start_and_in_reinforcement_learning(
    prepare: Prepare, tmp_path: Path
) -> None:
    official = [hotpot(f"official-{first}", first) for first in (0, 4, 8, 12, 25, 40, 44, 48, 52)]
    cuts = [
        cut(f"cut-{number}", ["Anna was born."], [f"She lives in Rome {number}."], answer="Rome")
        for number in range(40)
    ]
    names = ("lessons_long", "lessons_short", "train_titled", "train_plain")
    found = []
    for share in (0.5, 0.5, 0.25):
        out = tmp_path / f"out-{len(found)}"
        done = prepare(out, share, cuts=cuts, official=official)
        assert done.returncode == 0, done.stderr
        found.append([question_ids(out / f"{name}.jsonl") for name in names])
    for name in names:
        first, second = (tmp_path / f"out-{number}" / f"{name}.jsonl" for number in (0, 1))
        assert first.read_bytes() == second.read_bytes()
    for long, short, titled, plain in found:
        assert not (long | short) & (titled | plain)
        assert len(long | short | titled | plain) == len(official) + len(cuts)
    assert 10 < len(found[0][2] | found[0][3]) < 39
    assert found[2][2] | found[2][3] < found[0][2] | found[0][3], "a smaller share is a subset"


def test_a_development_question_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    done = prepare(tmp_path / "out", 0.5, official=[hotpot("copied", 20)])
    assert done.returncode == 1
    assert "the question copied is in development and in" in done.stderr


def test_a_question_in_two_sets_is_refused() -> None:
    question = Question(id="one", text="Who?", answers=("A",), gold=(), hard=(), is_titled=True)
    check_apart(lessons=[question, question], tasks=[])
    with pytest.raises(SystemExit, match="one is in lessons and in tasks: Who"):
        check_apart(lessons=[question], tasks=[question])


def test_paragraphs_of_development_questions_are_in_no_text(lessons: Path, tasks: Path) -> None:
    for path in (*lessons.iterdir(), *tasks.iterdir()):
        assert "Place 20 " not in path.read_text()
        assert "Place 21 " not in path.read_text()


def test_whole_paragraphs_are_titled_and_cut_ones_are_not(tasks: Path) -> None:
    titled = {one.id.rpartition("/")[2]: one for one in read_examples(tasks / "train_titled.jsonl")}
    assert titled.keys() == {"official", "known"}
    assert all(passage.title for one in titled.values() for passage in one.passages)
    assert [one.text for one in titled["known"].evidence] in (
        ["Place 30 is a town.", "It was built in 1031."],
        ["It was built in 1031.", "Place 30 is a town."],
    )
    (plain,) = read_examples(tasks / "train_plain.jsonl")
    assert plain.id.endswith("/short"), "an answer that is not in the evidence is left out"
    assert not any(passage.title for passage in plain.passages)
    assert {one.text for one in plain.evidence} == {
        "Elsewhere Anna was born.",
        "Anna has walls in Rome.",
    }


def test_conversations_end_with_the_answer_and_hold_the_evidence(lessons: Path) -> None:
    examples = read_conversations(lessons / "lessons_long.jsonl")
    found = {one[0].id.rpartition("/")[2]: one for one in examples}
    assert found.keys() == {"official", "known", "short"}
    *reads, answer = (one.messages[-1]["content"] for one in found["official"])
    assert answer == "\\boxed{1010}"
    noted = [line for reply in reads if reply != "No change." for line in reply.splitlines()]
    assert sorted(noted) == ["Place 10: It was built in 1010.", "Place 11 is a town."]


def test_answers_alone_have_the_evidence_in_their_memory(lessons: Path) -> None:
    found = {one[0].id: one for one in read_conversations(lessons / "lessons_answers.jsonl")}
    ((lesson,),) = (one for name, one in found.items() if name.endswith("/official"))
    prompt, reply = (message["content"] for message in lesson.messages)
    assert reply == "\\boxed{1010}"
    assert "It was built in 1010." in prompt
    assert "Place 11 is a town." in prompt


def test_facts_of_the_memory_come_before_the_answer_and_the_one_that_tells_it_last(
    lessons: Path,
) -> None:
    found = {one[0].id: one for one in read_conversations(lessons / "lessons_facts.jsonl")}
    assert {name.rpartition("/")[2] for name in found} == {"official", "known", "short"}
    for name, (lesson,) in found.items():
        prompt, reply = (message["content"] for message in lesson.messages)
        *facts, answer = reply.splitlines()
        assert answer.startswith("\\boxed{")
        assert facts
        assert all(f"\n{fact}\n" in prompt for fact in facts), name
        assert answer.removeprefix("\\boxed{").removesuffix("}") in facts[-1]


def test_questions_that_count_are_answered_from_items_that_code_counts() -> None:
    agent = AgentConfig(chunk_tokens=2048, memory_tokens=512, prompts="add", **prepare_1_5b.LISTING)
    examples = list(prepare_1_5b.counted(4, "estimate", seed=7))
    assert len(examples) == 16
    found = [json.loads(line) for line in lessons_of(examples, agent, open_tokenizer("estimate"))]
    answers = [one for one in found if one["kind"] == "answer"]
    assert len(answers) == 16, "all fit"
    assert all(
        "Counted by code over everything" in one["messages"][0]["content"] for one in answers
    )
    replies = {
        one["messages"][-1]["content"].partition("<item>")[0]
        for one in found
        if one["kind"] == "read"
    }
    assert replies <= {"", "No change."}


def test_composed_memories_hold_the_answer_and_no_development_paragraph(answers: Path) -> None:
    tasks = list(read_examples(answers / "train_answers.jsonl"))
    assert sorted(one.id for one in tasks) == sorted(
        f"memory/answers_{number}/{name}"
        for number in (0, 1)
        for name in ("official", "known", "short")
    )
    for one in tasks:
        memory = one.metadata["memory"]
        assert one.answers[0] in memory
        assert len(memory.encode()) <= 512, "as many as a memory has room for"
        assert one.passages == ()
        assert not {"Place 20 ", "Place 21 "} & {f"{line[:8]} " for line in memory.splitlines()}
    lessons = [one for (one,) in read_conversations(answers / "lessons_hotpotqa.jsonl")]
    assert len(lessons) == len(tasks)
    for lesson in lessons:
        asked, said = lesson.messages
        answer = said["content"].removeprefix("\\boxed{").removesuffix("}")
        assert answer in asked["content"].partition("</memory>")[0]


def test_development_memories_differ_by_what_was_noted_in_vain(answers: Path) -> None:
    lines = {}
    for name in ("gold", "near", "far"):
        (one,) = read_examples(answers / f"dev_{name}.jsonl")
        assert (one.id, one.task) == (f"memory/{name}/dev", f"answers_{name}")
        lines[name] = set(one.metadata["memory"].splitlines())
    assert lines["gold"] == {"Place 20: It was built in 1020.", "Place 21 is a town."}
    assert lines["gold"] < lines["near"] < lines["far"]
    near, far = lines["near"] - lines["gold"], lines["far"] - lines["near"]
    assert len(near) == 2
    assert {line[:8] for line in near} <= {"Place 22", "Place 23"}
    assert len(far) == 5
    assert not {line[:8] for line in far} & {f"Place {n}" for n in range(20, 24)}


def test_generated_questions_become_lessons_and_those_answered_fully_texts(tmp_path: Path) -> None:
    record = {
        "paragraphs": [paragraph(10), paragraph(11)],
        "supporting": [["Place 10", 1], ["Place 11", 0]],
        "question": "When was the town of 11 built?",
        "answers": ["1010"],
    }
    shares = {"whole": 1.0, "half": 0.5}
    file = tmp_path / "generated.jsonl.gz"
    write(file, [{**record, "id": name, "agreement": share} for name, share in shares.items()])
    done = run_script("prepare_answers", tmp_path, tmp_path / "out", "--generated", str(file))
    assert done.returncode == 0, done.stderr
    found = read_conversations(tmp_path / "out/lessons_generated.jsonl")
    assert [one.id for (one,) in found] == [f"memory/generated/{name}" for name in shares]
    (text,) = read_examples(tmp_path / "out/train_generated.jsonl")
    assert {passage.title for passage in text.passages} > {"Place 10", "Place 11"}


def test_misleading_paragraphs_stand_apart_from_each_other_in_spread_texts(tasks: Path) -> None:
    found = read_examples(tasks / "train_spread.jsonl")
    (example,) = (one for one in found if one.id.endswith("/official"))
    titles = [passage.title for passage in example.passages]
    places = [titles.index(f"Place {number}") for number in (10, 11, 12, 13)]
    assert len(titles) > 40
    quarters = sorted(4 * place // len(titles) for place in places)
    assert quarters == [0, 1, 2, 3], "one in each part of the text"
