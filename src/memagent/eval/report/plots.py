"""Plots of evaluations: accuracy against length, and against cost. Needs matplotlib.

    score
      │ ●━━━●━━━●  yours, with intervals
      │ ○┄┄┄○      published, dashed
      │      ┄┄○
      └──────────── length

    plot = accuracy_plot("hotpotqa", rows, anchors, series=["reader"])
    Path("accuracy.svg").write_bytes(plot.svg)
    Path("accuracy.png").write_bytes(plot.png)

Plots are reproducible byte for byte: no dates, no random ids, matplotlib's bundled fonts.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memagent.errors import ConfigError
from memagent.eval.report.anchors import Anchor
from memagent.eval.report.rows import AverageRow, LengthUnit, ResultRow, format_tokens
from memagent.eval.report.tables import percent
from memagent.eval.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1b1b1c"
"""Text and axes. A page replaces it with its own text colour, light or dark."""
PAPER = "#ffffff"
"""Background; none on a page."""
SERIES_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f00",
)
"""A palette for colour-blind readers, on light and dark backgrounds."""
ANCHOR_COLORS = (
    *("#8c96a6", "#b09468", "#9a8cc0", "#74a8a8", "#bf8fae", "#8fae7b", "#c48f8f", "#8f8f8f"),
    *("#a3a36b", "#7fa3c7", "#c2a08a", "#a78fa0", "#88b0a0", "#b3b3b3", "#99a38c", "#c7a3c0"),
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p")

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "memagent",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}
DPI = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawn plot."""

    name: str
    """For file names."""
    title: str
    description: str
    """What it shows, for screen readers."""
    svg: bytes
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A measured line of a plot."""

    label: str
    number: int
    """Position of the series in the report, which decides its colour in all plots."""
    points: tuple[tuple[float, Interval], ...]


def check_library() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            'plots need the library matplotlib: pip install "memagent[eval]"; '
            "without `out` only tables are printed"
        ) from None


# --- what can be drawn ----------------------------------------------------------------------------


def accuracy_plot(
    task: str,
    rows: Sequence[ResultRow],
    anchors: Sequence[Anchor],
    *,
    series: Sequence[str],
    unit: LengthUnit = "tokens",
) -> Plot | None:
    """Score against length, a line per series and per published result.

    `series` are all those of the report, whether or not they have this task.
    """
    lines = lines_of(((r.series, r.x, r.score) for r in rows if r.task == task), series)
    published = [anchor for anchor in anchors if anchor.task == task]
    return length_plot(f"accuracy-{slug(task)}", f"{task}: score by length", lines, published, unit)


def average_plot(
    group: str,
    averages: Sequence[AverageRow],
    anchors: Sequence[Anchor],
    *,
    series: Sequence[str],
    unit: LengthUnit = "tokens",
) -> Plot | None:
    """The mean over the tasks of a group against length."""
    own = [row for row in averages if row.group == group]
    lines = lines_of(((row.series, row.x, row.score) for row in own), series)
    num_tasks = len(own[0].tasks) if own else 0
    title = f"{group}: average of {num_tasks} tasks by length"
    published = [anchor for anchor in anchors if own and anchor.task == own[0].anchor_task]
    return length_plot(f"average-{slug(group)}", title, lines, published, unit)


def length_plot(
    name: str,
    title: str,
    lines: Sequence[PlotLine],
    anchors: Sequence[Anchor],
    unit: LengthUnit = "tokens",
) -> Plot | None:
    """Lines over length with 95 % intervals; None without a measured line."""
    if not lines:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for number, anchor in enumerate(anchors):
            _draw_anchor(axes, anchor, number)
        for line in lines:
            _draw_line(axes, line, num_lines=len(lines))
        xs = {round(x) for line in lines for x, _ in line.points}
        xs |= {length for anchor in anchors for length, _ in anchor.points}
        _length_axis(axes, sorted(xs), unit)
        _score_axis(axes)
        axes.set_title(title, loc="left")
        _legend(axes, len(anchors), len(lines))

    points = {
        line.label: ", ".join(
            f"{percent(s.value)} at {format_tokens(round(x))}" for x, s in line.points
        )
        for line in lines
    }
    about = "; ".join(f"{label}: {values}" for label, values in points.items())
    published = f" Also {len(anchors)} published lines, dashed." if anchors else ""
    description = f"Score in percent with 95 % intervals. {about}.{published}"
    width = 9.6 if anchors else 7.6
    height = max(4.2, 1.4 + 0.2 * (len(anchors) + len(lines)))
    return drawn(name, title, description, draw, size=(width, height))


def cost_plot(task: str, rows: Sequence[ResultRow], *, series: Sequence[str]) -> Plot | None:
    """Score against what an answer costs: money where prices are known, else tokens."""
    own = [row for row in rows if row.task == task]
    has_prices = bool(own) and all(row.cost is not None for row in own)
    spent = [(row, row.cost if has_prices else row.num_tokens) for row in own]
    shown = [(row, value) for row, value in spent if value]
    if not shown:
        return None
    unit = "cost per answer" if has_prices else "tokens per answer"
    title = f"{task}: score by {unit}"
    lines = lines_of(((row.series, value, row.score) for row, value in shown), series)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for line in lines:
            _draw_line(axes, line, num_lines=1)
        for row, value in shown:
            axes.annotate(
                row.length.label,
                (value, 100 * row.score.value),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
            )
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _amount(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(unit)
        _score_axis(axes)
        axes.set_title(title, loc="left")
        _legend(axes, 0, len(lines))

    points = "; ".join(
        f"{row.series} at {row.length.label}: {percent(row.score.value)} for {_amount(value)}"
        for row, value in shown
    )
    return drawn(
        f"cost-{slug(task)}",
        title,
        f"Score in percent and {unit}. {points}.",
        draw,
        size=(7.6, 4.2),
    )


# --- drawing --------------------------------------------------------------------------------------


def drawn(
    name: str,
    title: str,
    description: str,
    draw: Callable[[Figure], None],
    *,
    size: tuple[float, float],
) -> Plot:
    """The plot that `draw` puts on an empty figure, as SVG and PNG."""
    check_library()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a report does not depend on the user's matplotlibrc
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size, layout="constrained")
        svg, png = io.BytesIO(), io.BytesIO()
        with warnings.catch_warnings():
            # a name in a script the font lacks shows as boxes in the PNG; in the SVG it is text
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            draw(figure)
            metadata = {"Title": title, "Date": None, "Creator": None}
            figure.savefig(svg, format="svg", metadata=metadata)
            figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    return Plot(
        name=name, title=title, description=description, svg=svg.getvalue(), png=png.getvalue()
    )


def lines_of(
    points: Iterable[tuple[str, float | None, Interval]], series: Sequence[str]
) -> list[PlotLine]:
    """Lines from (series, place on the axis, score), in the order of `series`."""
    found: dict[str, list[tuple[float, Interval]]] = {}
    for name, x, score in points:
        if x:
            found.setdefault(name, []).append((x, score))
    return [
        PlotLine(
            label=name, number=number, points=tuple(sorted(found[name], key=lambda point: point[0]))
        )
        for number, name in enumerate(series)
        if name in found
    ]


def slug(name: str) -> str:
    """A task's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "task"


