"""Lines with their names at their right ends: readable where a legend of a dozen lines is not."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.tools.report.figures import text_color
from runtime.tools.report.series_styles import line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72.0
LABEL_POINTS = 9.0
"""Size of the names' letters."""
LINE_HEIGHT = 1.32
"""Distance of two names, in multiples of their size."""

Series = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]
"""Name to x and y values; None leaves a gap."""


def draw_lines(axes: "Axes", series: Series, **style: Any) -> None:
    """Draw each name's line in its own style, of which `style` replaces parts."""
    for name, (x, y) in series.items():
        known = [float("nan") if value is None else value for value in y]
        axes.plot(x, known, label=name, **{**line_style(name), **style})


def draw_legend(figure: "Figure", axes: "Axes") -> None:
    """Draw the legend right of all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", handlelength=2.6)


def label_lines(axes: "Axes", *, texts: Mapping[str, str] | None = None) -> None:
    """Write the name of each line at its right end, as close as names can stand.

    Call it when the axes have their limits. A thin line leads from the end to the name.

    Args:
        texts: what is written instead of a name.
    """
    ends = []
    for line in axes.get_lines():
        points = np.column_stack([np.asarray(line.get_xdata()), np.asarray(line.get_ydata())])
        known = points[~np.isnan(points[:, 1].astype(float))]
        if len(known) and not str(line.get_label()).startswith("_"):
            ends.append((line, (float(known[-1, 0]), float(known[-1, 1]))))
    axes.get_ylim()  # autoscales now
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform(point)[1]) for _, point in ends]
    figure = axes.get_figure(root=True)
    assert figure is not None
    box, (width, height) = axes.get_position(), figure.get_size_inches()
    gap = LABEL_POINTS * LINE_HEIGHT / (POINTS_PER_INCH * box.height * height)
    per_point = 1 / (POINTS_PER_INCH * box.width * width)
    for (line, point), place in zip(ends, spread(heights, gap), strict=True):
        name = str(line.get_label())
        x = 1 + 14 * per_point
        axes.annotate(
            "", point, (x, place), textcoords="axes fraction", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7,
                        "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        axes.plot(
            [x], [place], transform=axes.transAxes, clip_on=False, label="_", linestyle="none",
            marker=line.get_marker(), color=line.get_color(), markersize=5.5,
        )  # fmt: skip
        axes.text(
            x + 6 * per_point, place, (texts or {}).get(name, name), transform=axes.transAxes,
            fontsize=LABEL_POINTS, color=text_color(), va="center", ha="left",
            weight="bold" if line.get_linewidth() > 2.5 else "normal",
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until any two differ by at least `gap`, in order and as little as it goes.

    Neighbours that are too close move as one block, whose mean stays (isotonic regression). All
    lie between 0 and 1 if there is room.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[tuple[float, list[int]]] = []
    for rank, index in enumerate(order):
        total, members = heights[index] - rank * gap, [index]
        while blocks and blocks[-1][0] / len(blocks[-1][1]) > total / len(members):
            before, earlier = blocks.pop()
            total, members = total + before, [*earlier, *members]
        blocks.append((total, members))
    most = 1 - (len(heights) - 1) * gap
    placed = [0.0] * len(heights)
    rank = 0
    for total, members in blocks:
        base = total / len(members)
        if most >= 0:
            base = min(max(base, 0.0), most)
        for index in members:
            placed[index] = base + rank * gap
            rank += 1
    return placed
