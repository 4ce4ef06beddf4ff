"""tools/keep_results.py and tools/make_results.py: small records of evaluations, and the page made from them."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memagent.eval.records import ItemRecord, read_items
from memagent.eval.report.rows import Entry
from memagent.runs import Run

ROOT = Path(__file__).resolve().parents[2]
Scripts = tuple[ModuleType, ModuleType]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module("keep_results"), importlib.import_module("make_results")
    for name in ("keep_results", "make_results", "compare_lengths"):
        sys.modules.pop(name, None)


def step(number: int, *, seconds: float, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        **{"kind": "read", "index": number, "seconds": seconds, "flags": list(flags)},
        "usage": {"completion_tokens": 10 * number},
    }


def record(number: int, *, right: bool = True, tokens: int = 7168, **more: Any) -> ItemRecord:
    return ItemRecord(
        id=f"hotpotqa/dev/{tokens}-tokens/7/q{number}",
        task="hotpotqa",
        method="reader",
        target_tokens=tokens,
        num_tokens=tokens,
        index=number,
        seed=1,
        status="ok",
        answer="\\boxed{Rome}",
        answers=("Rome",) if right else ("Paris",),
        match="any",
        grader="strict",
        score=float(right),
        scores={"original_sub_em_boxed": 1.0},
        **more,
    )


def write(scripts: Scripts, folder: Path, *records: ItemRecord) -> None:
    manifest = {"format": 1, "kind": "eval", "model": "m", "methods": {"reader": {}}}
    scripts[0].keep(folder, {**manifest, "num_items": len(records)}, records)


def test_what_traces_say_about_reading_is_kept_as_numbers(
    scripts: Scripts,
) -> None:
    steps = [
        step(0, seconds=1.0, flags=("memory_kept",)),
        step(1, seconds=3.0, flags=("memory_cut", "reply_cut")),
        {"kind": "answer", "index": 2, "seconds": 9.0},
    ]
    kept = scripts[0].small(record(0, trace={"steps": steps}, extracted="Rome", seconds=1.23456))
    assert "trace" not in kept
    assert kept["seconds"] == 1.23
    assert kept["metadata"]["reading"] == {
        **{"section_seconds": 2.0, "first_section_seconds": 2.0, "reply_tokens": 5.0},
        **{"kept_memories": 1, "cut_memories": 1},
    }
    assert ItemRecord.from_dict(kept) == replace(record(0), seconds=1.23, metadata=kept["metadata"])


def test_a_run_is_kept_without_paths(scripts: Scripts, tmp_path: Path) -> None:
    manifest = {"kind": "eval", "model": "/somewhere/model.gguf", "methods": {"reader": {}}}
    with Run.create(tmp_path / "run", {**manifest, "num_items": 1, "command": None}) as run:
        run.append(record(0).to_json())
    scripts[0].main([str(tmp_path / "trained"), str(tmp_path / "run")])
    kept = tmp_path / "trained" / "run"
    assert json.loads((kept / "run.json").read_text())["model"] == "model.gguf"
    assert "somewhere" not in (kept / "run.json").read_text()
    assert list(read_items(kept)) == [record(0)]


def test_some_methods_of_a_run_are_kept_without_the_others(
    scripts: Scripts, tmp_path: Path
) -> None:
    read = {"reading": {"kept_memories": 3, "cut_memories": 0}}
    records = [record(0, metadata=read), replace(record(0), method="direct")]
    manifest = {"format": 1, "kind": "eval", "model": "m"}
    manifest |= {"methods": {"reader": {}, "direct": {}}}
    scripts[0].keep(tmp_path / "run", {**manifest, "num_items": 2}, records)
    for name in ("reader", "direct"):
        scripts[0].main([str(tmp_path / name), str(tmp_path / "run"), "--method", name])
        kept = json.loads((tmp_path / name / "run" / "run.json").read_text())
        assert (kept["num_items"], list(kept["methods"])) == (1, [name])
    assert list(read_items(tmp_path / "reader" / "run")) == records[:1]
    with pytest.raises(SystemExit, match="has no method bm25, only reader, direct"):
        scripts[0].main([str(tmp_path / "none"), str(tmp_path / "run"), "--method", "bm25"])


def test_a_validation_is_kept_with_further_grades(scripts: Scripts, tmp_path: Path) -> None:
    notes = {"method": {"metrics": {"captured": 1.0, "retained": 0.5}}}
    longer = replace(
        record(3), grader="reward", scores={}, answers=("Rome, Italy",), score=0.0, metadata=notes
    )
    file = tmp_path / "step-000037.jsonl"
    file.write_text(json.dumps(longer.to_dict()) + "\n")
    scripts[0].main([str(tmp_path / "trained"), "--validation", str(file)])
    (line,) = (tmp_path / "trained" / "hotpotqa-7k" / "steps.jsonl").read_text().splitlines()
    kept = ItemRecord.from_dict(json.loads(line))
    assert (kept.grader, kept.score, kept.captured, kept.retained) == ("strict", 0.0, 1.0, 0.5)
    assert kept.scores == {"original_sub_em_boxed": 1.0, "lenient": 0.0, "f1": pytest.approx(2 / 3)}


def test_the_page_compares_methods_and_lengths_on_the_same_questions(
    scripts: Scripts, tmp_path: Path
) -> None:
    held = {"captured": 1.0, "retained": 1.0}
    short = [record(n, **held) for n in range(4)]
    long = [record(n, right=n < 2, tokens=3_670_016, **held) for n in range(3)]
    write(scripts, tmp_path / "trained" / "short", *short)
    write(scripts, tmp_path / "trained" / "long", *long)
    write(scripts, tmp_path / "warm-start" / "short", *(record(n, right=n == 3) for n in range(4)))
    text, plots = scripts[1].make_page(tmp_path)
    assert (
        "| 7K | trained | 4 | 100.0 % (51.0 to 100.0) | 100.0 % (51.0 to 100.0) | 100.0 %" in text
    )
    assert "| 7K | trained against warm start | 4 | +75.0 (" in text
    assert "| 3 | 0 | 0.25 |" in text  # better, worse, and p of three questions
    assert "| trained | 7K | 3.5M | 3 | 100.0 to 66.7 % | -33.3 (" in text
    assert "| published | RL-MemAgent-7B (v1) |" in text
    assert "validations of a training run" not in text
    assert {plot.name for plot in plots} == {"hotpotqa-paper", "hotpotqa-strict", "hotpotqa-memory"}


def test_losses_are_told_apart_by_what_the_last_memory_held(
    scripts: Scripts, tmp_path: Path
) -> None:
    def reading(number: int, tokens: int, *, retained: float = 1.0, **more: Any) -> ItemRecord:
        counts = {"kept_memories": 1, "cut_memories": int(tokens > 7168 and number == 0)}
        notes = {"num_sections": 4, "captured": 1.0, "metadata": {"reading": counts}}
        return record(number, tokens=tokens, retained=retained, **notes, **more)

    short = [reading(n, 7168) for n in range(5)]
    long = [reading(n, 28672, right=n > 1, retained=float(n != 1)) for n in range(4)]
    write(scripts, tmp_path / "trained" / "short", *short)
    write(scripts, tmp_path / "trained" / "long", *long)
    text, _ = scripts[1].make_page(tmp_path)
    assert "| 7K | 4 | 100.0 % (51.0 to 100.0) |" in text  # of five: four are in both
    assert "| 4 of 4 | 0 of 0 | 3.0 | 0 |" in text
    assert "| 2 of 3 | 0 of 1 | 3.0 | 1 |" in text
    assert "right at 7K and wrong at 28K; 1 of 2 have all evidence in the last memory" in text
    assert "| Paris | Rome | 100 % | yes |" in text
    assert "| Paris | Rome | 0 % | yes |" in text
    assert "| 7K | 28K | 3 | -33.3 (" in text  # with all evidence at both lengths


def test_answers_without_a_box_are_shown_by_other_rules(scripts: Scripts, tmp_path: Path) -> None:
    plain = [replace(record(n, right=n > 0), answer="It is Rome, in Italy.") for n in range(2)]
    write(scripts, tmp_path / "trained" / "short", *(record(n) for n in range(3)))
    assert "`contains`" not in scripts[1].make_page(tmp_path)[0]
    write(scripts, tmp_path / "base" / "short", *(replace(one, score=0.0) for one in plain))
    text, _ = scripts[1].make_page(tmp_path)
    assert "| 7K | trained | 2 of 2 | 100.0 % | 100.0 % | 100.0 % | 100.0 % |" in text
    assert "| 7K | base | 0 of 2 | 0.0 % | 0.0 % | " in text
    assert "| 50.0 % |\n" in text  # the right one of two, by `contains`


def test_tasks_that_lost_evidence_are_listed(scripts: Scripts, tmp_path: Path) -> None:
    def needle(name: str, number: int, retained: float) -> ItemRecord:
        grades = {"strict": 1.0, "original_ruler_boxed": 1.0}
        found = record(number, tokens=8192, captured=1.0, retained=retained)
        return replace(found, id=f"{name}/{number}", task=name, scores=grades)

    items = [needle("ruler/niah_single_1", n, 1.0) for n in range(2)]
    items += [needle("ruler/niah_multiquery", n, n / 2) for n in range(3)]
    write(scripts, tmp_path / "trained" / "ruler", *items)
    write(scripts, tmp_path / "trained" / "hotpotqa", record(0))
    text, _ = scripts[1].make_page(tmp_path)
    assert "In the other 1 of 2 lines all of it was" in text
    assert "| niah_multiquery | trained | 8K | 3 | 100.0 % (43.9 to 100.0) | 33.3 % (" in text


def test_runs_that_are_not_comparable_are_refused(scripts: Scripts, tmp_path: Path) -> None:
    write(scripts, tmp_path / "trained" / "one", record(0))
    write(scripts, tmp_path / "trained" / "two", record(0))
    with pytest.raises(Exception, match="the same items of trained"):
        scripts[1].make_page(tmp_path)
    with pytest.raises(SystemExit, match="has no records"):
        scripts[1].make_page(tmp_path / "nowhere")


def test_time_of_a_section_is_that_of_long_readings(scripts: Scripts) -> None:
    measured = {"reading": {"first_section_seconds": 0.5, "section_seconds": 0.55}}
    long = record(0, tokens=3_670_016, num_sections=1800, metadata=measured)
    (found,) = scripts[1].section_times([Entry("trained", long), Entry("trained", record(1))])
    assert (found.length, found.sections, found.first, found.all) == ("3.5M", 1800, 0.5, 0.55)
    assert "| 3.5M | trained | 1 | 1,800 | 0.500 | 0.550 | 1.10 |" in scripts[1].time_table([found])


def test_the_page_in_the_repository_is_made_from_its_records(
    scripts: Scripts,
) -> None:
    text, plots = scripts[1].make_page(ROOT / "results")
    page = ROOT / "docs" / "results.md"
    assert page.read_text(encoding="utf-8") == text, "run python tools/make_results.py results"
    drawn = {f"{plot.name}.svg" for plot in plots}
    assert {path.name for path in page.with_suffix("").glob("*.svg")} == drawn