def _draw_line(axes: Axes, line: PlotLine, *, num_lines: int) -> None:
    """A measured line. Lines are shifted slightly, so that intervals do not overlap."""
    number = line.number
    shift = 2.0 ** (0.06 * (number % num_lines - (num_lines - 1) / 2))
    scores = [score for _, score in line.points]
    axes.errorbar(
        [x * shift for x, _ in line.points],
        [100 * score.value for score in scores],
        yerr=(
            [100 * (score.value - score.low) for score in scores],
            [100 * (score.high - score.value) for score in scores],
        ),
        label=_legend_name(line.label),
        color=SERIES_COLORS[number % len(SERIES_COLORS)],
        marker=MARKERS[(number // len(SERIES_COLORS) + number) % len(MARKERS)],
        markersize=5.5,
        linewidth=2.2,
        elinewidth=1.3,
        capsize=3,
        zorder=3,
    )


def _draw_anchor(axes: Axes, anchor: Anchor, number: int) -> None:
    axes.plot(
        [length for length, _ in anchor.points],
        [100 * score for _, score in anchor.points],
        label=_legend_name(f"{anchor.label}{' (off a plot)' * anchor.is_read_off_a_plot}"),
        color=ANCHOR_COLORS[number % len(ANCHOR_COLORS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=3.5,
        markerfacecolor="none",
        linewidth=1.0,
        linestyle=(0, (4, 2)),
        zorder=2,
    )


def _length_axis(axes: Axes, lengths: Sequence[int], unit: LengthUnit) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = _spaced(lengths)
    axes.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    axes.set_xlabel(f"length of the text in {unit}")


def _spaced(lengths: Sequence[int]) -> list[int]:
    """The lengths that can be labelled without overlapping."""
    room = (lengths[-1] / lengths[0]) ** (1 / 14)
    ticks: list[int] = []
    for length in lengths:
        if not ticks or length >= ticks[-1] * max(room, 1.15):
            ticks.append(length)
    return ticks


def _score_axis(axes: Axes) -> None:
    axes.set_ylim(-3, 103)
    axes.set_ylabel("score in percent")
    axes.grid(axis="y")


def _legend_name(label: str) -> str:
    """A name for a legend: matplotlib leaves out those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _legend(axes: Axes, num_anchors: int, num_lines: int) -> None:
    """Measured lines first, then published ones under their own heading."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    by_label = list(zip(handles, labels, strict=True))
    # matplotlib lists plain lines before those with error bars
    published, measured = by_label[:num_anchors], by_label[num_anchors:]
    assert len(measured) == num_lines
    blank = Line2D([], [], linestyle="none")
    entries: list[tuple[Any, str]] = [*measured]
    if published:
        entries = [(blank, "measured here"), *measured, (blank, "published by others"), *published]
    axes.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.3,
    )


# --- descriptions -----------------------------------------------------------------------------------


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
