"""Records of JSON files, one at a time."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent.data.formats.json_stream import read_records
from memagent.errors import DataError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=8), values, max_size=4) | st.text(max_size=40)


@settings(max_examples=80, deadline=None)
@given(
    made=st.lists(objects, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    block=st.integers(1, 40),
    packed=st.booleans(),
)
def test_an_array_is_read_as_json_reads_it(
    made: list[Any],
    indent: int | None,
    ascii_only: bool,
    block: int,
    packed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = json.dumps(made, indent=indent, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "replace")
    made = json.loads(data)
    path = tmp_path_factory.mktemp("array") / "array.json"
    path.write_bytes(gzip.compress(data) if packed else data)
    found = list(read_records(path, block_bytes=block))  # few, so that every place is cut sometimes
    assert found == list(enumerate(made, start=1))


def test_lines_are_counted_with_the_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": "\u2028"}\n\n{"a": 2}')
    assert list(read_records(path)) == [(1, {"a": "\u2028"}), (3, {"a": 2})]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "", "a.json is empty"),
        ("a.json", " \n ", "a.json is empty"),
        ("a.json", '[{"a": 1}, {"a": 2', "record 2: it is truncated, or not JSON"),
        ("a.json", '[{"a": 1}', "record 2: it is truncated"),
        ("a.json", '[{"a": 1} {"a": 2}]', "record 2: expected ',', found '{'"),
        ("a.json", '[{"a": 1}, {a: 2}' + " " * 50, "record 2: not JSON (Expecting property"),
        ("a.json", '[{"a": 1}, 5]', "record 2: a record must be an object"),
        ("a.json", '[{"a": NaN}' + " " * 50 + "]", "record 1: not JSON (NaN is not a number"),
        ("a.json", '[{"a": 1}] more', "something follows the end of the array"),
        ("a.jsonl", '{"a": 1}\n{"a": 2', "line 2: not JSON (Expecting ',' delimiter"),
        ("a.jsonl", '{"a": 1}\n{"a": Infinity}', "line 2: not JSON (Infinity is not a number"),
    ],
)
def test_errors_name_their_place(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        list(read_records(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz"])
def test_truncated_gzip_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    lines = [json.dumps({"number": number, "text": str(number**99)}) for number in range(2000)]
    text = "\n".join(lines) if "jsonl" in name else f"[{','.join(lines)}]"
    packed = gzip.compress(text.encode())
    path = tmp_path / name
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"(line|record) \d+.*gzip data ends early"):
        list(read_records(path))
    path.write_bytes(packed[:200] + b"????" + packed[204:])
    with pytest.raises(DataError, match=r"is damaged|not JSON|not UTF-8|truncated"):
        list(read_records(path))


def test_what_is_not_utf_8_is_named(tmp_path: Path) -> None:
    for name, data in (("a.json", b'[{"a": "\xff"}]'), ("a.jsonl", b'{"a": "\xff"}')):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="not UTF-8"):
            list(read_records(tmp_path / name))


def test_memory_is_that_of_a_record_not_of_the_array(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    record = json.dumps({"context": "x" * 1_000_000})
    path.write_text("[" + ",".join([record] * 100) + "]")
    script = f"""
import resource
from pathlib import Path
from memagent.data.formats.json_stream import read_records
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(1 for _ in read_records(Path({str(path)!r}))) == 100
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert grown < 30, grown
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
