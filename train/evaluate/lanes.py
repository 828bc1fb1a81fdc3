"""The timeline's figure: a lane for the computation and one for the link of each system."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.evaluate.figures import Drawing
from train.evaluate.timeline import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"compute": "C0", "stall": "C1", "fetch": "C3", "prefetch": "C2"}
TOLD = {
    "compute": "compute",
    "stall": "stall",
    "fetch": "fetch, as a router asked",
    "prefetch": "fetch, as was forecast",
}


def timeline_figure(spans: Sequence[Span], *, hardware: str, budget: str, batch: int) -> Drawing:
    """The same layers of the same token, system below system, on one axis of time."""
    systems = list(dict.fromkeys(span.system for span in spans))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        seen: set[str] = set()
        for place, system in enumerate(systems):
            for kind, colour in COLOURS.items():
                lane = 0.0 if kind in ("compute", "stall") else 0.42
                bars = [
                    (span.start_ms, span.end_ms - span.start_ms)
                    for span in spans
                    if (span.system, span.kind) == (system, kind)
                ]
                if bars:
                    axes.broken_barh(
                        bars,
                        (place + lane + 0.08, 0.36),
                        facecolor=colour,
                        edgecolor=figure.get_facecolor(),
                        linewidth=0.6,
                        label=None if kind in seen else TOLD[kind],
                    )
                    seen.add(kind)
        axes.set_yticks([place + 0.47 for place in range(len(systems))], systems)
        axes.set_ylim(len(systems), -0.1)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms")
        axes.grid(visible=False, axis="y")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    columns = ("system", "kind", "start_ms", "end_ms", "layer", "expert")
    return Drawing(
        "timeline",
        "Timeline of a few layers",
        draw,
        columns,
        [(one.system, one.kind, one.start_ms, one.end_ms, one.layer, one.expert) for one in spans],
        f"{hardware}, budget {budget}, batch {batch}: the same layers of the same token. Above, "
        "the computation and its stalls; below, the link.",
        (9.5, 1.0 + 0.8 * max(1, len(systems))),
    )
