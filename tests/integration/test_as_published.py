"""The suites in configs/eval/as_published: what they ask, and small runs of them by the original's rules."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.prompts import open_prompts
from memagent.cli.main import run
from memagent.data.formats.files import write_examples
from memagent.data.tasks.registry import open_task
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError
from memagent.eval.items import plan_items
from memagent.eval.records import ItemRecord, read_items
from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.report import load_report
from memagent.eval.setup import evaluate
from memagent.eval.suites import read_suite
from memagent.types import Message, Sampling
from tests.support.hotpot import HotpotFiles, write_hotpot

SUITES = Path(__file__).resolve().parents[2] / "configs" / "eval" / "as_published"
SMALL = [
    *("tokenizer=bytes", "length_tokenizer=bytes", "agent.window=9000", "agent.chunk_tokens=1500"),
    *("agent.memory_tokens=400", "agent.answer_tokens=300"),
]


@pytest.fixture
def files(tmp_path: Path) -> HotpotFiles:
    return write_hotpot(tmp_path / "hotpot")


def block(prompt: str, tag: str) -> str:
    return prompt.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].strip()


def reading(answer: Callable[[str, str], str]) -> Callable[[Sequence[Message], Sampling], str]:
    """Remembers every sentence with a name or a number of the question; answers by a rule."""

    def reply(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        question, memory = block(prompt, "problem"), block(prompt, "memory")
        if "<section>" not in prompt:
            return answer(question, memory)
        (name,) = re.findall(r"Object (\w+)", question)
        found = re.findall(rf"Person {name} was born in Town {name}", block(prompt, "section"))
        return " ".join([memory, *found])

    return reply


def hotpot_suite(files: HotpotFiles, *more: str, docs: str = "[10, 60]", num: int = 4) -> Any:
    sources = {f"hotpotqa-{name}": path for name, path in files.settings.items() if name != "train"}
    changes = [f"sources.{name}={json.dumps(path)}" for name, path in sources.items()]
    lengths = [f"tasks.0.docs={docs}", f"num={num}"]
    return read_suite(SUITES / "hotpotqa.toml", changes=[*SMALL, *changes, *lengths, *more])


def answered(suite: Any, script: Any, **more: Any) -> tuple[list[ItemRecord], ScriptedEngine]:
    engine = ScriptedEngine(script)
    return asyncio.run(evaluate(suite, engine, **more)), engine


def asked(records: list[ItemRecord]) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for record in sorted(records, key=lambda record: record.index):
        found.setdefault(record.target_tokens, []).append(record.metadata["hotpotqa_id"])
    return found


# --- the main table -------------------------------------------------------------------------------


def town(question: str, memory: str) -> str:
    towns = re.findall(r"Town \w+", memory)
    return f"I recall {len(towns)} towns. So the answer is **{towns[-1] if towns else 'unknown'}**."


def test_the_main_table_in_small(files: HotpotFiles, tmp_path: Path) -> None:
    """Two models select the questions without the text; the rest are asked at both lengths."""
    replies = ["no idea"] * 4 + ["Surely not in Town d2!"] + ["no idea"] * 7
    knows = tmp_path / "knows.json"
    knows.write_text(json.dumps(replies))
    suite = hotpot_suite(
        files, f'selection.engines=["scripted:{knows}", "scripted"]', "selection.candidates=6"
    )
    notes: list[str] = []
    records, engine = answered(suite, reading(town), run_dir=tmp_path / "run", on_note=notes.append)
    assert asked(records) == {
        length: ["id-d0", "id-d1", "id-d3", "id-d4"]
        for length in {r.target_tokens for r in records}
    }
    assert {(r.score, r.grader, r.graded_tokens) for r in records} == {
        (1.0, "original_sub_em", None)
    }
    assert {r.extracted for r in records} == {f"Town d{n}" for n in (0, 1, 3, 4)}
    assert f"selecting questions: scripted:{knows} is asked without the text" in notes
    assert any(note.startswith("questions: the first of 5 that need the text") for note in notes)

    sections = [
        step["section"]
        for record in read_items(tmp_path / "run")
        for step in record.trace["steps"]
        if step["section"]
    ]
    assert len(sections) > 20
    is_last = [section["start"] + 1500 != section["end"] for section in sections]
    assert sum(is_last) == len(records)  # all windows but the last of each text are exact

    prompts = open_prompts(str(SUITES / "prompts.toml"))
    start = prompts.read.partition("<problem>")[0]
    assert engine.prompts[0][-1]["content"].startswith(start)
    assert prompts.empty_memory in engine.prompts[0][-1]["content"]

    # another model is asked the same questions, and nobody is asked without the text again
    again, _ = answered(suite, reading(town), on_note=notes.append)
    assert asked(again) == asked(records)
    assert sum(note.startswith("selecting questions") for note in notes) == 2
    assert load_report([str(tmp_path / "run")], anchors=read_anchors("paper")).results


def test_an_empty_reply_empties_the_memory(files: HotpotFiles, tmp_path: Path) -> None:
    file = tmp_path / "chosen.jsonl"
    task = open_task("hotpotqa", {"docs": 5, "tokenizer": "bytes", **files.settings})
    write_examples(file, [task.example(0)])
    suite = hotpot_suite(files, f"selection.file={file}", docs="[60]", num=1)
    replies = iter(["a fact", "", *["more"] * 20])
    _, engine = answered(suite, lambda messages, sampling: next(replies))
    memories = [block(prompt[-1]["content"], "memory") for prompt in engine.prompts]
    nothing = open_prompts(str(SUITES / "prompts.toml")).empty_memory
    assert memories[:4] == [nothing, "a fact", nothing, "more"]


def test_questions_come_from_a_file_of_the_original(files: HotpotFiles, tmp_path: Path) -> None:
    published = tmp_path / "eval_50.json"
    items = [
        {
            "context": "Document 1:\nA\nb",
            "input": f"Where was the maker of Object d{n} born?",
            "answers": [f"Town d{n}"],
            "num_docs": 50,
            "index": n,
        }
        for n in (9, 4, 7)
    ]
    published.write_text(json.dumps(items))
    suite = hotpot_suite(files, f"selection.file={json.dumps(str(published))}", num=3)
    records, _ = answered(suite, reading(town))
    assert set(map(tuple, asked(records).values())) == {("id-d9", "id-d4", "id-d7")}


def test_too_few_questions_are_an_error_before_the_first_item(files: HotpotFiles) -> None:
    suite = hotpot_suite(files, 'selection.engines=["scripted"]', "selection.candidates=3")
    with pytest.raises(ConfigError, match=r"3 of the first 3 questions are left .* `num=4`"):
        answered(suite, reading(town))


def test_a_run_does_not_resume_with_other_questions(files: HotpotFiles, tmp_path: Path) -> None:
    task = open_task("hotpotqa", {"docs": 5, "tokenizer": "bytes", **files.settings})
    for name, indices in (("one", (0, 1)), ("two", (1, 0))):
        write_examples(tmp_path / f"{name}.jsonl", [task.example(n) for n in indices])
    one, two = (
        hotpot_suite(files, f"selection.file={tmp_path / name}.jsonl", docs="[5]", num=2)
        for name in ("one", "two")
    )
    answered(one, reading(town), run_dir=tmp_path / "run")
    answered(one, reading(town), run_dir=tmp_path / "run")
    with pytest.raises(Exception, match=r"cannot resume .*sources.selection was"):
        answered(two, reading(town), run_dir=tmp_path / "run")


# --- the RULER table ------------------------------------------------------------------------------


def test_the_ruler_table_in_small(tmp_path: Path) -> None:
    """Needles by the share after "the answer is", to 0.01; SQuAD by containment either way."""
    essays, squad = tmp_path / "essays", tmp_path / "squad.json"
    essays.mkdir()
    (essays / "one.txt").write_text("The harbour was quiet in winter, and nobody came. " * 200)
    article = {
        "context": "Normandy is a region of France. " * 5,
        "qas": [
            {
                "id": str(n),
                "question": f"In which country is Normandy, number {n}?",
                "answers": [{"text": "France", "answer_start": 24}],
                "is_impossible": False,
            }
            for n in range(3)
        ],
    }
    unknown = {"id": "x", "question": "Why?", "answers": [], "is_impossible": True}
    other = [{"context": f"Town {n} is elsewhere. " * 9, "qas": [unknown]} for n in range(400)]
    squad.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [article, *other]}]}))
    suite = read_suite(
        SUITES / "ruler.toml",
        changes=[
            *SMALL,
            "agent.memory_tokens=900",
            *(f"tasks.{n}.tokens=[8192]" for n in range(3)),
            *('tasks.0.tasks=["ruler/niah_multivalue"]', 'tasks.1.tasks=["ruler/fwe"]'),
            *(f"sources.essays={essays}", f"sources.squad-dev={squad}", "num=2"),
        ],
    )

    def reply(messages: Sequence[Message], sampling: Sampling) -> str:
        prompt = messages[-1]["content"]
        question, memory = block(prompt, "problem"), block(prompt, "memory")
        if "<section>" in prompt:
            return f"{memory} {' '.join(re.findall(r'[0-9]{7}', block(prompt, 'section')))}"
        if "Normandy" in question:
            return "So the answer is Fran"
        numbers = re.findall(r"[0-9]{7}", memory)
        return f"<think>the answer is 0</think> So the answer is {', '.join(numbers[:3])}."

    records, _ = answered(suite, reply)
    scores = {(r.task, r.grader, r.score) for r in records}
    assert ("ruler/qa_1", "original_sub_em", 1.0) in scores
    assert ("ruler/niah_multivalue", "original_ruler", 0.75) in scores
    assert ("ruler/fwe", "original_ruler", 0.0) in scores
    assert len(scores) == 3


def test_answers_can_be_stopped_after_rulers_own_number_of_tokens() -> None:
    stopped = plan_items(read_suite(SUITES / "ruler.toml", changes=["reply_limit=generated"]))
    assert {(i.task, i.source.generated_tokens) for i in stopped.items} >= {
        *(("ruler/vt", 30), ("ruler/fwe", 50), ("ruler/qa_1", 32), ("ruler/niah_single_1", 128))
    }
    free = plan_items(read_suite(SUITES / "ruler.toml"))
    assert {(i.source.generated_tokens, i.source.graded_tokens) for i in free.items} == {
        (None, None)
    }


# --- the command ----------------------------------------------------------------------------------


def test_a_dry_run_describes_the_questions_and_opens_the_sources(
    files: HotpotFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(SUITES / "hotpotqa.toml"), "--engine", "scripted", "--dry-run"]
    arguments += ["--set", "length_tokenizer=bytes", "--set", "tokenizer=bytes", "--num", "2"]
    arguments += [*source(files, "dev"), *source(files, "paragraphs"), "--docs", "5"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("hotpotqa, ") == 1
    assert "vllm:Qwen/Qwen2.5-7B and vllm:Qwen/Qwen2.5-7B-Instruct do not answer" in out


def source(files: HotpotFiles, name: str) -> tuple[str, str]:
    return "--source", f"hotpotqa-{name}={files.settings[name]}"


def test_without_the_models_tokenizer_exact_windows_are_refused_at_once(
    files: HotpotFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chosen.jsonl"
    task = open_task("hotpotqa", {"docs": 5, "tokenizer": "bytes", **files.settings})
    write_examples(file, [task.example(0)])
    arguments = ["eval", str(SUITES / "hotpotqa.toml"), "--engine", "scripted", "--num", "1"]
    arguments += [
        "--set",
        "length_tokenizer=bytes",
        "--set",
        f"selection.file={file}",
        "--docs",
        "5",
    ]
    arguments += [*source(files, "dev"), *source(files, "paragraphs")]
    assert run([*arguments, "--run-dir", str(tmp_path / "run")]) == 2
    assert "--set section_ends=exact needs the tokenizer of scripted" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
