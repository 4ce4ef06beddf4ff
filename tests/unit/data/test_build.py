"""Building: the same bytes however it is done, stopping and going on, and what the manifest says."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from memagent.data.build import BuildJob, BuildProgress, build, is_built
from memagent.data.example import Evidence, Example, Passage
from memagent.data.formats.files import read_examples
from memagent.data.inspection import (
    Depths,
    Lengths,
    ManifestRow,
    depths_of,
    evidence_depths,
    lengths_of,
)
from memagent.data.tasks.registry import rebuild
from memagent.errors import ConfigError, DataError
from tests.support.hotpot import HotpotFiles, item, write_hotpot


@pytest.fixture
def files(tmp_path: Path) -> HotpotFiles:
    return write_hotpot(tmp_path / "sources", dev=[item(f"d{n}") for n in range(60)])


@pytest.fixture
def job(files: HotpotFiles, tmp_path: Path) -> BuildJob:
    settings: dict[str, Any] = {"docs": 12, "tokenizer": "bytes", "seed": 7, **files.settings}
    return BuildJob(task="hotpotqa", settings=settings, num=40, out=tmp_path / "dev.jsonl")


class Stopped(Exception):
    """Stands for a kill: nothing is tidied up after it."""


def stop_after(number: int) -> Any:
    def watch(progress: BuildProgress) -> None:
        if progress.num_done == number:
            raise Stopped

    return watch


def stopped(job: BuildJob, number: int) -> Path:
    """A build that came so far; its part."""
    with pytest.raises(Stopped):
        build(job, figure=False, on_progress=stop_after(number))
    return job.out.with_name(f"{job.out.name}.part")


def whole(job: BuildJob) -> bytes:
    """What the dataset has to be, built in one go elsewhere."""
    other = replace(job, out=job.out.with_name("whole.jsonl"))
    if not other.out.exists():
        build(other, figure=False)
    return other.out.read_bytes()


# --- the same bytes -------------------------------------------------------------------------------


def test_one_process_and_several_write_the_same_bytes(job: BuildJob) -> None:
    build(job, processes=3, figure=False)
    assert job.out.read_bytes() == whole(job)
    assert [example.origin.index for example in read_examples(job.out) if example.origin] == [
        *range(40)
    ]


def test_a_build_that_was_stopped_resumes_and_ends_with_the_same_bytes(job: BuildJob) -> None:
    stopped(job, 11)
    reported: list[BuildProgress] = []
    build(job, figure=False, on_progress=reported.append)
    assert reported[0] == BuildProgress(num_done=11, num_total=40, num_resumed=11)
    assert len(reported) == 30
    assert job.out.read_bytes() == whole(job)
    assert sorted(path.name for path in job.out.parent.iterdir() if path.is_file()) == [
        "dev.jsonl",
        "dev.jsonl.manifest.json",
        "whole.jsonl",
        "whole.jsonl.manifest.json",
    ]


@pytest.mark.parametrize("num_zeros", [0, 5000])
def test_lines_that_did_not_reach_the_disk_are_generated_again(
    job: BuildJob, num_zeros: int
) -> None:
    data = (part := stopped(job, 6)).read_bytes()
    part.write_bytes(data[: len(data) // 2] + b"\0" * num_zeros)
    reported: list[BuildProgress] = []
    build(job, figure=False, on_progress=reported.append)
    assert 0 < reported[0].num_resumed < 6
    assert job.out.read_bytes() == whole(job)


def test_other_formats_hold_the_same_examples(job: BuildJob) -> None:
    lines = whole(job)
    packed = replace(job, out=job.out.with_name("dev.jsonl.gz"))
    columns = replace(job, out=job.out.with_name("dev.parquet"))
    stopped(columns, 7)
    for other in (packed, columns):
        manifest = build(other, figure=False)
        assert manifest.sha256 == hashlib.sha256(other.out.read_bytes()).hexdigest()
        assert list(read_examples(other.out)) == list(
            read_examples(job.out.with_name("whole.jsonl"))
        )
    assert gzip.decompress(packed.out.read_bytes()) == lines
    assert not [*job.out.parent.glob("*.part"), *job.out.parent.glob(".*")]


# --- how texts are stored -------------------------------------------------------------------------


def test_only_the_origin_is_kept_where_that_is_asked_for(job: BuildJob) -> None:
    manifest = build(replace(job, store="origin"), figure=False)
    assert manifest.num_with_text == 0
    bare = list(read_examples(job.out))
    assert all(example.documents is None for example in bare)
    whole(job)
    with_text = list(read_examples(job.out.with_name("whole.jsonl")))
    assert [rebuild(example) for example in bare] == with_text
    assert job.out.stat().st_size < 2500 * len(bare)


def test_auto_keeps_texts_up_to_64k_tokens(files: HotpotFiles, tmp_path: Path) -> None:
    for name, tokens, kept in (("short", 65_536, 2), ("long", 67_000, 0)):
        paragraphs = tmp_path / "many.jsonl"
        paragraphs.write_text(
            "".join(
                json.dumps({"title": f"Many {n}", "text": f"{n} " + "so it goes on " * 40}) + "\n"
                for n in range(200)
            )
        )
        settings = {"tokens": tokens, "tokenizer": "bytes", **files.settings}
        settings["paragraphs"] = str(paragraphs)
        job = BuildJob(task="hotpotqa", settings=settings, num=2, out=tmp_path / f"{name}.jsonl")
        assert build(job, figure=False).num_with_text == kept


# --- refusals -------------------------------------------------------------------------------------


def test_a_dataset_that_is_there_is_not_replaced_unless_forced(job: BuildJob) -> None:
    job.out.write_text("precious")
    with pytest.raises(DataError, match=r"dev.jsonl exists; .*`force`"):
        build(job)
    assert job.out.read_text() == "precious"
    build(job, force=True, figure=False)
    assert job.out.read_bytes() == whole(job)


def test_what_is_left_of_another_build_is_not_mixed_in(job: BuildJob) -> None:
    stopped(job, 5)
    other = replace(job, settings={**job.settings, "seed": 8})
    with pytest.raises(
        DataError, match=r"belongs to another build \(seed is 7 there and 8 here\); finish"
    ):
        build(other)
    build(other, force=True, figure=False)
    assert {example.seed for example in read_examples(job.out)} == {8}


def test_a_part_that_was_changed_is_refused_unless_forced(job: BuildJob) -> None:
    part = stopped(job, 5)
    part.write_bytes(part.read_bytes().replace(b'"question"', b'"Question"', 2))
    with pytest.raises(DataError, match=r"part is damaged; start the build again with `force`"):
        build(job)
    build(job, force=True, figure=False)
    assert job.out.read_bytes() == whole(job)


def test_a_build_that_is_under_way_is_left_alone(job: BuildJob) -> None:
    with FileLock(job.out.with_name(f".{job.out.name}.lock")):  # noqa: SIM117
        with pytest.raises(DataError, match="is being built by another process"):
            build(job)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num": 61}, r"hotpotqa has 60 different examples here, fewer than num=61; lower `num`"),
        ({"num": 0}, r"num=0: a dataset has 1 to 1,000,000,000 examples"),
        ({"out": Path("x.json")}, r"x.json: a dataset ends in .jsonl, .jsonl.gz, .parquet"),
        ({"task": "hotpot"}, r"there is no task 'hotpot'; did you mean hotpotqa\?"),
        ({"settings": {"docs": 9, "tokens": 9000}}, r"docs=200 or as tokens=28000"),
    ],
)
def test_a_wrong_job_is_refused(job: BuildJob, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        build(replace(job, **changes))
    assert not list(job.out.parent.glob("*.part"))


def test_an_error_in_a_worker_process_is_raised_here(job: BuildJob, files: HotpotFiles) -> None:
    long = item("long")
    gold = long["supporting_facts"][0][0]
    [sentences] = [sentences for title, sentences in long["context"] if title == gold]
    sentences.append("word " * 2000)
    sources = write_hotpot(job.out.parent / "mixed", dev=[item("a"), item("b"), long, item("c")])
    settings = {"tokens": 2000, "tokenizer": "bytes", "seed": 0, **sources.settings}
    broken = replace(job, settings=settings, num=4)
    with pytest.raises(DataError, match=r"tokens=2000 is below the .* id-long's gold paragraphs"):
        build(broken, processes=2)


def test_the_manifest_counts_examples_with_fewer_distractors_of_their_own(job: BuildJob) -> None:
    long = item("long")
    gold = {title for title, _ in long["supporting_facts"]}
    for title, sentences in long["context"]:
        if title not in gold:
            sentences.append("word " * 2000)
    others = [item(f"q{number}") for number in range(40)]
    sources = write_hotpot(job.out.parent / "mixed", dev=[long, *others])
    settings = {"tokens": 2000, "tokenizer": "bytes", "seed": 0, **sources.settings}
    manifest = build(replace(job, settings=settings, num=41), figure=False)
    assert manifest.about["examples with fewer distractors of their own"] == 1


# --- the manifest ---------------------------------------------------------------------------------


def test_the_manifest_says_what_the_dataset_is(job: BuildJob) -> None:
    build(job, figure=False)
    manifest = json.loads(job.out.with_name("dev.jsonl.manifest.json").read_text())
    examples = list(read_examples(job.out))
    lengths = [len(example.text().encode()) for example in examples]
    data = job.out.read_bytes()
    assert manifest["sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["num_bytes"] == len(data)
    assert manifest["num_examples"] == manifest["num_with_text"] == 40
    assert manifest["settings"]["docs"] == 12
    assert manifest["settings"]["seed"] == 7
    dev = Path(job.settings["dev"]).read_bytes()
    assert manifest["sources"]["hotpotqa-dev"] == hashlib.sha256(dev).hexdigest()
    assert manifest["tokens"] == {
        "min": min(lengths),
        "mean": round(sum(lengths) / 40, 1),
        "max": max(lengths),
        "total": sum(lengths),
    }
    assert manifest["depth"]["num"] == sum(manifest["depth"]["histogram"]) == 80
    assert manifest["about"]["pool"] == 300


def test_the_same_build_gives_the_same_manifest_and_figure(job: BuildJob) -> None:
    pytest.importorskip("matplotlib")
    written = []
    for name in ("a", "b"):
        out = job.out.parent / name / "dev.jsonl"
        build(replace(job, out=out))
        written.append([path.read_bytes() for path in sorted(out.parent.iterdir())])
    assert len(written[0]) == 3
    assert written[0] == written[1]
    assert b"depth in the text" in written[0][1]


def test_a_dataset_is_known_again_by_its_manifest(job: BuildJob) -> None:
    assert not is_built(job)
    build(job, figure=False)
    assert is_built(job)
    assert not is_built(replace(job, num=39))
    assert not is_built(replace(job, settings={**job.settings, "docs": 13}))


def test_depth_is_the_middle_of_a_paragraph_with_evidence() -> None:
    first, second = Passage(text="a" * 10, title="A"), Passage(text="b" * 20, title="B")
    marks = [Evidence(document=1, start=n, end=n + 1, text="b") for n in (0, 19)]
    example = Example(
        id="x",
        task="t",
        question="q",
        answers=("b",),
        documents=(first, second),
        evidence=tuple(marks),
    )
    # "Document 1:\nA\n" is 14 characters, so the text has 14 + 10 + 2 + 14 + 20 = 60
    assert evidence_depths(example) == [(40 + 10) / 60]
    alone = replace(example, documents=(Passage(text="b" * 20),))
    single = replace(alone, evidence=tuple(replace(mark, document=0) for mark in marks))
    assert evidence_depths(single) == [0.5 / 20, 19.5 / 20]


def test_lengths_and_depths_are_counted() -> None:
    rows = [
        ManifestRow(num_tokens=tokens, has_text=True, num_answers=1, depths=(0.05, 0.95))
        for tokens in (10, 20, 60)
    ]
    assert lengths_of(rows) == Lengths(min=10, mean=30.0, max=60, total=90)
    assert depths_of(rows) == Depths(num=6, histogram=[3, *[0] * 8, 3], p_value=None)
    many = depths_of(rows * 20)
    assert many is not None
    assert many.p_value == 0.0
    assert depths_of([replace(rows[0], depths=())]) is None
    assert lengths_of([replace(rows[0], num_tokens=None)]) is None
