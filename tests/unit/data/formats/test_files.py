"""Examples in files: what is written is read back, byte for byte the same, and mistakes are named."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.data.example import Evidence, Example, Origin, Passage
from memagent.data.formats.files import (
    GROUP_CHARS,
    ExampleWriter,
    from_json,
    read_examples,
    write_examples,
)
from memagent.errors import DataError

ENDINGS = ("jsonl", "jsonl.gz", "parquet")

FOX = Example(
    id="fox-0",
    task="toy",
    question="Which number belongs to the fox?",
    answers=("512",),
    documents=(
        Passage(title="Farm", text="A hen. The number of the fox is 512. A cow."),
        Passage(text="Grünes Gras\u2028und Café."),
    ),
    evidence=(Evidence(document=0, start=7, end=36, text="The number of the fox is 512."),),
    origin=Origin(
        task="toy", settings={"tokens": 64, "b": [1, 2]}, index=3, sources={"farm": "ab"}
    ),
    target_tokens=64,
    num_tokens=60,
    seed=7,
    text_sha256="00",
    metadata={"z": 1, "a": {"y": None, "x": 0.5}},
)
FOX_LINE = (
    '{"id": "fox-0", "task": "toy", "question": "Which number belongs to the fox?", '
    '"answers": ["512"], "match": "any", "grader": "lenient", "documents": '
    '[{"text": "A hen. The number of the fox is 512. A cow.", "title": "Farm"}, '
    '{"text": "Grünes Gras\u2028und Café.", "title": ""}], '
    '"evidence": [{"document": 0, "start": 7, "end": 36, '
    '"text": "The number of the fox is 512.", "note": ""}], '
    '"origin": {"task": "toy", "settings": {"b": [1, 2], "tokens": 64}, "index": 3, '
    '"sources": {"farm": "ab"}}, "target_tokens": 64, "num_tokens": 60, "seed": 7, '
    '"text_sha256": "00", "metadata": {"a": {"x": 0.5, "y": null}, "z": 1}}'
)

# --- round trips ----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
numbers = st.integers(min_value=-(2**63), max_value=2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
free_dicts = st.dictionaries(texts, values, max_size=3)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    passages = tuple(
        draw(st.lists(st.builds(Passage, text=texts, title=texts), min_size=1, max_size=3))
    )
    evidence = []
    for _ in range(draw(st.integers(0, 2))):
        document = draw(st.integers(0, len(passages) - 1))
        text = passages[document].text
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, len(text)))
        evidence.append(
            Evidence(
                document=document, start=start, end=end, text=text[start:end], note=draw(texts)
            )
        )
    return Example(
        id=draw(texts),
        task=draw(texts),
        question=draw(texts),
        answers=tuple(draw(st.lists(texts, max_size=3))),
        match=draw(st.sampled_from(["any", "all"])),
        grader=draw(texts),
        documents=passages if draw(st.booleans()) else None,
        evidence=tuple(evidence),
        origin=draw(
            st.none()
            | st.builds(
                Origin,
                task=texts,
                settings=free_dicts,
                index=st.integers(0, 2**40),
                sources=st.dictionaries(texts, texts, max_size=2),
            )
        ),
        target_tokens=draw(st.none() | st.integers(0, 2**40)),
        num_tokens=draw(st.none() | st.integers(0, 2**40)),
        seed=draw(numbers),
        text_sha256=draw(texts),
        metadata=draw(free_dicts),
    )


@settings(max_examples=60, deadline=None)
@given(made=st.lists(examples(), max_size=3))
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_written_is_read_back(
    made: list[Example], ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / f"made.{ending}"
    assert write_examples(path, made) == len(made)
    assert list(read_examples(path)) == made
    first = path.read_bytes()
    write_examples(path, made)
    assert path.read_bytes() == first, "the same examples give the same bytes"


def test_a_line_is_these_bytes(tmp_path: Path) -> None:
    write_examples(tmp_path / "fox.jsonl", [FOX])
    assert (tmp_path / "fox.jsonl").read_bytes() == f"{FOX_LINE}\n".encode()
    packed = _written(tmp_path, "jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == f"{FOX_LINE}\n{FOX_LINE}\n".encode()


def test_gzipped_lines_say_nothing_of_when_and_where(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz"
    write_examples(one, [FOX])
    write_examples(two, [FOX])
    assert one.read_bytes() == two.read_bytes()


def test_parquet_is_cut_into_groups_by_the_length_of_texts(tmp_path: Path) -> None:
    text = "x" * (GROUP_CHARS // 3)
    long = [
        replace(FOX, id=str(number), documents=(Passage(text=text),), evidence=())
        for number in range(7)
    ]
    path = tmp_path / "long.parquet"
    write_examples(path, long)
    about = pq.ParquetFile(path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [3, 3, 1]
    assert [example.id for example in read_examples(path)] == [str(i) for i in range(7)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_memory_does_not_grow_with_the_file(ending: str, tmp_path: Path) -> None:
    script = f"""
import resource
from pathlib import Path
from memagent.data.example import Example, Passage
from memagent.data.formats.files import read_examples, write_examples

