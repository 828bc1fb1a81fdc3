"""Routing of the model over the corpus, a request and a step, and its figures.

The figures are those of fMoE, figure 3, and ProMoE, figure 5 a.

Shape suffixes: L layers, E experts, R requests, N tokens, K top-k.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace, TraceSignal
from predictors.metrics import Phase
from predictors.spec import ModelSpec
from predictors.table import Table
from runtime.tools.report.figures import (
    Record,
    collect_columns,
    draw_legend,
    draw_lines,
    draw_panels,
    ramp_map,
)
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.series_styles import HUES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LEAST_TOKENS = 16
"""Requests with fewer tokens are left out."""
MOST_REQUESTS = 200
"""Requests that means are taken over: enough for a good estimate."""


@dataclass(frozen=True)
class RoutingPatterns:
    """Counts of choices. All held-out tokens, one request of middling length, one of its steps."""

    corpus_LE: NDArray[np.int64]
    requests_RLE: NDArray[np.int64]
    """Counts of the requests with at least LEAST_TOKENS tokens."""
    place: int
    """Index of the request that is shown."""
    request_tokens: int
    step_LE: NDArray[np.int64]
    """The choices of one generated token of that request."""

    @property
    def request_LE(self) -> NDArray[np.int64]:
        return self.requests_RLE[self.place]

    @cached_property
    def entropies(self) -> dict[str, NDArray[np.float64]]:
        """`[L]` for corpus, request (mean over requests) and step, 1: every expert as often."""
        one = np.stack([entropy_L(counts_LE) for counts_LE in self.requests_RLE])
        return {
            "corpus": entropy_L(self.corpus_LE),
            "request": one.mean(axis=0),
            "step": entropy_L(self.step_LE),
        }


def entropy_L(counts_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shannon entropy of each layer's choices, as a share of that of an even choice."""
    share_LE = counts_LE / np.maximum(1, counts_LE.sum(axis=1, keepdims=True))
    logs_LE = np.log(np.where(share_LE > 0, share_LE, 1.0))
    return -(share_LE * logs_LE).sum(axis=1) / np.log(counts_LE.shape[1])


