"""Many lines in one drawing, told apart by colour, dashes and marker; the legend beside them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 8
"""Of a scheme's cycle; further lines begin again, dashed."""
DASHES = ("-", (0, (4, 1.6)), (0, (1.2, 1.2)))
MARKERS = "osD^vPX*"
SYSTEM_MARKERS = "os^Dv<>pPX*h"


def styled(place: int) -> dict[str, Any]:
    """How the line at this place in the order looks, the same in every figure of a page."""
    return {
        "color": f"C{place % COLOURS}",
        "linestyle": DASHES[place // COLOURS % len(DASHES)],
        "marker": MARKERS[(place + place // COLOURS) % len(MARKERS)],
    }


def lines(
    axes: "Axes",
    series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    places: Sequence[str],
    **style: Any,
) -> None:
    """Name to its x and y values; a gap where y is None.

    `places` lists all names of the page, so that a name looks the same wherever it is drawn.
    """
    for name, (x, y) in series.items():
        known = [float("nan") if value is None else value for value in y]
        axes.plot(x, known, label=name, **{**styled(places.index(name)), **style})


def legend(figure: "Figure", axes: "Axes", *, order: Sequence[str] | None = None) -> None:
    """To the right of everything, in this order (top to bottom, as the lines lie)."""
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
    from runtime.tools.report.drawing import ink, muted

    special = {
        ours: _style("C0", "-", "o", 3.0),
        baseline: _style(muted(), "-", "s", 2.2),
        bound: _style(ink(), ":", ".", 2.2),
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
