"""How systems look in every figure: the same colour, line and mark wherever they appear."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = 8
"""Of the page's cycle, after which lines are told apart by their dashes."""

MARKS = "os^Dv<>pPX*h"


@dataclass(frozen=True)
class Look:
    """What matplotlib's `plot` takes."""

    colour: str
    dashes: str
    mark: str
    width: float

    def settings(self) -> dict[str, Any]:
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.mark,
            "linewidth": self.width,
        }


def looks(
    systems: Sequence[str], *, ours: str, subject: str, baseline: str, bound: str
) -> Mapping[str, Look]:
    """Ours is thick; the subject of the ablation has the next colour.

    The baseline and the bound, which everything is measured by, have none of their own.
    """
    from runtime.tools.report.drawing import ink, muted

    found: dict[str, Look] = {}
    others = [name for name in systems if name not in (ours, baseline, bound)]
    others.sort(key=lambda name: name != subject)
    if ours in systems:
        found[ours] = Look("C0", "-", "o", 3.0)
    for place, name in enumerate(others, start=1):
        dashes = "-" if place < COLOURS else "--"
        # C0 is ours alone.
        colour = f"C{1 + (place - 1) % (COLOURS - 1)}"
        found[name] = Look(colour, dashes, MARKS[place % len(MARKS)], 1.4)
    if baseline in systems:
        found[baseline] = Look(muted(), "-", "s", 2.2)
    if bound in systems:
        found[bound] = Look(ink(), ":", ".", 2.2)
    return {name: found[name] for name in systems}
