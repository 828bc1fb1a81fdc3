"""The style of each predictor, eviction policy and system, the same in every figure.

Names that belong to one idea share a hue: a system, the predictor that it forecasts with and its
eviction policy. Within a table of names the markers differ too, so that a figure can be read
without its colours.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from zlib import crc32

from runtime.tools.report.figures import DARK, HUES, LIGHT, hue_color, muted_color, text_color

SOLID, DASHED, DOTTED = "-", (0, (4.5, 1.6)), (0, (1.2, 1.4))
VARIANTS = {
    "2": (DASHED, "d"),
    "3": (DOTTED, "8"),
    "one-by-one": (DOTTED, "x"),
    "at-once": (DASHED, "x"),
}
"""Dashes and marker of forecasts two and three layers ahead, and of the order of misses."""
VARIANT = re.compile(r"-([23]|one-by-one|at-once)$|, ([23]) ahead$")
"""Ends of names such as `skip-2`, `mlp, 2 ahead` and `fmoe-one-by-one`."""
GREY, INK = "grey", "ink"
"""Instead of a hue: of the baseline that others are compared with, and of the bound."""
THIN, MIDDLE, THICK = 1.5, 2.2, 3.0


@dataclass(frozen=True)
class SeriesStyle:
    """The look of one name's line, bar or dot."""

    hue: str
    """One of `HUES`, or `GREY` or `INK`."""
    marker: str
    dashes: str | tuple[int, tuple[float, ...]] = SOLID
    width: float = THIN

    @property
    def color(self) -> str:
        """The colour in the scheme that is being drawn."""
        if self.hue == GREY:
            return muted_color()
        return text_color() if self.hue == INK else hue_color(self.hue)


STYLES: Mapping[str, SeriesStyle] = MappingProxyType(
    {
        # Ours: the system, its predictor, its eviction policy.
        "moecast": SeriesStyle("blue", "o", width=THICK),
        "residual": SeriesStyle("blue", "o", width=THICK),
        "reuse": SeriesStyle("blue", "o", width=THICK),
        # What the others are measured by.
        "on-demand": SeriesStyle(GREY, "d", width=MIDDLE),
        "lru": SeriesStyle(GREY, "d", width=MIDDLE),
        "bound": SeriesStyle(INK, ".", DOTTED, width=MIDDLE),
        "oracle": SeriesStyle(INK, ".", DASHED),
        "belady": SeriesStyle(INK, ".", DOTTED, width=MIDDLE),
        # ProMoE and its networks.
        "promoe": SeriesStyle("red", "s", width=MIDDLE),
        "stride": SeriesStyle("red", "s"),
        "mlp": SeriesStyle("salmon", "h", DASHED),
        "pre-attention": SeriesStyle("maroon", ">"),
        # The other papers' systems and the predictors that they forecast with.
        "fmoe": SeriesStyle("magenta", "D"),
        "expert-map": SeriesStyle("magenta", "D"),
        "moe-infinity-request": SeriesStyle("indigo", "^"),
        "eam-request": SeriesStyle("indigo", "^"),
        "moe-infinity-sequence": SeriesStyle("lilac", "v", DASHED),
        "eam-sequence": SeriesStyle("lilac", "v", DASHED),
        "klotski": SeriesStyle("teal", "P"),
        "correlation": SeriesStyle("teal", "P"),
        "mixtral-offloading": SeriesStyle("orange", "X"),
        "skip": SeriesStyle("orange", "X"),
        "deepspeed": SeriesStyle("brown", "*"),
        "dependency": SeriesStyle("brown", "*"),
        "brainstorm": SeriesStyle("lime", "p", DASHED),
        "popularity": SeriesStyle("lime", "p", DASHED),
        # Without a paper.
        "token": SeriesStyle("cyan", "<"),
        "lfu": SeriesStyle("green", "h"),
        "decayed-lfu": SeriesStyle("moss", "s", DASHED),
        "regret": SeriesStyle("blue", "H", DASHED, width=MIDDLE),
        "static": SeriesStyle("navy", ">", DASHED),
        "least-stale": SeriesStyle("orange", "X"),
        "neighbour": SeriesStyle("cyan", "<"),
    }
)


def scheme_colors(name: str) -> tuple[str, str] | None:
    """Return a name's colours on light and dark background; None if it is not in the table."""
    if name not in STYLES:
        return None
    hue = STYLES[name].hue
    if hue == GREY:
        return LIGHT.muted, DARK.muted
    if hue == INK:
        return LIGHT.ink, DARK.ink
    return LIGHT.cycle[HUES.index(hue)], DARK.cycle[HUES.index(hue)]


OTHER_MARKERS = "o^vDsP"


def series_style(label: str) -> SeriesStyle:
    """Return the style of a name.

    A variant (`skip-2`, `promoe without chunks`) has its name's hue. A name that is not in the
    table has a style that depends on nothing but the name.
    """
    label = label.removesuffix(" (simulated)").removesuffix(", 1 ahead")
    if label in STYLES:
        return STYLES[label]
    kind, variant = VARIANT.sub("", label), VARIANT.search(label)
    if kind in STYLES and variant is not None:
        dashes, marker = VARIANTS[variant[1] or variant[2]]
        return replace(STYLES[kind], dashes=dashes, marker=marker)
    number = crc32(label.encode())
    marker = OTHER_MARKERS[number // len(HUES) % len(OTHER_MARKERS)]
    name = re.split(r"[ ,]", label, maxsplit=1)[0]
    hue = STYLES[name].hue if name in STYLES else HUES[number % len(HUES)]
    return SeriesStyle(hue, marker, DASHED)


def line_style(label: str) -> dict[str, Any]:
    """Return the arguments of matplotlib's `plot` for a name."""
    style = series_style(label)
    return {
        "color": style.color,
        "marker": style.marker,
        "linestyle": style.dashes,
        "linewidth": style.width,
    }
