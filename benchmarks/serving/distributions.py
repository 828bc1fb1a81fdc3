"""A page of how latency was distributed, a curve for each system (fmoe, figure 10)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.tools.report.lines import legend, styled
from runtime.tools.report.page import Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHAT = {
    "e2e_seconds": ("end-to-end", "From when a request was due to its last token"),
    "ttft_seconds": ("first token", "From when a request was due to its first token"),
    "tpot_seconds": ("token", "Between tokens after the first, the mean of each request"),
}


def page_of(results: dict[str, Any]) -> Page:
    """Of what `benchmarks.serving.arrivals` found."""
    systems: dict[str, Any] = results["systems"]
    page = Page(
        "Latency of replayed arrivals",
        f"{results['requests']} requests of `{results['trace']}`, {results['rate']:.3f} a second, "
        f"{results['repetitions']} times; model `{results['model']}`, budget {results['budget']}",
    )
    page.table(
        "Latency",
        ["system", *(f"{short} {at}, s" for short, _ in WHAT.values() for at in ("p50", "p99")),
         "hit rate", "GiB read"],
        [
            [name]
            + [one[key][at] for key in WHAT for at in ("p50", "p99")]
            + [one["counted"]["hit_rate"], one["counted"]["bytes"] / 2**30]
            for name, one in systems.items()
        ],
    )  # fmt: skip
    for key, (short, heading) in WHAT.items():
        curves = {name: cumulative(one[key]["all"]) for name, one in systems.items()}
        page.figure(
            f"cdf-{short.replace(' ', '-')}",
            heading,
            drawing(curves),
            ["system", "seconds", "share of requests"],
            [[name, *point] for name, points in curves.items() for point in points],
        )
    return page


def cumulative(values: list[float]) -> list[tuple[float, float]]:
    """Seconds and the share of requests that took at most so long."""
    return [(value, (place + 1) / len(values)) for place, value in enumerate(sorted(values))]


def drawing(curves: dict[str, list[tuple[float, float]]]) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (name, points) in enumerate(curves.items()):
            x, y = [0.0, *(one for one, _ in points)], [0.0, *(one for _, one in points)]
            axes.step(x, y, where="post", label=name, **styled(place) | {"marker": ""})
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of requests")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        legend(figure, axes)

    return draw
