"""The style of each predictor, eviction policy and system, the same in every figure.

Names that belong to one idea share a hue: a system, the predictor that it forecasts with and its
eviction policy. Within a table of names the markers differ too, so that a figure can be read
without its colours.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

from predictors.typed_values import read_table

TABLES = read_table(Path(__file__).with_suffix(".yaml"))
HUES: Mapping[str, str] = MappingProxyType(TABLES["hues"])
"""Colours by name."""
MUTED = HUES["grey"]
"""Colour of labels, and of the baseline that others are compared with."""
OTHERS = list(HUES)[:-2]
"""Hues of names without a style of their own: grey is the baseline's, ink the bound's."""
BOUND = "bound"
"""Name of the line that no system can cross."""
DASHES = {"solid": "-", "dashed": (0, (4.5, 1.6)), "dotted": (0, (1.2, 1.4))}
VARIANT = re.compile(r"-([23]|one-by-one|at-once)$|, ([23]) ahead$")
"""Ends of names such as `skip-2`, `mlp, 2 ahead` and `fmoe-one-by-one`."""


@dataclass(frozen=True)
class SeriesStyle:
    """The look of one name's line, bar or dot."""

    hue: str
    """One of `HUES`."""
    marker: str
    dashes: str = "solid"
    """One of `DASHES`."""
    width: float = 1.5

    @property
    def color(self) -> str:
        return HUES[self.hue]


STYLES: Mapping[str, SeriesStyle] = MappingProxyType(
    {
        name: SeriesStyle(**style)
        for names, style in TABLES["series"].items()
        for name in names.split(", ")
    }
)
SIMULATED = " (simulated)"
OTHER_MARKERS = "o^vDsP"


def series_style(label: str) -> SeriesStyle:
    """Return the style of a name.

    A variant (`skip-2`, `promoe without chunks`) has its name's hue. A name that is not in the
    table has a style that depends on nothing but the name.
    """
    label = label.removesuffix(SIMULATED).removesuffix(", 1 ahead")
    if label in STYLES:
        return STYLES[label]
    kind, variant = VARIANT.sub("", label), VARIANT.search(label)
    if kind in STYLES and variant is not None:
        return replace(STYLES[kind], **TABLES["variants"][variant[1] or variant[2]])
    number = crc32(label.encode())
    marker = OTHER_MARKERS[number // len(OTHERS) % len(OTHER_MARKERS)]
    name = re.split(r"[ ,:]", label, maxsplit=1)[0]
    hue = STYLES[name].hue if name in STYLES else OTHERS[number % len(OTHERS)]
    return SeriesStyle(hue, marker, "dashed")


def line_style(label: str) -> dict[str, Any]:
    """Return the arguments of matplotlib's `plot` for a name."""
    style = series_style(label)
    return {
        "color": style.color,
        "marker": style.marker,
        "linestyle": DASHES[style.dashes],
        "linewidth": style.width,
    }


def is_bound(label: str) -> bool:
    """Return whether a series is the bound, which no other can cross."""
    return label.removesuffix(SIMULATED) == BOUND
