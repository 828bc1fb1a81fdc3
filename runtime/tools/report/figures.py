"""Figures in a light and a dark colour scheme; matplotlib is imported when the first is drawn.

A figure is a function that draws on an empty `matplotlib.figure.Figure`. It is called once per
scheme, so it must take colours from here or from `series_styles`.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]

INCHES = (8.0, 4.2)
"""Default width and height; letters are then as large as the page's text."""
DPI = 150
"""Resolution of the PNG: sharp on a screen of double density."""
TITLE_INCHES = 0.35
FOOT_POINTS = 6.8
"""Size of the line with a figure's origin."""
FOOT_CHARACTERS = 14
"""Characters of that line in an inch."""


HUES = (
    "blue", "red", "teal", "orange", "indigo", "magenta", "green", "brown", "cyan", "maroon",
    "salmon", "lilac", "moss", "lime", "navy",
)  # fmt: skip
"""Colours by name, in the order of matplotlib's cycle."""


@dataclass(frozen=True)
class ColorScheme:
    """Colours on one background."""

    surface: str
    ink: str
    muted: str
    line: str
    cycle: tuple[str, ...]
    """One colour for each of `HUES`, apart also for eyes without red or green cones."""
    ramp: tuple[str, ...]
    """From 0 (close to the background) to the maximum."""


LIGHT = ColorScheme(
    surface="#ffffff",
    ink="#1c1c1a",
    muted="#62615c",
    line="#e6e5e0",
    cycle=(
        "#377efe", "#e54041", "#09949d", "#f47500", "#15229e", "#ac37b1", "#06ac78", "#5a3d00",
        "#26a5f2", "#55111f", "#d3927f", "#d1a9de", "#8cb05c", "#b9c75a", "#004675",
    ),
    ramp=("#f4f7fb", "#b7d3f6", "#5598e7", "#1c5cab", "#0d366b"),
)  # fmt: skip
DARK = ColorScheme(
    surface="#1a1a19",
    ink="#ebeae6",
    muted="#a3a29b",
    line="#32322f",
    cycle=(
        "#0f7adc", "#cb452c", "#03ceca", "#f1a521", "#bc98ff", "#b04eaa", "#45d262", "#b17c5c",
        "#92e0ff", "#b44867", "#ff9798", "#97a5da", "#b0e9a7", "#dff364", "#4e6979",
    ),
    ramp=("#1f2630", "#104281", "#256abf", "#6da7ec", "#cde2fb"),
)  # fmt: skip

RAMP = {LIGHT: "moecast-light", DARK: "moecast-dark"}


@contextmanager
def use_scheme(colours: ColorScheme) -> Iterator[None]:
    """Style matplotlib with these colours within the context."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.rcsetup import cycler

    name = RAMP[colours]
    if name not in matplotlib.colormaps:
        matplotlib.colormaps.register(LinearSegmentedColormap.from_list(name, colours.ramp))
    settings = {
        "figure.facecolor": colours.surface,
        "figure.constrained_layout.use": True,
        "axes.facecolor": colours.surface,
        "axes.edgecolor": colours.line,
        "axes.labelcolor": colours.muted,
        "axes.titlecolor": colours.ink,
        "axes.titlesize": 10.5,
        "axes.titlepad": 8,
        "axes.titlelocation": "left",
        "axes.labelsize": 10,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=colours.cycle),
        "grid.color": colours.line,
        "grid.linewidth": 0.8,
        "xtick.color": colours.muted,
        "ytick.color": colours.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "text.color": colours.ink,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.labelcolor": colours.muted,
        "hatch.color": colours.surface,
        "image.cmap": name,
        "font.size": 10,
        "font.family": "DejaVu Sans",
        # Equal numbers produce equal bytes.
        "svg.hashsalt": "moecast",
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        yield


def text_color() -> str:
    """Colour of text in the current scheme."""
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def muted_color() -> str:
    """Colour of labels and secondary series in the current scheme."""
    import matplotlib

    return str(matplotlib.rcParams["axes.labelcolor"])


def hue_color(hue: str) -> str:
    """Return matplotlib's name of a hue in the current scheme."""
    return f"C{HUES.index(hue)}"


def ramp_colors(count: int) -> list[tuple[float, float, float, float]]:
    """Return colours from light to dark, for lines of a growing size."""
    import matplotlib

    ramp = matplotlib.colormaps[matplotlib.rcParams["image.cmap"]]
    return [ramp(0.35 + 0.65 * index / max(1, count - 1)) for index in range(count)]


def render_figure(
    draw: Draw,
    colours: ColorScheme,
    *,
    inches: tuple[float, float],
    kind: str,
    title: str = "",
    foot: str = "",
) -> bytes:
    """Render a figure as `svg` or `png`; equal drawings give equal bytes.

    Args:
        title: heading above all panels, for a file that stands alone.
        foot: small line below all panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = inches
    with use_scheme(colours):
        figure = Figure(figsize=(width, height + TITLE_INCHES * bool(title)))
        FigureCanvasAgg(figure)
        draw(figure)
        if title:
            figure.suptitle(title, x=0.006, ha="left", fontsize=12.5, weight="bold")
        if foot:
            lines = "\n".join(wrap(foot, int(width * FOOT_CHARACTERS)))
            figure.supxlabel(lines, x=0.006, ha="left", fontsize=FOOT_POINTS, color=colours.muted)
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
        return file.getvalue()
