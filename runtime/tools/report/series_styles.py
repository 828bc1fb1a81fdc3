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

INK, MUTED = "#1c1c1a", "#62615c"
"""Colours of text, and of labels and the baseline that others are compared with."""
HUES: Mapping[str, str] = MappingProxyType(
    {
        "blue": "#377efe",
        "red": "#e54041",
        "teal": "#09949d",
        "orange": "#f47500",
        "indigo": "#15229e",
        "magenta": "#ac37b1",
        "green": "#06ac78",
        "brown": "#5a3d00",
        "cyan": "#26a5f2",
        "maroon": "#55111f",
        "salmon": "#d3927f",
        "lilac": "#d1a9de",
        "moss": "#8cb05c",
        "lime": "#b9c75a",
        "navy": "#004675",
        "grey": MUTED,
        "ink": INK,
    }
)
"""Colours by name, apart also for eyes without red or green cones."""
OTHERS = list(HUES)[:-2]
"""Hues of names without a style of their own: grey is the baseline's, ink the bound's."""
BOUND = "bound"
"""Name of the line that no system can cross."""
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
THIN, MIDDLE, THICK = 1.5, 2.2, 3.0


@dataclass(frozen=True)
class SeriesStyle:
    """The look of one name's line, bar or dot."""

    hue: str
    """One of `HUES`."""
    marker: str
    dashes: str | tuple[int, tuple[float, ...]] = SOLID
    width: float = THIN

    @property
    def color(self) -> str:
        return HUES[self.hue]


LOOKS = {
    # Ours: the system, its predictor, its eviction policy.
    ("moecast", "residual", "reuse"): SeriesStyle("blue", "o", width=THICK),
    # What the others are measured by.
    ("on-demand", "lru"): SeriesStyle("grey", "d", width=MIDDLE),
    ("bound", "belady"): SeriesStyle("ink", ".", DOTTED, width=MIDDLE),
    ("oracle",): SeriesStyle("ink", ".", DASHED),
    ("even",): SeriesStyle("grey", "", DOTTED),
    # ProMoE and its networks.
    ("promoe",): SeriesStyle("red", "s", width=MIDDLE),
    ("stride",): SeriesStyle("red", "s"),
    ("mlp",): SeriesStyle("salmon", "h", DASHED),
    ("pre-attention",): SeriesStyle("maroon", ">"),
    # The other papers' systems and the predictors that they forecast with.
    ("fmoe", "expert-map"): SeriesStyle("magenta", "D"),
    ("moe-infinity-request", "eam-request"): SeriesStyle("indigo", "^"),
    ("moe-infinity-sequence", "eam-sequence"): SeriesStyle("lilac", "v", DASHED),
    ("klotski", "correlation"): SeriesStyle("teal", "P"),
    ("mixtral-offloading", "skip", "least-stale"): SeriesStyle("orange", "X"),
    ("deepspeed", "dependency"): SeriesStyle("brown", "*"),
    ("brainstorm", "popularity"): SeriesStyle("lime", "p", DASHED),
    # Without a paper.
    ("token", "neighbour"): SeriesStyle("cyan", "<"),
    ("lfu",): SeriesStyle("green", "h"),
    ("decayed-lfu",): SeriesStyle("moss", "s", DASHED),
    ("regret",): SeriesStyle("blue", "H", DASHED, width=MIDDLE),
    ("static",): SeriesStyle("navy", ">", DASHED),
}
STYLES: Mapping[str, SeriesStyle] = MappingProxyType(
    {name: style for names, style in LOOKS.items() for name in names}
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
        dashes, marker = VARIANTS[variant[1] or variant[2]]
        return replace(STYLES[kind], dashes=dashes, marker=marker)
    number = crc32(label.encode())
    marker = OTHER_MARKERS[number // len(OTHERS) % len(OTHER_MARKERS)]
    name = re.split(r"[ ,:]", label, maxsplit=1)[0]
    hue = STYLES[name].hue if name in STYLES else OTHERS[number % len(OTHERS)]
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


def is_bound(label: str) -> bool:
    """Return whether a series is the bound, which no other can cross."""
    return label.removesuffix(SIMULATED) == BOUND
