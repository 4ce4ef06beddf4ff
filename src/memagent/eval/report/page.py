"""The page of a report: one self-contained HTML file with its tables and plots.

    notes, tables, plots ─▶ page.html (the template beside this file) ─▶ report.html

Plots are inlined as SVG. Their ids are prefixed with the plot's name, because ids are shared by the
page, and ink and paper become the page's colours, so that plots are readable in light and dark mode.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from memagent.eval.report.plots import INK, PAPER, Plot
from memagent.eval.report.tables import Table

TEMPLATE = "page.html"
FIRST = ("runs", "results", "averages")
"""Tables above the plots; the others are below."""

_prolog = re.compile(r"^.*?(?=<svg)", re.S)
_metadata = re.compile(r"<metadata>.*?</metadata>\s*", re.S)
_title = re.compile(r"<title>.*?</title>\s*", re.S)
_id = re.compile(r'\bid="([^"]+)"')
_use = re.compile(r'(url\(#|href="#)([^")]+)')


def page(
    title: str,
    notes: Sequence[str],
    tables: Sequence[Table],
    published: Sequence[Table],
    plots: Sequence[Plot],
) -> str:
    """The page as HTML."""
    source = (files("memagent.eval.report") / TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(source).render(
        title=title,
        first=FIRST,
        notes=notes,
        tables=tables,
        published=published,
        plots=[(plot, inline_svg(plot)) for plot in plots],
    )


def inline_svg(plot: Plot) -> Markup:
    """A plot's SVG as a part of a page."""
    svg = _prolog.sub("", plot.svg.decode(), count=1)
    svg = _title.sub("", _metadata.sub("", svg, count=1), count=1)
    svg = _id.sub(rf'id="{plot.name}-\1"', svg)
    svg = _use.sub(rf"\g<1>{plot.name}-\2", svg)
    svg = svg.replace(INK, "currentColor").replace(PAPER, "none")
    names = f'{plot.name}-title {plot.name}-description"'
    labels = (
        f'<title id="{plot.name}-title">{html.escape(plot.title)}</title>'
        f'<desc id="{plot.name}-description">{html.escape(plot.description)}</desc>'
    )
    start, end = svg.split(">", 1)
    return Markup(f'{start} role="img" aria-labelledby="{names}>\n{labels}{end}')
