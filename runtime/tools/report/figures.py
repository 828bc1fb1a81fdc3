"""Figures in colours that read on a light and on a dark page; matplotlib is imported late.

A figure is a function that draws a table's records on an empty `matplotlib.figure.Figure`. It has a
white background of its own, which a dark page shows as a card.

The functions here draw what most figures are: lines, horizontal bars and distributions, in panels
side by side.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.tools.report.series_styles import (
    HUES,
    MUTED,
    STYLES,
    is_bound,
    line_style,
    series_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
"""Values of a row of a table, by the columns' keys."""
Draw = Callable[["Figure", Sequence[Record]], None]
Series = Mapping[str, tuple[Sequence[Any], Sequence[float | None]]]
"""Name to x and y values; None leaves a gap."""

INCHES = (8.0, 4.2)
"""Default width and height; letters are then as large as the page's text."""
PANEL_INCHES = 3.9
MOST_COLUMNS = 5
"""Panels side by side: more begin another row."""
LEGEND_INCHES = 2.2
MARKERS = "os^Dv<>pPX"
DPI = 150
"""Resolution of the PNG: sharp on a screen of double density."""
TITLE_INCHES = 0.35
FOOT_POINTS = 6.8
"""Size of the line with a figure's origin."""
FOOT_CHARACTERS = 14
"""Characters of that line in an inch."""

STYLE = Path(__file__).with_name("figure.mplstyle")


def render_figure(
    draw: Draw,
    records: Sequence[Record],
    *,
    inches: tuple[float, float] = INCHES,
    kind: str = "png",
    title: str = "",
    foot: str = "",
) -> bytes:
    """Render a figure as `svg` or `png`; equal drawings give equal bytes.

    Args:
        title: heading above all panels, for a file that stands alone.
        foot: small line below all panels.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = inches
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(width, height + TITLE_INCHES * bool(title)))
        FigureCanvasAgg(figure)
        draw(figure, records)
        if title:
            figure.suptitle(title, x=0.006, ha="left", fontsize=12.5, weight="bold")
        if foot:
            lines = "\n".join(wrap(foot, int(width * FOOT_CHARACTERS)))
            figure.supxlabel(lines, x=0.006, ha="left", fontsize=FOOT_POINTS, color=MUTED)
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
        return file.getvalue()


def wide(num_panels: int) -> float:
    """Return the width in inches of a figure with panels side by side and a legend."""
    return max(INCHES[0], PANEL_INCHES * num_panels + LEGEND_INCHES)


def split(records: Iterable[Record], key: str) -> dict[Any, list[Record]]:
    """Group records by a value, in the order of its first appearance."""
    parts: dict[Any, list[Record]] = {}
    for record in records:
        parts.setdefault(record[key], []).append(record)
    return parts


def collect(records: Iterable[Record], x: str, y: str, *, by: str) -> Series:
    """Return a series for each value of `by`."""
    return {
        str(name): ([record[x] for record in own], [record[y] for record in own])
        for name, own in split(records, by).items()
    }


def collect_columns(records: Sequence[Record], x: str) -> Series:
    """Return a series for each of the other columns."""
    places = [record[x] for record in records]
    return {
        name: (places, [record[name] for record in records]) for name in records[0] if name != x
    }


def place_ticks(labels: Iterable[Any]) -> dict[Any, float]:
    """Return the place of each label on an axis: shares to scale, others at equal distances.

    Words keep their order, numbers ascend.
    """
    names = list(dict.fromkeys(labels))
    if all(isinstance(name, int) for name in names):
        names.sort()
    if all(str(name).endswith("%") for name in names):
        return {name: float(name[:-1]) for name in names}
    return {name: float(place) for place, name in enumerate(names)}


def draw_lines(axes: "Axes", series: Series, colors: Sequence[Any] = ()) -> None:
    """Draw each name's line in its own style, or in one of `colors`."""
    for place, (name, (x, y)) in enumerate(series.items()):
        known = [float("nan") if value is None else value for value in y]
        style = line_style(name)
        if colors:
            style = {"color": colors[place], "marker": MARKERS[place % len(MARKERS)]}
        axes.plot(x, known, label=name, **style)


