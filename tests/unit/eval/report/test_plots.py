"""Plots and the page: what is drawn, by the texts and shapes of the SVG."""

import re
from xml.etree import ElementTree

import pytest

from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.plots import (
    Plot,
    accuracy_plot,
    average_plot,
    cost_plot,
    slug,
)
from memagent.eval.report.report import inline_svg, page
from memagent.eval.report.rows import RULER_TEN, Entry, average_rows, result_rows
from memagent.eval.report.tables import results_table
from tests.support.eval_runs import failed, item, lifelike

PAPER = read_anchors("paper")
SVG = "{http://www.w3.org/2000/svg}"
SERIES = ("reader", "direct")


def entries(*tasks: str, num: int = 6) -> list[Entry]:
    return [Entry(record.method, record) for record in lifelike(tasks, num=num)]


def texts(plot: Plot) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]


def drawn(plot: Plot | None) -> Plot:
    assert plot is not None
    assert plot.png.startswith(b"\x89PNG")
    return plot


def test_published_lines_have_their_own_heading() -> None:
    plot = drawn(accuracy_plot("hotpotqa", result_rows(entries("hotpotqa")), PAPER, series=SERIES))
    shown = texts(plot)
    ours, theirs = shown.index("measured here"), shown.index("published by others")
    assert shown[ours : theirs + 2] == [
        "measured here",
        "reader",
        "direct",
        "published by others",
        "QwenLong-L1-32B",
    ]
    assert "MemAgent-32B without RL (off a plot)" in shown
    assert plot.description.endswith("Also 16 published lines, dashed.")
    # theirs are dashed: 16 lines, and each once more in the legend
    assert len(re.findall("stroke-dasharray: [1-9]", plot.svg.decode())) == 32


def test_the_description_tells_the_values() -> None:
    rows = result_rows([Entry("reader", item("vt", "reader", 8192, n)) for n in range(3)])
    plot = drawn(accuracy_plot("vt", rows, [], series=["reader"]))
    assert plot.description == "Score in percent with 95 % intervals. reader: 100.0 at 8K."
    assert "published by others" not in texts(plot)


def test_a_series_has_its_colour_in_every_plot() -> None:
    rows = result_rows([Entry("direct", item("vt", "direct", 8192, 0))])
    svg = drawn(accuracy_plot("vt", rows, [], series=SERIES)).svg.decode()
    assert "#d55e00" in svg
    assert "#0072b2" not in svg


def test_texts_without_a_known_length_have_no_plot() -> None:
    rows = result_rows([Entry("reader", item("vt", "reader", None, 0, num_tokens=None))])
    assert accuracy_plot("vt", rows, [], series=["reader"]) is None


def test_cost_is_money_where_all_prices_are_known_and_else_tokens() -> None:
    paid = [Entry("reader", item("vt", "reader", 8192, n, cost=0.25)) for n in range(2)]
    free = [Entry("direct", item("vt", "direct", 8192, n)) for n in range(2)]
    plot = drawn(cost_plot("vt", result_rows(paid), series=["reader"]))
    assert plot.title == "vt: score by cost per answer"
    assert "reader at 8K: 100.0 for 0.25" in plot.description
    mixed = drawn(cost_plot("vt", result_rows([*paid, *free]), series=SERIES))
    assert mixed.title == "vt: score by tokens per answer"
    assert "direct at 8K: 100.0 for 1,050" in mixed.description


def test_answers_that_cost_nothing_are_not_on_a_plot_of_costs() -> None:
    gone = failed("vt", "reader", 8192, 0, prompt_tokens=0, completion_tokens=0)
    assert cost_plot("vt", result_rows([Entry("reader", gone)]), series=["reader"]) is None


def test_published_averages_are_shown_only_for_the_same_tasks() -> None:
    ten = result_rows(entries(*RULER_TEN, num=2))
    averages = average_rows(ten)
    plot = drawn(average_plot("ruler", averages, PAPER, series=SERIES))
    assert plot.title == "ruler: average of 10 tasks by length"
    assert "RL-MemAgent-7B (v1)" in texts(plot)
    some = average_rows([row for row in ten if row.task != "ruler/vt"])
    assert "RL-MemAgent-7B (v1)" not in texts(
        drawn(average_plot("ruler", some, PAPER, series=SERIES))
    )


@pytest.mark.parametrize("name", ["_hidden", "$a_{b}$", "阅读者", "50% \\frac"])
def test_a_legend_can_hold_any_name(name: str) -> None:
    rows = result_rows([Entry(name, item("vt", "reader", 8192, 0))])
    assert name in [
        text.strip() for text in texts(drawn(accuracy_plot("vt", rows, [], series=[name])))
    ]


@pytest.mark.parametrize(
    ("name", "expected"), [("ruler/niah_single_1", "ruler-niah_single_1"), ("a b/../c", "a-b-..-c")]
)
def test_names_of_files_hold_no_slashes(name: str, expected: str) -> None:
    assert slug(name) == expected


# --- in the page ----------------------------------------------------------------------------------


def test_plots_in_a_page_share_no_ids_and_take_its_colours() -> None:
    rows = result_rows(entries("hotpotqa", "vt"))
    plots = [accuracy_plot(task, rows, [], series=SERIES) for task in ("hotpotqa", "vt")]
    svgs = [str(inline_svg(drawn(plot))) for plot in plots]
    ids = [re.findall(r'\bid="([^"]+)"', svg) for svg in svgs]
    assert set(ids[0]).isdisjoint(ids[1])
    for svg, own in zip(svgs, ids, strict=True):
        assert len(own) == len(set(own))
        used = re.findall(r'(?:url\(#|href="#)([^")]+)', svg)
        assert used
        assert set(used) <= set(own)
        assert "currentColor" in svg
        assert "#1b1b1c" not in svg
        assert 'role="img"' in svg.split(">")[0]
        ElementTree.fromstring(svg)


def test_a_page_escapes_names_and_asks_for_nothing_from_outside() -> None:
    evil = '<img src="http://example.com/x.png">'
    rows = result_rows([Entry(evil, item(evil, evil, 8192, 0))])
    plot = drawn(accuracy_plot(evil, rows, [], series=[evil]))
    html = page(evil, [evil], [results_table(rows, [])], [], [plot])
    assert "<img" not in html
    assert "&lt;img src=" in html
    assert re.findall(r'<[^>]*\s(?:src|\S*href)="(?!#|plots/|data:,)([^"]*)"', html) == []
    assert "@import" not in html
    assert "url(http" not in html


def test_tables_of_a_page_have_captions_and_headings() -> None:
    rows = result_rows([Entry("reader", item("vt", "reader", 8192, 0))])
    html = page("Report", [], [results_table(rows, [])], [], [])
    assert "<caption>Results. Failed items count as wrong and stay in n." in html
    assert '<th scope="col" class="number">n</th>' in html
    assert '<th scope="row">vt</th>' in html
    assert "100.0 [20.7, 100.0]" in html
