"""A page with the distributions of latency, a curve for each system (fMoE, figure 10)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.serving.rows import ArrivalsReport, Percentiles, SystemLatencies
from predictors.units import GIB
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_styles import draw_legend, line_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LATENCIES = {
    "end-to-end": "From when a request was due to its last token",
    "first token": "From when a request was due to its first token",
    "token": "Between tokens after the first, the mean of each request",
}
"""Names of the latencies, with their headings."""


def latencies(system: SystemLatencies) -> dict[str, Percentiles]:
    """Returns the distributions in the order of `LATENCIES`."""
    distributions = (system.e2e_seconds, system.ttft_seconds, system.tpot_seconds)
    return dict(zip(LATENCIES, distributions, strict=True))


def build_page(report: ArrivalsReport) -> HtmlReport:
    page = HtmlReport(
        "Latency of replayed arrivals",
        f"{report.requests} requests of `{report.trace}`, {report.rate:.3f} a second, "
        f"{report.repetitions} times; model `{report.model}`, budget {report.budget}",
    )
    page.table(
        "Latency",
        ["system", *(f"{name} {at}, s" for name in LATENCIES for at in ("p50", "p99")),
         "hit rate", "GiB read"],
        [
            [
                name,
                *(v for latency in latencies(system).values() for v in (latency.p50, latency.p99)),
                system.counted.hit_rate,
                system.counted.bytes / GIB,
            ]
            for name, system in report.systems.items()
        ],
    )  # fmt: skip
    for latency, heading in LATENCIES.items():
        curves = {
            name: cumulative_shares(latencies(system)[latency].all)
            for name, system in report.systems.items()
        }
        page.figure(
            f"cdf-{latency.replace(' ', '-')}",
            heading,
            draw_curves(curves),
            ["system", "seconds", "share of requests"],
            [[name, *point] for name, points in curves.items() for point in points],
        )
    return page


def cumulative_shares(values: list[float]) -> list[tuple[float, float]]:
    """Returns seconds, and the share of requests that took at most that long."""
    return [(value, (place + 1) / len(values)) for place, value in enumerate(sorted(values))]


def draw_curves(curves: dict[str, list[tuple[float, float]]]) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for place, (name, points) in enumerate(curves.items()):
            x, y = [0.0, *(x for x, _ in points)], [0.0, *(y for _, y in points)]
            axes.step(x, y, where="post", label=name, **line_style(place) | {"marker": ""})
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of requests")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        draw_legend(figure, axes)

    return draw
