"""Routing of the model over the corpus, a request and a step.

The figures are those of fMoE, figure 3, and ProMoE, figure 5 a.

Shape suffixes: L layers, E experts, R requests.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace, TraceSignal
from predictors.metrics import Phase

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
    owner = trace.requests[rows]
    names, first, lengths = np.unique(owner, return_index=True, return_counts=True)
    kept = np.flatnonzero(lengths >= LEAST_TOKENS)[:MOST_REQUESTS]
    if not len(kept):
        return None
    corpus, requests = [], []
    for layer in range(trace.spec.num_layers):
        chosen_NK = trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64)
        corpus.append(count_choices(chosen_NK, trace.spec.num_experts))
        requests.append(
            [
                count_choices(chosen_NK[first[r] : first[r] + lengths[r]], trace.spec.num_experts)
                for r in kept
            ]
        )
    place = int(np.argsort(lengths[kept], kind="stable")[len(kept) // 2])
    mine = rows[owner == names[kept[place]]]
    generated = mine[trace.phases[mine] == Phase.DECODE]
    # A prompt's last token where nothing was generated: either is one token's routing.
    row = int((generated if len(generated) else mine)[-1])
    step = [
        count_choices(
            trace.column(TraceSignal.EXPERTS, layer)[row : row + 1].astype(np.int64),
            trace.spec.num_experts,
        )
        for layer in range(trace.spec.num_layers)
    ]
    return RoutingPatterns(
        corpus_LE=np.stack(corpus),
        requests_RLE=np.array(requests).swapaxes(0, 1),
        place=place,
        request_tokens=len(mine),
        step_LE=np.stack(step),
    )


def count_choices(chosen_NK: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    return np.bincount(chosen_NK.ravel(), minlength=num_experts)
