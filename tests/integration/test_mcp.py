"""`memagent mcp` as its own process, driven by the official client over standard input and output."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client

from tests.integration.conftest import CODE, FACT, MEMAGENT, QUESTION, SMALL_SECTIONS, Cli

FILLER = "The harbour was quiet that winter, and the ledger lay open on the table.\n\n"


@asynccontextmanager
async def connected(cli: Cli, *arguments: str | Path) -> AsyncIterator[Client]:
    """A client of a new server."""
    parameters = StdioServerParameters(
        command=str(MEMAGENT),
        args=["mcp", *map(str, arguments), "--engine", "scripted", *SMALL_SECTIONS],
        env=cli.environment(),
    )
    async with Client(stdio_client(parameters)) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "book.txt").write_text(FILLER * 10 + FACT + "\n\n" + FILLER * 10)
    (tmp_path / "secret.txt").write_text(FACT)
    return folder


async def test_a_document_is_asked_with_progress_and_continued(cli: Cli, folder: Path) -> None:
    told: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    async with connected(cli, folder) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"ask_document", "continue_reading"}
        assert set(tools["ask_document"].input_schema["properties"]) == {"path_or_text", "question"}
        asked = {"path_or_text": "book.txt", "question": QUESTION}
        result = await client.call_tool("ask_document", asked, progress_callback=on_progress)
        assert not result.is_error
        found = result.structured_content
        assert found is not None
        assert CODE in found["answer"]
        size = len((folder / "book.txt").read_text())
        assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
        assert (told[-1][0], told[-1][1], len(told)) == (size, size, found["num_sections"] + 2)

        with (folder / "book.txt").open("a") as book:
            book.write("Another line.\n")
        again = await client.call_tool("continue_reading", {"reading": found["reading"]})
        assert again.structured_content is not None
        assert 0 < again.structured_content["num_calls"] < found["num_calls"]


async def test_files_outside_of_the_folders_and_bad_questions_are_errors_of_a_line(
    cli: Cli, folder: Path
) -> None:
    async with connected(cli, folder) as client:
        for asked, message in (
            (
                {"path_or_text": str(folder.parent / "secret.txt"), "question": QUESTION},
                "there is no document",
            ),
            ({"path_or_text": "../secret.txt", "question": QUESTION}, "there is no document"),
            ({"path_or_text": "book.txt", "question": "  "}, "the question is empty"),
        ):
            result = await client.call_tool("ask_document", asked)
            assert result.is_error
            [content] = result.content
            assert message in content.text
            assert CODE not in content.text
            assert "\n" not in content.text
        result = await client.call_tool("continue_reading", {"reading": "../../etc"})
        assert result.is_error


def test_a_folder_that_is_not_there_is_reported_in_one_line(cli: Cli) -> None:
    done = cli("mcp", "nosuch", "--engine", "scripted")
    assert (done.code, done.stdout) == (2, "")
    assert "there is no folder" in done.stderr
    assert done.stderr.count("\n") == 1
