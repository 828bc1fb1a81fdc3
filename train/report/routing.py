"""Unevenness of the model's routing over the corpus and within a request (ProMoE, figure 5 a).

Shape suffixes: L layers, E experts, N tokens, K top-k.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace, TraceSignal
from predictors.table import Table
from runtime.tools.report.figures import Record, draw_legend, draw_lines
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.series_styles import HUES
from train.data import read_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_TOKENS = 16
"""Requests with fewer tokens are left out of the mean over requests."""
MOST_REQUESTS = 200
"""Requests that the mean is taken over: enough for a good estimate."""


def cumulative_LE(chosen_LNK: NDArray[np.integer], num_experts: int) -> NDArray[np.float64]:
    """Share of a layer's choices that go to its 1, 2, 3... most chosen experts."""
    # The id E is no choice.
    counts_LE = np.stack(
        [np.bincount(own.ravel(), minlength=num_experts)[:num_experts] for own in chosen_LNK]
    )
    ordered_LE = -np.sort(-counts_LE, axis=1)
    return ordered_LE.cumsum(axis=1) / np.maximum(1, ordered_LE.sum(axis=1, keepdims=True))


def share_of_choices(trace: Trace) -> Table | None:
    """Return the shares over held-out tokens and requests; None if no request is long enough."""
    rows, num_experts = trace.rows("held_out"), trace.spec.num_experts
    _, first, lengths = np.unique(trace.requests[rows], return_index=True, return_counts=True)
    kept = np.flatnonzero(lengths >= LEAST_TOKENS)[:MOST_REQUESTS]
    if not len(kept):
        return None
    chosen_LNK = read_layers(trace, TraceSignal.EXPERTS, rows)
    corpus_LE = cumulative_LE(chosen_LNK, num_experts)
    requests = [
        cumulative_LE(chosen_LNK[:, first[r] : first[r] + lengths[r]], num_experts) for r in kept
    ]
    columns = {
        "share_of_experts": np.arange(1, num_experts + 1) / num_experts,
        "corpus_mean": corpus_LE.mean(axis=0),
        "corpus_lowest": corpus_LE.min(axis=0),
        "corpus_highest": corpus_LE.max(axis=0),
        "request_mean": np.mean(requests, axis=(0, 1)),
    }
    return Table.of([*columns], np.stack([*columns.values()], axis=1).tolist())


def popularity(report: HtmlReport, trace: Trace) -> None:
    """Draw the cumulative share of the most chosen experts."""
    heading = "How uneven routing is: cumulative share of choices"
    table = share_of_choices(trace)
    if table is None:
        report.add(heading, note="No held-out request is long enough to show its routing.")
        return
    report.add(
        heading,
        table,
        draw_popularity,
        name="share-of-most-chosen-experts",
        note="On the dotted line all experts are chosen as often, as load balancing wants it. The "
        "further above it, the more a fixed set of popular experts covers (corpus), or the more a "
        "cache has from what was used before (request). As in ProMoE, figure 5 a.",
        inches=(8, 3.8),
    )


def draw_popularity(figure: "Figure", records: Sequence[Record]) -> None:
    axes = figure.subplots()
    from_zero = [dict.fromkeys(records[0], 0.0), *records]
    values = {key: [record[key] for record in from_zero] for key in records[0]}
    share, blue, red = values["share_of_experts"], HUES["blue"], HUES["red"]
    axes.fill_between(
        share,
        values["corpus_lowest"],
        values["corpus_highest"],
        color=blue,
        alpha=0.22,
        linewidth=0,
        label="corpus, all layers",
    )
    shown = {
        "corpus, mean of layers": (share, values["corpus_mean"]),
        "one request, mean": (share, values["request_mean"]),
    }
    draw_lines(axes, shown, [blue, red])
    draw_lines(axes, {"even": ([0, 1], [0, 1])})
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    axes.set(xlabel="share of the experts, most chosen first", ylabel="share of the choices")
    draw_legend(figure)
