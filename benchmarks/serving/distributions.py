"""Figures of the distributions of latency, a row for each system (fMoE, figure 10)."""

import numpy as np

from benchmarks.reports import Document
from predictors.table import Table
from runtime.tools.report.figures import (
    PERCENTILES,
    SPREADS_NOTE,
    Draw,
    draw_spreads,
    rows_height,
)
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import Provenance

LATENCIES = {
    "end-to-end": "Time from when a request was due to its last token",
    "first token": "Time from when a request was due to its first token",
    "token": "Time between tokens after the first, mean of each request",
}
"""Names of the latencies, with their headings."""


def latencies(system: Document) -> dict[str, Document]:
    """Returns the distributions in the order of `LATENCIES`."""
    distributions = (system.e2e_seconds, system.ttft_seconds, system.tpot_seconds)
    return dict(zip(LATENCIES, distributions, strict=True))


def build_page(report: Document) -> HtmlReport:
    """Returns a section with a figure for each latency."""
    page = HtmlReport(
        "Latency of replayed arrivals",
        f"{report.requests} requests of `{report.trace}`, {report.rate:.3f} a second, "
        f"{report.repetitions} times; model `{report.model}`, budget {report.budget}",
        provenance=Provenance(**report.origin),
    )
    for latency, heading in LATENCIES.items():
        curves = {
            name: cumulative_shares(latencies(system)[latency].all)
            for name, system in report.systems.items()
        }
        points = [[name, *point] for name, shares in curves.items() for point in shares]
        page.add(
            heading,
            Table.of(["system", "seconds", "share of requests"], points),
            draw_rows(
                {name: latencies(system)[latency].all for name, system in report.systems.items()}
            ),
            name=f"distribution-of-{latency.replace(' ', '-')}-latency",
            note=SPREADS_NOTE,
            inches=(8.0, rows_height(len(curves))),
        )
    return page


def cumulative_shares(values: list[float]) -> list[tuple[float, float]]:
    """Returns seconds, and the share of requests that took at most that long."""
    return [(value, (place + 1) / len(values)) for place, value in enumerate(sorted(values))]


def draw_rows(seconds: dict[str, list[float]]) -> Draw:
    """Returns a function that draws each system's percentiles."""
    spreads = {
        name: [float(value) for value in np.percentile(values, PERCENTILES)]
        for name, values in seconds.items()
    }
    return lambda figure, _: draw_spreads(figure, {"": spreads}, xlabel="seconds")
