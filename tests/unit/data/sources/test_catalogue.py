"""Sources: found, fetched once, checked ever after, and read as they are published."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memagent.data import choices as sources
from memagent.data.choices import Source
from memagent.data.sources.cache import cached_path, open_source, sha256_of
from memagent.data.sources.readers import (
    HotpotItem,
    Paragraph,
    SquadItem,
    SupportingFact,
    hotpot_items,
    hotpot_paragraphs,
    squad_items,
    texts_in,
)
from memagent.errors import ConfigError, DataError
from tests.support.file_server import FileServer, serving
from tests.support.published import Published

RIVER = ["The Aare is a river.", " It flows through Bern."]
BERN = ["Bern is the capital of Switzerland."]
ITEM: dict[str, Any] = {
    "_id": "q1",
    "question": "Which river flows through the capital of Switzerland?",
    "answer": "Aare",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Aare", 1], ["Bern", 0]],
    "context": [["Aare", RIVER], ["Oslo", ["Oslo is in Norway."]], ["Bern", BERN]],
}
SQUAD: dict[str, Any] = {
    "version": "v2.0",
    "data": [
        {
            "title": "Rivers",
            "paragraphs": [
                {
                    "context": "The Aare flows through Bern, the Aare does.",
                    "qas": [
                        {
                            "id": "s1",
                            "question": "What flows through Bern?",
                            "answers": [
                                {"text": "Aare", "answer_start": 4},
                                {"text": "The Aare", "answer_start": 0},
                                {"text": "Aare", "answer_start": 33},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "id": "s2",
                            "question": "What flows through Rome?",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                }
            ],
        }
    ],
}


def write(path: Path, value: Any) -> Path:
    """A value as JSON or, by the name, as lines of it; gzipped by the name as well."""
    is_lines = ".jsonl" in path.name
    text = "\n".join(json.dumps(one) for one in value) if is_lines else json.dumps(value)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dev.json", "dev.json.gz", "dev.jsonl", "dev.jsonl.gz"])
def test_hotpotqa_is_read_from_arrays_and_lines(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [ITEM, {**ITEM, "_id": "q2"}])
    first, second = hotpot_items(path)
    assert first == HotpotItem(
        id="q1",
        question="Which river flows through the capital of Switzerland?",
        answer="Aare",
        type="bridge",
        level="hard",
        context=(
            Paragraph(title="Aare", sentences=tuple(RIVER)),
            Paragraph(title="Oslo", sentences=("Oslo is in Norway.",)),
            Paragraph(title="Bern", sentences=tuple(BERN)),
        ),
        gold_titles=("Aare", "Bern"),
        supporting_facts=(
            SupportingFact(title="Aare", sentence=1),
            SupportingFact(title="Bern", sentence=0),
        ),
    )
    assert second == replace(first, id="q2")


def test_sentences_join_to_the_text_and_know_their_place() -> None:
    paragraph = Paragraph(title="Aare", sentences=("The Aare. ", " It flows. ", ""))
    assert paragraph.text == "The Aare.  It flows. "
    spans = [paragraph.sentence_span(index) for index in range(3)]
    assert [paragraph.text[start:end] for start, end in spans] == ["The Aare.", "It flows.", ""]


def test_facts_that_do_not_exist_are_counted_and_left_out(tmp_path: Path) -> None:
    unsplit = [["Aare", ["".join(RIVER)]], ["Bern", "".join(BERN)]]
    facts = [["Aare", [0, 1]], ["Bern", 0], ["Rome", 0], ["Bern", -1]]
    path = write(tmp_path / "dev.json", [{**ITEM, "context": unsplit, "supporting_facts": facts}])
    (item,) = hotpot_items(path)
    assert item.context[1] == Paragraph(title="Bern", sentences=tuple(BERN))
    assert [(fact.title, fact.sentence) for fact in item.supporting_facts] == [
        ("Aare", 0),
        ("Bern", 0),
    ]
    assert item.gold_titles == ("Aare", "Bern")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "record 2: question: input should be a valid string"),
        ({"question": ""}, "record 2: question: string should have at least 1 character"),
        ({"context": []}, "record 2: context: list should have at least 1 item"),
        ({"context": [["Aare"]]}, "record 2: context.0.1: field required"),
        ({"context": [["Aare", [5]]]}, "record 2: context.0.1.0: input should be a valid string"),
        ({"supporting_facts": [["Aare", "1"]]}, "record 2: supporting_facts.0.1.0: input should"),
    ],
)
def test_a_wrong_record_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "dev.json", [ITEM, {**ITEM, **change}])
    with pytest.raises(DataError) as caught:
        list(hotpot_items(path))
    assert str(caught.value).startswith(f"{path}, {message}")


def test_a_missing_field_is_named_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.jsonl", [{name: ITEM[name] for name in ITEM if name != "answer"}])
    with pytest.raises(DataError, match=r"dev\.jsonl, line 1: answer: field required"):
        list(hotpot_items(path))


def test_paragraphs_come_from_pools_and_from_questions_each_title_once(tmp_path: Path) -> None:
    pool = [{"title": "Aare", "text": "A river."}, {"title": "Aare", "text": "Again."}]
    from_pool = hotpot_paragraphs(write(tmp_path / "paragraphs.jsonl", pool))
    assert list(from_pool) == [Paragraph(title="Aare", sentences=("A river.",))]
    from_questions = hotpot_paragraphs(write(tmp_path / "dev.json", [ITEM, ITEM]))
    assert [(one.title, one.text) for one in from_questions] == [
        ("Aare", "The Aare is a river. It flows through Bern."),
        ("Oslo", "Oslo is in Norway."),
        ("Bern", "Bern is the capital of Switzerland."),
    ]


def test_squad_is_read_with_the_places_of_its_answers(tmp_path: Path) -> None:
    first, second = squad_items(write(tmp_path / "dev-v2.0.json.gz", SQUAD))
    assert first == SquadItem(
        id="s1",
        question="What flows through Bern?",
        title="Rivers",
        context="The Aare flows through Bern, the Aare does.",
        answers=("Aare", "The Aare"),
        answer_starts=(4, 0),
        is_impossible=False,
    )
    assert (second.answers, second.is_impossible) == ((), True)


def test_squad_whose_answers_stand_elsewhere_is_refused(tmp_path: Path) -> None:
    text = json.dumps(SQUAD).replace('"answer_start": 33', '"answer_start": 34')
    path = tmp_path / "squad.json"
    path.write_text(text)
    with pytest.raises(DataError, match="record 1: the answer 'Aare' of question s1 is not at"):
        list(squad_items(path))


@pytest.mark.parametrize("text", ["", "[]", '{"data": 5}', '{"data": [{}]}', '{"data": ['])
def test_what_is_not_squad_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        list(squad_items(path))
    assert str(caught.value).startswith(str(path))


def test_texts_of_a_folder_come_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfB\r\nb\rb")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"A"))
    (tmp_path / "c.md").write_text("C")
    (tmp_path / "d.pdf").write_text("not a text")
    assert list(texts_in(tmp_path)) == [("a.txt.gz", "A"), ("b.txt", "B\nb\nb"), ("c.md", "C")]
    assert list(texts_in(tmp_path / "c.md")) == [("c.md", "C")]


def test_a_folder_without_texts_and_an_empty_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no texts; put"):
        list(texts_in(tmp_path))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"a\.txt is empty"):
        list(texts_in(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8"):
        list(texts_in(tmp_path))


# --- checksums ------------------------------------------------------------------------------------


def test_a_checksum_follows_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"longer")
    assert sha256_of(path) == hashlib.sha256(b"longer").hexdigest()


def test_a_checksum_is_computed_once_for_a_file_that_does_not_change(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = sha256_of(path)
    times = path.stat()
    path.write_bytes(b"two")  # nobody can see this without reading: size and time are the same
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sha256_of(path) == first


def test_the_checksum_of_a_folder_is_that_of_its_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    before = sha256_of(tmp_path)
    (tmp_path / "other.pdf").write_text("not read")
    assert sha256_of(tmp_path) == before
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert sha256_of(tmp_path) != before


# --- finding and fetching -------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """`tiny` is a source that a loopback server has; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(json.dumps([ITEM]).encode(), "tiny.json") as server:
        tiny = Source(kind="hotpotqa", what="tiny", licence="CC0", url=server.url)
        monkeypatch.setitem(sources.SOURCES, "tiny", tiny)
        yield server


