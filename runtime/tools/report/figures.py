"""Figures in a light and a dark colour scheme; matplotlib is imported when the first is drawn.

A figure is a function that draws on an empty `matplotlib.figure.Figure`. It is called once per
scheme, so it must take colours from here or from matplotlib's cycle (`C0`, `C1`...).
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]

INCHES = (8.0, 4.2)
"""Default width and height; letters are then as large as the page's text."""
DPI = 150
"""Resolution of the PNG: sharp on a screen of double density."""


@dataclass(frozen=True)
class ColorScheme:
    """Colours on one background."""

    surface: str
    ink: str
    muted: str
    line: str
    cycle: tuple[str, ...]
    """Distinguishable with red-green colour blindness; neighbours differ in lightness."""
    ramp: tuple[str, ...]
    """From 0 (close to the background) to the maximum."""


LIGHT = ColorScheme(
    surface="#ffffff",
    ink="#1c1c1a",
    muted="#62615c",
    line="#e3e2dd",
    cycle=(
        "#2a78d6", "#e34948", "#1baf7a", "#eda100", "#4a3aa7", "#e87ba4", "#eb6834", "#008300",
    ),
    ramp=("#f4f7fb", "#b7d3f6", "#5598e7", "#1c5cab", "#0d366b"),
)  # fmt: skip
DARK = ColorScheme(
    surface="#1a1a19",
    ink="#ebeae6",
    muted="#a3a29b",
    line="#32322f",
    cycle=(
        "#3987e5", "#e66767", "#199e70", "#c98500", "#9085e9", "#d55181", "#d95926", "#5fae45",
    ),
    ramp=("#1f2630", "#104281", "#256abf", "#6da7ec", "#cde2fb"),
)  # fmt: skip

RAMP = {LIGHT: "moecast-light", DARK: "moecast-dark"}


@contextmanager
def use_scheme(colours: ColorScheme) -> Iterator[None]:
    """Style matplotlib with these colours within the context."""
    import matplotlib
    from cycler import cycler
    from matplotlib.colors import LinearSegmentedColormap

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


def render_figure(
    draw: Draw, colours: ColorScheme, *, inches: tuple[float, float], kinds: Sequence[str]
) -> list[bytes]:
    """Render a figure as each of the kinds (`svg`, `png`); equal drawings give equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = []
    with use_scheme(colours):
        figure = Figure(figsize=inches)
        FigureCanvasAgg(figure)
        draw(figure)
        for kind in kinds:
            file = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
            files.append(file.getvalue())
            # The layout is found once: it takes as long as drawing.
            figure.set_layout_engine("none")
    return files
