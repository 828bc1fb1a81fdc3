"""Styles of many lines in one figure: colour, dashes and marker, with a legend on the right."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 8
"""Colours of a scheme's cycle; further lines repeat them, dashed."""
DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)))
MARKERS = "osD^vPX*"
SYSTEM_MARKERS = "os^Dv<>pPX*h"


def line_style(index: int) -> dict[str, Any]:
    """Return the style of the line at an index, the same in every figure of a page."""
    return {
        "color": f"C{index % COLOURS}",
        "linestyle": DASHES[index // COLOURS % len(DASHES)],
        "marker": MARKERS[(index + index // COLOURS) % len(MARKERS)],
    }


def draw_lines(
    axes: "Axes",
    series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    places: Sequence[str],
    **style: Any,
) -> None:
    """Draw each name's x and y values, with a gap where y is None.

    `places` lists all names of the page, so that a name has the same style in every figure.
    """
    for name, (x, y) in series.items():
        known = [float("nan") if value is None else value for value in y]
        axes.plot(x, known, label=name, **{**line_style(places.index(name)), **style})


def draw_legend(figure: "Figure", axes: "Axes", *, order: Sequence[str] | None = None) -> None:
    """Draw the legend on the right in this order, from top to bottom."""
    handles, names = axes.get_legend_handles_labels()
    found = dict(zip(names, handles, strict=True))
    shown = [name for name in (order or names) if name in found]
    figure.legend(
        [found[name] for name in shown], shown, loc="outside right upper", handlelength=2.6
    )


def system_styles(
    systems: Sequence[str], *, ours: str, subject: str, baseline: str, bound: str
) -> dict[str, dict[str, Any]]:
    """Return what matplotlib's `plot` takes for each system, the same in all figures of a page.

    Ours is thick and the subject has the next colour; the baseline and the bound, which the others
    are measured by, are grey and black.
    """
    from runtime.tools.report.figures import muted_color, text_color

    special = {
        ours: _style("C0", "-", "o", 3.0),
        baseline: _style(muted_color(), "-", "s", 2.2),
        bound: _style(text_color(), ":", ".", 2.2),
    }
    others = sorted(
        (name for name in systems if name not in special), key=lambda name: name != subject
    )
    for number, name in enumerate(others, start=1):
        # C0 is ours alone.
        colour = f"C{1 + (number - 1) % (COLOURS - 1)}"
        dashes = "-" if number < COLOURS else "--"
        special[name] = _style(colour, dashes, SYSTEM_MARKERS[number % len(SYSTEM_MARKERS)], 1.4)
    return {name: special[name] for name in systems}


def _style(colour: str, dashes: str, marker: str, width: float) -> dict[str, Any]:
    return {"color": colour, "linestyle": dashes, "marker": marker, "linewidth": width}