def test_a_source_is_fetched_once_and_said_so(
    served: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = open_source("tiny")
    assert path == tmp_path / "cache" / "memagent" / "sources" / "tiny.json"
    assert capsys.readouterr() == ("", f"fetching tiny: {served.url}, licence CC0\n")
    assert path.with_name("tiny.json.sha256").read_text() == f"{sha256_of(path)}  tiny.json\n"
    assert [item.id for item in hotpot_items(path)] == ["q1"]
    assert open_source("tiny") == path
    assert len(served.asked) == 1
    assert capsys.readouterr() == ("", "")


def test_a_source_that_changed_on_the_disk_is_refused(served: FileServer) -> None:
    path = open_source("tiny")
    path.write_text("[]")
    with pytest.raises(DataError, match=r"is not what was fetched .* delete it"):
        open_source("tiny")


def test_a_published_checksum_is_compared(
    served: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(sources.SOURCES["tiny"], sha256="0" * 64)
    monkeypatch.setitem(sources.SOURCES, "tiny", wrong)
    with pytest.raises(DataError, match="is not the published file"):
        open_source("tiny")
    assert not cached_path("tiny").exists()


def test_a_path_replaces_the_download(served: FileServer, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [ITEM])
    assert open_source("hotpotqa-train", path) == path
    assert open_source("tiny", str(path)) == path
    assert served.asked == []


def test_a_folder_is_searched_for_usual_names(tmp_path: Path) -> None:
    write(tmp_path / "dev.jsonl.gz", [ITEM])
    assert open_source("hotpotqa-dev", tmp_path) == tmp_path / "dev.jsonl.gz"
    write(tmp_path / "hotpot_dev_distractor_v1.json", [ITEM])
    assert open_source("hotpotqa-dev", tmp_path).name == "hotpot_dev_distractor_v1.json"
    with pytest.raises(DataError, match=r"holds no hotpotqa-train: no hotpot_train_v1\.1\.json"):
        open_source("hotpotqa-train", tmp_path)


def test_paragraphs_are_derived_from_both_official_files(
    served: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write(tmp_path / "train.json", [{**ITEM, "context": [["Rhine", ["A river."]]]}])
    with serving(train.read_bytes(), "train.json") as server:
        for name, url in (("hotpotqa-train", server.url), ("hotpotqa-dev", served.url)):
            source = replace(sources.SOURCES[name], url=url, num_bytes=None, sha256=None)
            monkeypatch.setitem(sources.SOURCES, name, source)
        path = open_source("hotpotqa-paragraphs")
        first = path.read_bytes()
        assert [one.title for one in hotpot_paragraphs(path)] == ["Rhine", "Aare", "Oslo", "Bern"]
        assert open_source("hotpotqa-paragraphs") == path
        path.unlink()
        assert open_source("hotpotqa-paragraphs").read_bytes() == first
        assert len(server.asked) == 1


def test_wrong_names_and_paths_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no source 'hotpot-dev'; did you mean hotpotqa-dev"):
        open_source("hotpot-dev")
    with pytest.raises(ConfigError, match=r"folder of \.txt files: `sources\.essays=PATH`"):
        open_source("essays")
    with pytest.raises(
        DataError, match=r"nowhere does not exist; name .*: `sources\.squad-dev=PATH`"
    ):
        open_source("squad-dev", tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no texts"):
        open_source("essays", tmp_path)


def test_what_is_published_has_an_address_a_licence_a_size_and_a_checksum() -> None:
    for name in ("hotpotqa-train", "hotpotqa-dev", "squad-dev"):
        source = sources.SOURCES[name]
        assert source.url is not None
        assert source.url.startswith(("http://curtis.ml.cmu.edu/", "https://rajpurkar.github.io/"))
        assert source.licence == "CC BY-SA 4.0"
        assert source.num_bytes is not None
        assert source.num_bytes > 4_000_000
        assert len(bytes.fromhex(source.sha256 or "")) == 32


# --- real files -----------------------------------------------------------------------------------


def test_published_hotpotqa_is_read_completely(published: Published) -> None:
    folder = published.folder / "hotpotqa"
    train = list(hotpot_items(open_source("hotpotqa-train", folder)))
    dev = list(hotpot_items(open_source("hotpotqa-dev", folder)))
    assert (len(train), len(dev)) == (published.num_train, published.num_dev)
    assert all(len(item.gold_titles) >= 2 for item in train + dev)
    fact = train[0].supporting_facts[0]
    paragraph = next(one for one in train[0].context if one.title == fact.title)
    start, end = paragraph.sentence_span(fact.sentence)
    assert paragraph.text[start:end] == paragraph.sentences[fact.sentence].strip()
    pool = open_source("hotpotqa-paragraphs", folder)
    assert sum(1 for _ in hotpot_paragraphs(pool)) == published.num_paragraphs


def test_published_squad_and_books_are_read_completely(published: Published) -> None:
    items = list(squad_items(open_source("squad-dev", published.folder / "squad")))
    assert len(items) == published.num_squad
    assert sum(item.is_impossible for item in items) == published.num_impossible
    lengths = {name: len(text) for name, text in texts_in(published.folder / "books")}
    assert len(lengths) == len(list((published.folder / "books").iterdir()))
    assert lengths[published.book] == published.num_book_chars