def draw_panels(
    figure: "Figure",
    panels: Mapping[str, Series],
    *,
    xlabel: str,
    ylabel: str,
    labels: bool = False,
    log: bool = False,
    upwards: bool = False,
    colors: Sequence[Any] = (),
    legend: bool = True,
    **limits: Any,
) -> None:
    """Draw lines in a panel for each title, side by side, with one legend right of them.

    What lies beyond a line named `bound`, which nothing can reach, is shaded.

    Args:
        labels: x values are words such as budgets, or numbers at equal distances.
        log: the y axis is logarithmic.
        upwards: a larger y is better, so that what is out of reach lies above the bound.
        colors: of the lines, where their names have no style of their own.
        limits: of the axes, as matplotlib's `set` takes them.
    """
    num_columns = min(MOST_COLUMNS, len(panels))
    grid = figure.subplots(-(-len(panels) // num_columns), num_columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, series) in zip(grid.flat, panels.items(), strict=False):
        if labels:
            ticks = place_ticks(chain.from_iterable(x for x, _ in series.values()))
            series = {name: ([ticks[at] for at in x], y) for name, (x, y) in series.items()}
            axes.set_xticks(list(ticks.values()), list(map(str, ticks)))
        draw_lines(axes, series, colors)
        axes.set(title=title, xlabel=xlabel, **limits)
        if not labels:
            _set_ticks(axes, [place for x, _ in series.values() for place in x])
        if log:
            _set_log_scale(axes)
        for name, (x, y) in series.items():
            if is_bound(name) and None not in y:
                ends = axes.get_ylim()
                axes.fill_between(x, y, ends[upwards], color=MUTED, alpha=0.13, linewidth=0)
                axes.set_ylim(ends)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    if legend:
        draw_legend(figure)


def _set_ticks(axes: "Axes", places: Sequence[float]) -> None:
    """Mark the places of the values on a logarithmic x axis, and whole numbers of whole ones."""
    if axes.get_xscale() == "log":
        axes.set_xticks(sorted(set(places)), [f"{place:,}" for place in sorted(set(places))])
        axes.minorticks_off()
    elif all(isinstance(place, int) for place in places):
        axes.locator_params(axis="x", integer=True)


def _set_log_scale(axes: "Axes") -> None:
    """Scale the y axis, with ticks written as 12 rather than 1.2 x 10^1."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_legend(figure: "Figure") -> None:
    """Name what all panels show at their right, ordered as the lines of the first end."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        ends = {
            str(line.get_label()): [y for y in np.asarray(line.get_ydata()) if y == y][-1:]
            for line in axes.get_lines()
        }
        named = zip(*axes.get_legend_handles_labels(), strict=True)
        for handle, name in sorted(named, key=lambda pair: ends.get(pair[1], []), reverse=True):
            handles.setdefault(name, handle)
    lines, names = list(handles.values()), list(handles)
    figure.legend(lines, names, loc="outside right center")


def draw_bars(
    figure: "Figure", panels: Mapping[str, Mapping[str, float | None]], *, xlabel: str
) -> None:
    """Draw horizontal bars with their values in a panel for each title.

    Args:
        panels: title to row to length; of names with a style, each bar has its own colour.
    """
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lengths) in zip(grid, panels.items(), strict=True):
        color: Any = HUES["blue"]
        if not STYLES.keys().isdisjoint(lengths):
            color = [series_style(row).color for row in lengths]
        rows = range(len(lengths))
        bars = axes.barh(rows, [length or 0.0 for length in lengths.values()], 0.704, color=color)
        axes.bar_label(bars, fmt="%.3g", fontsize=8.5, padding=3)
        axes.set_yticks(rows, list(lengths))
        axes.set(title=title, xlabel=xlabel, xlim=(0, None))
        axes.set_xmargin(0.14)
        axes.grid(visible=False, axis="y")
    grid[0].invert_yaxis()


MEDIAN = 50
PERCENTILES = (5, 25, MEDIAN, 75, 95)
"""Percentiles that a distribution is drawn with."""
SPREADS_NOTE = (
    "Thin lines: from the 5th to the 95th percentile; thick ones: from the 25th to the 75th; the "
    "mark and the number: the median. The CSV has the whole distribution."
)


def draw_spreads(
    figure: "Figure", panels: Mapping[str, Mapping[str, Sequence[float]]], *, xlabel: str
) -> None:
    """Draw a row for each name in a panel for each title, the lowest median of the first on top.

    Args:
        panels: title to name to values of its distribution at `PERCENTILES`.
    """
    names = list(dict.fromkeys(chain.from_iterable(panels.values())))
    first = next(iter(panels.values()))
    names.sort(key=lambda name: first[name][2] if name in first else float("inf"))
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, spreads) in zip(grid, panels.items(), strict=True):
        for place, name in enumerate(names):
            if name not in spreads:
                continue
            low, lower, median, upper, high = spreads[name]
            style = series_style(name)
            axes.hlines(place, low, high, color=style.color, linewidth=1.6)
            axes.hlines(place, lower, upper, color=style.color, linewidth=7, alpha=0.5)
            axes.plot([median], [place], color=style.color, marker=style.marker, markersize=7)
            annotate(axes, f"{median:.3g}", (high, place))
        axes.set(title=title, xlabel=xlabel, ylim=(len(names) - 0.4, -0.6))
        axes.set_yticks(range(len(names)), names)
        axes.set_xmargin(0.12)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")


def pick_spreads(records: Iterable[Record], value: str) -> dict[str, list[float]]:
    """Return the values at `PERCENTILES` of each system's `percent`, 0 to 100."""
    return {
        system: [own[percent][value] for percent in PERCENTILES]
        for system, own in split(records, "system").items()
    }


def annotate(axes: "Axes", text: str, place: tuple[float, float]) -> None:
    """Write a value right of its mark."""
    axes.annotate(
        text, place, (6, 0), textcoords="offset points", va="center", fontsize=8.5, color=MUTED
    )


def rows_height(num_rows: int) -> float:
    """Return the height in inches of a figure with this many rows of bars or spreads."""
    return 1.2 + 0.32 * num_rows