def cumulative_E(counts_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """`[L, E]`: share of a layer's choices that go to its 1, 2, 3... most chosen experts."""
    ordered_LE = -np.sort(-counts_LE, axis=1)
    return ordered_LE.cumsum(axis=1) / np.maximum(1, ordered_LE.sum(axis=1, keepdims=True))


def count_routing(trace: Trace) -> RoutingPatterns | None:
    """Count the routing of the held-out requests; None if no request is long enough."""
    rows = trace.rows("held_out")
    _, first, lengths = np.unique(trace.requests[rows], return_index=True, return_counts=True)
    kept = np.flatnonzero(lengths >= LEAST_TOKENS)[:MOST_REQUESTS]
    if not len(kept):
        return None
    columns = (trace.column(TraceSignal.EXPERTS, layer) for layer in range(trace.spec.num_layers))
    chosen_LNK = np.stack([column[rows] for column in columns])
    spans = [slice(first[r], first[r] + lengths[r]) for r in kept]
    num_experts = trace.spec.num_experts
    place = int(np.argsort(lengths[kept], kind="stable")[len(kept) // 2])
    mine = np.arange(len(rows))[spans[place]]
    generated = mine[trace.phases[rows[mine]] == Phase.DECODE]
    # A prompt's last token where nothing was generated: either is one token's routing.
    last = int((generated if len(generated) else mine)[-1])
    return RoutingPatterns(
        corpus_LE=count_choices(chosen_LNK, num_experts),
        requests_RLE=np.stack([count_choices(chosen_LNK[:, s], num_experts) for s in spans]),
        place=place,
        request_tokens=len(mine),
        step_LE=count_choices(chosen_LNK[:, last : last + 1], num_experts),
    )


def count_choices(chosen_LNK: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """Count how often each layer's experts are chosen: `[L, E]`."""
    return np.stack([np.bincount(own.ravel(), minlength=num_experts) for own in chosen_LNK])


FULL_SCALE = 4.0
"""Times the even share at which a heatmap is darkest: a step lies above it, a corpus below."""


def even_LE(counts_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Choices of each expert, as multiples of an even share."""
    return counts_LE * counts_LE.shape[1] / np.maximum(1, counts_LE.sum(axis=1, keepdims=True))


def heatmaps(report: HtmlReport, routing: RoutingPatterns, spec: ModelSpec) -> None:
    """Draw heatmaps of expert choices (fMoE, figure 3 a)."""
    tokens = int(routing.corpus_LE[0].sum()) // spec.top_k
    parts = {
        "corpus": (f"corpus ({tokens:,} held-out tokens)", routing.corpus_LE),
        "request": (f"one request ({routing.request_tokens:,} tokens)", routing.request_LE),
        "step": ("one step (1 token)", routing.step_LE),
    }

    def draw(figure: "Figure", records: Sequence[Record]) -> None:  # noqa: ARG001 - as arrays
        panels = figure.subplots(3, 1, sharex=True)
        for axes, (title, counts_LE) in zip(panels, parts.values(), strict=True):
            shown = axes.imshow(
                even_LE(counts_LE),
                aspect="auto",
                vmin=0,
                vmax=FULL_SCALE,
                interpolation="nearest",
                cmap=ramp_map(),
            )
            entropy = entropy_L(counts_LE).mean()
            axes.set(title=f"{title}, entropy {entropy:.2f} of even", ylabel="layer")
            axes.grid(visible=False)
            axes.locator_params(axis="y", integer=True, nbins=4)
        panels[-1].set_xlabel("expert")
        bar = figure.colorbar(shown, ax=panels, shrink=0.6, aspect=28, extend="max")
        bar.set_label("times the even share")
        bar.outline.set_visible(False)

    rows = [
        [layer, expert, *(int(counts_LE[layer, expert]) for _, counts_LE in parts.values())]
        for layer in range(spec.num_layers)
        for expert in range(spec.num_experts)
    ]
    report.add(
        "Which experts are chosen: corpus, request, step",
        Table.of(["layer", "expert", *(f"choices_{name}" for name in parts)], rows),
        draw,
        name="expert-heatmaps",
        note="Routing is more uneven in a request than in the corpus, and most in a step, which is "
        "what a predictor forecasts (fMoE, figure 3). All three have the same scale.",
        inches=(8, 6.2),
    )


def entropies(report: HtmlReport, routing: RoutingPatterns) -> None:
    """Draw the entropy of routing by layer (fMoE, figure 3 b)."""
    columns = [values.tolist() for values in routing.entropies.values()]
    report.add(
        "Entropy of routing by layer",
        Table.of(["layer", *routing.entropies], list(zip(itertools.count(), *columns))),
        lambda figure, records: draw_panels(
            figure,
            {"": collect_columns(records, "layer")},
            xlabel="layer",
            ylabel="entropy, share of even",
            colors=list(HUES.values()),
            ylim=(0, 1.03),
        ),
        name="routing-entropy",
        note="Shannon entropy of a layer's choices over that of choosing every expert as often: 1 "
        f"is even. A request is the mean of {len(routing.requests_RLE):,} held-out ones. One step "
        "chooses top_k different experts, once each. As in fMoE, figure 3 b.",
        inches=(8, 3.2),
    )


def popularity(report: HtmlReport, routing: RoutingPatterns) -> None:
    """Draw the cumulative share of the most chosen experts (ProMoE, figure 5 a)."""
    corpus_LE = cumulative_E(routing.corpus_LE)
    each_RLE = np.stack([cumulative_E(counts_LE) for counts_LE in routing.requests_RLE])
    num_experts = corpus_LE.shape[1]
    columns = {
        "share_of_experts": np.arange(1, num_experts + 1) / num_experts,
        "corpus_mean": corpus_LE.mean(axis=0),
        "corpus_lowest": corpus_LE.min(axis=0),
        "corpus_highest": corpus_LE.max(axis=0),
        "request_mean": each_RLE.mean(axis=(0, 1)),
    }

    def draw(figure: "Figure", records: Sequence[Record]) -> None:
        axes = figure.subplots()
        from_zero = [dict.fromkeys(columns, 0.0), *records]
        lines = collect_columns(from_zero, "share_of_experts")
        share = [record["share_of_experts"] for record in from_zero]
        lowest, highest = (
            [record[f"corpus_{end}"] for record in from_zero] for end in ("lowest", "highest")
        )
        blue, red = HUES["blue"], HUES["red"]
        axes.fill_between(
            share, lowest, highest, color=blue, alpha=0.22, linewidth=0, label="corpus, all layers"
        )
        shown = {
            "corpus, mean of layers": lines["corpus_mean"],
            "one request, mean": lines["request_mean"],
        }
        draw_lines(axes, shown, [blue, red])
        draw_lines(axes, {"even": ([0, 1], [0, 1])})
        axes.set(xlim=(0, 1), ylim=(0, 1.01))
        axes.set(xlabel="share of the experts, most chosen first", ylabel="share of the choices")
        draw_legend(figure)

    rows = np.stack(list(columns.values()), axis=1).tolist()
    report.add(
        "How uneven routing is: cumulative share of choices",
        Table.of(list(columns), rows),
        draw,
        name="share-of-most-chosen-experts",
        note="On the dotted line all experts are chosen as often, as load balancing wants it. The "
        "further above it, the more a fixed set of popular experts covers (corpus), or the more a "
        "cache has from what was used before (request). As in ProMoE, figure 5 a.",
        inches=(8, 3.8),
    )