def make(num_examples):
    for number in range(num_examples):
        text = f"{{number:06d}}" * 100_000
        yield Example(id=str(number), task="t", question="q", answers=("a",),
                      documents=(Passage(text=text),))

def peak(num_examples):
    path = Path({str(tmp_path)!r}) / f"{{num_examples}}.{ending}"
    write_examples(path, make(num_examples))
    assert sum(1 for _ in read_examples(path)) == num_examples
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

few, many = peak(40), peak(240)  # 24 MB and 144 MB of text
assert many - few < 40, (few, many)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# --- what is not taken ----------------------------------------------------------------------------


def _written(folder: Path, ending: str) -> Path:
    path = folder / f"fox.{ending}"
    write_examples(path, [FOX, FOX])
    return path


def _changed(**values: Any) -> str:
    return json.dumps({**json.loads(FOX_LINE), **values})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "fox-0", ', "line 2: invalid JSON: EOF while parsing"),
        ("[]", "line 2: input should be an object"),
        (_changed(question=5), "line 2: question: input should be a valid string"),
        (_changed(match="some"), "line 2: match: input should be 'any' or 'all'"),
        (_changed(seed="7"), "line 2: seed: input should be a valid integer"),
        (_changed(answer="512"), "line 2: answer is not known; has it been written by a later"),
        (_changed(documents=[{"title": "x"}]), "line 2: documents.0.text: field required"),
        (
            _changed(evidence=[{"document": 2, "start": 0, "end": 0, "text": ""}]),
            "line 2: evidence.0 is in document 2, but there are 2",
        ),
        (
            _changed(evidence=[{"document": 0, "start": 8, "end": 37, "text": "The number"}]),
            "line 2: evidence.0 differs from characters 8 to 37 of document 0",
        ),
        (
            _changed(evidence=[{"document": 0, "start": -4, "end": -1, "text": "cow"}]),
            "line 2: evidence.0 differs from characters -4 to -1 of document 0",
        ),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{FOX_LINE}\n{line}\n{FOX_LINE}\n")
    found = read_examples(path)
    assert next(found) == FOX
    with pytest.raises(DataError) as caught:
        next(found)
    assert str(caught.value).startswith(f"{path}, {message}")
    assert "\n" not in str(caught.value)


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    write_examples(path, [FOX, replace(FOX, evidence=(replace(FOX.evidence[0], start=0),))])
    with pytest.raises(DataError, match=r"bad\.parquet, row 2: evidence\.0 differs from"):
        list(read_examples(path))


def test_a_parquet_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"id": ["a"], "prompt": ["b"]}), path)
    with pytest.raises(DataError, match="it has no column task; `memagent data convert`"):
        list(read_examples(path))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_cut_short_is_one_line(ending: str, tmp_path: Path) -> None:
    path = _written(tmp_path, ending)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError) as caught:
        list(read_examples(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_there_is_one_line(ending: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(read_examples(tmp_path / f"nowhere.{ending}"))


def test_an_ending_we_do_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fox\.csv: a dataset ends in \.jsonl, \.jsonl\.gz"):
        write_examples(tmp_path / "fox.csv", [FOX])


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        write_examples(tmp_path / "fox.jsonl", [replace(FOX, question="\ud800")])
    assert list(tmp_path.iterdir()) == []


# --- all or nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_appears_only_when_it_is_complete(ending: str, tmp_path: Path) -> None:
    def failing() -> Iterator[Example]:
        yield FOX
        raise KeyError("something else")

    path = tmp_path / f"fox.{ending}"
    with pytest.raises(KeyError):
        write_examples(path, failing())
    assert list(tmp_path.iterdir()) == []
    write_examples(path, [FOX])
    with pytest.raises(KeyError):
        write_examples(path, failing())
    assert list(read_examples(path)) == [FOX], "what was there before is kept"


def test_folders_are_created(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "fox.jsonl"
    with ExampleWriter(path) as writer:
        writer.write(FOX)
        assert not path.exists()
    assert writer.num_written == 1
    assert list(read_examples(path)) == [FOX]


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*fox\.jsonl: "):
        write_examples(tmp_path / "file" / "fox.jsonl", [FOX])


def test_a_line_needs_only_an_id_a_question_and_answers() -> None:
    example = from_json('{"id": "a", "question": "?", "answers": []}', "here")
    assert example == Example(id="a", question="?", answers=())
    assert (example.task, example.documents, example.text()) == ("custom", (), "")


def test_documents_that_are_left_out_are_rebuilt_where_there_is_an_origin() -> None:
    line = {
        "id": "a",
        "question": "?",
        "answers": [],
        "origin": {"task": "t", "settings": {}, "index": 0},
    }
    assert from_json(json.dumps(line), "here").documents is None


def test_parquet_without_its_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    expected = r'^parquet files need the library pyarrow: pip install "memagent\[data\]"$'
    with pytest.raises(DataError, match=expected):
        write_examples(tmp_path / "a.parquet", [])
    assert list(tmp_path.iterdir()) == []
