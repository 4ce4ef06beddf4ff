"""Traces in notebooks: everything of interest, and nothing of the text alive."""

import re
from html.parser import HTMLParser

import pytest

from memagent import Reader, Trace
from memagent.agent.display import MAX_CHARS, MAX_ROWS
from memagent.documents.document import Document
from memagent.engines.scripted import ScriptedEngine

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> [a](javascript:alert) ![b](http://h/p.png) "
    "http://tracker.example | cell |\n# heading\n- item\n`code` $x$ \\(y\\) **bold** <!-- --> & &lt; "
    '"quoted" \u202ereversed\x1b]0;title\x07'
)


def trace_of(*memories: str, answer: str = "White.", source: str = "whale.txt") -> Trace:
    text = "word " * (60 * len(memories))
    reader = Reader(
        ScriptedEngine([*memories, answer]),
        tokenizer="bytes",
        window=5000,
        chunk_tokens=300,
        memory_tokens=1000,
        answer_tokens=1000,
    )
    return reader.ask("What colour is the whale?", Document.from_text(text, source))


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_question_answer_and_the_memory_after_each_section() -> None:
    trace = trace_of("It is large.", "It is white.")
    shown = _Tags(trace._repr_html_()).text
    for part in ("What colour is the whale?", "White.", "It is large.", "It is white."):
        assert part in shown
    assert "2 sections of whale.txt, scripted, " in shown
    markdown = trace._repr_markdown_()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert rows[0] == "| section | where | memory | flags |"
    assert rows[2].startswith("| 1 | whale&#46;txt ")
    assert rows[2].endswith("| It is large&#46; |  |")
    assert len(rows) == 4


@pytest.mark.parametrize("place", ["memory", "answer", "source"])
def test_nothing_of_a_text_is_alive_in_html(place: str) -> None:
    memory = HOSTILE if place == "memory" else "m"
    answer = HOSTILE if place == "answer" else "a"
    source = HOSTILE if place == "source" else "s"
    page = trace_of(memory, answer=answer, source=source)._repr_html_()
    parsed = _Tags(page)
    assert parsed.tags == set(_Tags(trace_of("m")._repr_html_()).tags)
    assert parsed.attributes == {"style"}
    assert "<script>alert(1)</script>" in parsed.text
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "\\u202ereversed\\u001b]0;title\\u0007" in parsed.text


def test_nothing_of_a_text_is_alive_in_markdown() -> None:
    page = trace_of(HOSTILE, answer=HOSTILE, source=HOSTILE)._repr_markdown_()
    plain = re.sub(r"&#\d+;", "", page)  # what is left of the entities is structure
    assert set(re.findall(r"<[^>]*>", plain)) == {"<br>"}
    assert set(re.findall(r"""[^\w\s,;?'"%]""", plain.replace("<br>", ""))) == {"*", ">", "|", "-"}
    assert plain.count("*") == 4
    assert plain.replace("<br>", "").count(">") == 1
    assert plain.count("-") == 3 * 4
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert len(tables) == 3
    assert all(line.count("|") == 5 for line in tables)


def test_of_many_sections_the_first_and_the_last_are_shown() -> None:
    trace = trace_of(*(f"memory {number}" for number in range(MAX_ROWS + 25)))
    page = trace._repr_html_()
    assert "25 sections are not shown" in page
    assert "memory 0<" in page
    assert f"memory {MAX_ROWS + 24}<" in page
    assert page.count("<tr>") == 1 + MAX_ROWS + 1


def test_long_texts_are_cut() -> None:
    trace = trace_of("m", source="s" * (MAX_CHARS + 1))
    assert f"{'s' * MAX_CHARS} ...," in trace._repr_html_()


def test_an_unfinished_trace_says_so() -> None:
    trace = trace_of("m")
    unfinished = Trace.from_dict({**trace.to_dict(), "steps": trace.to_dict()["steps"][:1]})
    assert "no answer yet" in unfinished._repr_html_()
    assert "no answer yet" in unfinished._repr_markdown_()
    empty = Trace.from_dict({**trace.to_dict(), "steps": []})
    assert "0 sections of" in empty._repr_html_()


def test_the_quotes_that_an_answer_cites_stand_below_it() -> None:
    text = f"The whale said: {HOSTILE} Then it left."
    reader = Reader(
        ScriptedEngine(
            [f"<quote>{HOSTILE}</quote><quote>made up</quote>Noted.", "Red.\nSources: 1"]
        ),
        tokenizer="bytes",
        window=9000,
        chunk_tokens=2000,
        evidence=True,
    )
    trace = reader.ask("What was said?", text)
    assert len(trace.citations) == 1
    for shown in (trace._repr_html_(), trace._repr_markdown_()):
        assert "heading" in shown
        assert "made up" not in shown
        assert "Sources" not in shown
    assert _Tags(trace._repr_html_()).tags <= {
        *("div", "p", "b", "bdi", "details", "summary", "table", "thead", "tbody", "tr", "th", "td")
    }
