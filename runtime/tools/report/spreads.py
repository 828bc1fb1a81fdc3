"""Distributions of several systems as rows of percentiles."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runtime.tools.report.figures import muted_color
from runtime.tools.report.series_styles import series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEDIAN = 50
PERCENTILES = (5, 25, MEDIAN, 75, 95)
"""Percentiles that a distribution is drawn with."""
SPREADS_NOTE = (
    "Thin lines: from the 5th to the 95th percentile; thick ones: from the 25th to the 75th; the "
    "mark and the number: the median. The CSV has the whole distribution."
)


def draw_spreads(
    axes: "Axes", spreads: Mapping[str, Sequence[float]], *, order: Sequence[str] | None = None
) -> None:
    """Draw a row for each name: a thin line, a thick one within, and the median.

    Args:
        spreads: name to values of the distribution at `PERCENTILES`.
        order: names from top to bottom; of those not in `spreads`, the row stays empty.
    """
    names = list(order or spreads)
    for place, name in enumerate(names):
        if name not in spreads:
            continue
        low, lower, median, upper, high = spreads[name]
        style = series_style(name)
        axes.hlines(place, low, high, color=style.color, linewidth=1.6)
        axes.hlines(place, lower, upper, color=style.color, linewidth=7, alpha=0.5)
        axes.plot([median], [place], color=style.color, marker=style.marker, markersize=7)
        axes.annotate(
            f"{median:.3g}", (high, place), (6, 0), textcoords="offset points", va="center",
            fontsize=9, color=muted_color(),
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xmargin(0.12)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")


def spreads_height(num_rows: int) -> float:
    """Return the height in inches of a figure with this many rows."""
    return 1.2 + 0.3 * num_rows
