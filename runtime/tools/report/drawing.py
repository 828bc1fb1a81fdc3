"""Figures in the page's two colour schemes. matplotlib is imported when the first one is drawn.

A figure is a function that draws on an empty `matplotlib.figure.Figure`. It is called once for each
scheme, so it takes colours from here or from matplotlib's cycle (`C0`, `C1`...), never its own.
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
"""Width and height unless a figure says otherwise: on the page, letters as large as the text's."""
DPI = 150
"""Of the PNG: sharp on a screen of twice the usual density."""


@dataclass(frozen=True)
class Scheme:
    """Colours on one background, as matplotlib's settings."""

    surface: str
    ink: str
    muted: str
    line: str
    cycle: tuple[str, ...]
    """Told apart by eyes that confuse red and green too; neighbours differ in lightness."""
    ramp: tuple[str, ...]
    """From nothing (close to the background) to most."""


LIGHT = Scheme(
    surface="#ffffff",
    ink="#1c1c1a",
    muted="#62615c",
    line="#e3e2dd",
    cycle=(
        "#2a78d6", "#e34948", "#1baf7a", "#eda100", "#4a3aa7", "#e87ba4", "#eb6834", "#008300",
    ),
    ramp=("#f4f7fb", "#b7d3f6", "#5598e7", "#1c5cab", "#0d366b"),
)  # fmt: skip
DARK = Scheme(
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
def scheme(colours: Scheme) -> Iterator[None]:
    """Style matplotlib with these colours, and as it was behind it."""
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
        # So that the same numbers give the same bytes.
        "svg.hashsalt": "moecast",
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        yield


def ink() -> str:
    """The text's colour in the scheme that is being drawn."""
    return _setting("text.color")


def muted() -> str:
    """For what stands in the background: labels, series of which there are many."""
    return _setting("axes.labelcolor")


def surface() -> str:
    """The background's colour."""
    return _setting("figure.facecolor")


def _setting(name: str) -> str:
    import matplotlib

    return str(matplotlib.rcParams[name])


def drawn(
    draw: Draw, colours: Scheme, *, inches: tuple[float, float], kinds: Sequence[str]
) -> list[bytes]:
    """The figure as each of `svg`, `png`; the same bytes for the same drawing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = []
    with scheme(colours):
        figure = Figure(figsize=inches)
        FigureCanvasAgg(figure)
        draw(figure)
        for kind in kinds:
            file = io.BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
            files.append(file.getvalue())
            # Once is enough: finding the layout takes as long as drawing.
            figure.set_layout_engine("none")
    return files
