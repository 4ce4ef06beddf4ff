"""Which documents an assistant may ask, and readings that continue."""

import asyncio
import os
from pathlib import Path

import pytest

from memagent.agent.reader import Reader
from memagent.config import EngineConfig, ReadingMode
from memagent.engines.base import open_engine
from memagent.engines.openai import EndpointEngine
from memagent.errors import ConfigError, DocumentError, RunError
from memagent.serve.mcp import DocumentDesk, names_file
from tests.support.chat_servers import Json, chat_server, each_second, prompt_of, said

QUESTION = 'What is the code of "amber-17"?'
FACT = 'The code of "amber-17" is 48213.'
FILLER = "The harbour was quiet that winter, and the ledger lay open on the table.\n\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "book.txt").write_text(FILLER * 20 + FACT + "\n\n" + FILLER * 20)
    (tmp_path / "secret.txt").write_text(FACT)
    return folder


def desk_of(*folders: Path, runs: Path, mode: ReadingMode = "in_order") -> DocumentDesk:
    reader = Reader(
        open_engine("scripted"),
        tokenizer="bytes",
        window=4096,
        chunk_tokens=600,
        memory_tokens=400,
        answer_tokens=200,
        mode=mode,
    )
    return DocumentDesk(reader, folders, runs=runs)


async def test_a_file_is_read_and_progress_is_told(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    async def on_progress(done: int, total: int, message: str) -> None:
        told.append((done, total, message))

    found = await desk_of(folder, runs=tmp_path / "runs").ask("book.txt", QUESTION, on_progress)
    assert "48213" in found.answer
    size = len((folder / "book.txt").read_text())
    assert (told[0][0], told[-1][0]) == (0, size)
    assert {total for _, total, _ in told} == {size}
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert len(told) == found.num_sections + 2
    assert all(found.reading in message for _, _, message in told)


async def test_every_request_for_an_empty_reply_is_shown(folder: Path, tmp_path: Path) -> None:
    def reply(request: Json) -> Json:
        return said("Anna.", prompt_tokens=len(prompt_of(request)))

    with chat_server(each_second(reply)) as server:
        engine = EndpointEngine(EngineConfig(model="test-model", base_url=server.base_url))
        reader = Reader(engine, tokenizer="bytes", window=4096, chunk_tokens=2000)
        async with engine:
            desk = DocumentDesk(reader, [folder], runs=tmp_path / "runs")
            found = await desk.ask("book.txt", QUESTION)
    assert found.num_calls == len(server.chats) == 2 * (found.num_sections + 1)


async def test_in_parallel_too_progress_names_sections_and_grows(
    folder: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int, str]] = []

    async def on_progress(done: int, total: int, message: str) -> None:
        told.append((done, total, message))

    desk = desk_of(folder, runs=tmp_path / "runs", mode="parallel")
    found = await desk.ask("book.txt", QUESTION, on_progress)
    sections = [message.split()[3] for _, _, message in told if "section" in message]
    assert sorted(map(int, sections)) == list(range(1, found.num_sections + 1))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    with (folder / "book.txt").open("a") as book:
        book.write(FILLER * 2)
    more = await desk.continue_reading(found.reading)
    assert more.answer == found.answer
    assert more.num_calls < found.num_calls / 2


@pytest.mark.parametrize("name", ["documents/book.txt", "./book.txt", "{folder}/book.txt"])
async def test_a_file_is_named_with_its_folder_too(folder: Path, tmp_path: Path, name: str) -> None:
    desk = desk_of(folder, runs=tmp_path / "runs")
    assert "48213" in (await desk.ask(name.replace("{folder}", str(folder)), QUESTION)).answer


async def test_a_text_is_read_as_it_comes(tmp_path: Path) -> None:
    desk = desk_of(runs=tmp_path / "runs")
    found = await desk.ask(f"{FILLER}\n{FACT}", QUESTION)
    assert "48213" in found.answer
    again = await desk.continue_reading(found.reading)
    assert (again.answer, again.num_calls) == (found.answer, 0)


@pytest.mark.parametrize(
    "name",
    [
        "secret.txt",
        "../secret.txt",
        "documents/../secret.txt",
        "{outside}",
        "book.txt/../../secret.txt",
        "link.txt",
        "/etc/passwd",
        "nosuch.txt",
        "nul\0.txt",
        "half\ud800.txt",
        "n" * 300 + ".txt",
        "n/" * 490 + ".txt",
        "pipe.txt",
    ],
)
async def test_nothing_outside_of_the_folders_is_read(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(folder / "pipe.txt")
    name = name.replace("{outside}", str(tmp_path / "secret.txt"))
    with pytest.raises(DocumentError, match="in the folders of this server"):
        await desk_of(folder, runs=tmp_path / "runs").ask(name, QUESTION)
    assert not (tmp_path / "runs").exists()


async def test_a_reading_that_was_cut_off_is_finished(folder: Path, tmp_path: Path) -> None:
    desk = desk_of(folder, runs=tmp_path / "runs")
    is_half = asyncio.Event()

    async def on_progress(done: int, total: int, message: str) -> None:
        if done > total / 2:
            is_half.set()

    task = asyncio.ensure_future(desk.ask("book.txt", QUESTION, on_progress))
    await is_half.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = await desk.continue_reading()
    assert "48213" in found.answer
    assert 0 < found.num_calls < found.num_sections + 1


async def test_a_file_that_has_grown_is_read_on(folder: Path, tmp_path: Path) -> None:
    desk = desk_of(folder, runs=tmp_path / "runs")
    first = await desk.ask("book.txt", 'What is the code of "birch-2"?')
    with (folder / "book.txt").open("a") as book:
        book.write('The code of "birch-2" is 7719.\n')
    second = await desk.continue_reading(first.reading)
    assert "7719" in second.answer
    assert second.reading != first.reading
    assert second.num_calls <= 3 < first.num_calls


@pytest.mark.parametrize("reading", ["nosuch", "../runs", "..", "a/b"])
async def test_only_readings_of_the_desk_are_continued(
    folder: Path, tmp_path: Path, reading: str
) -> None:
    with pytest.raises(RunError, match="there is no reading"):
        await desk_of(folder, runs=tmp_path / "runs").continue_reading(reading)


async def test_a_reading_is_not_continued_outside_of_todays_folders(
    folder: Path, tmp_path: Path
) -> None:
    found = await desk_of(folder, runs=tmp_path / "runs").ask("book.txt", QUESTION)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(DocumentError, match="in the folders of this server"):
        await desk_of(other, runs=tmp_path / "runs").continue_reading(found.reading)


def test_a_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        desk_of(tmp_path / "nosuch", runs=tmp_path / "runs")


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("book.txt", True),
        ("notes/2026/plan.md", True),
        ("/home/me/paper (final).pdf", True),
        ("folder/", True),
        ("The harbour was quiet that winter", False),
        ("The code is 48213. It was found.", False),
        ("one line\nand another.txt", False),
        ("x" * 2000 + ".txt", False),
        ("", False),
    ],
)
def test_a_path_is_one_short_line_that_looks_like_one(text: str, is_path: bool) -> None:
    assert names_file(text) is is_path
