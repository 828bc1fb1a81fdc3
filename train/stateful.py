"""Fits the predictors that remember requests and iterations: a table, collections, a store.

Shape suffixes: N requests, L layers, E experts, F experts of the layer before, K top_k.
"""

from typing import Any

import numpy as np

from collect.traces import Trace, TraceSignal
from predictors.base import Floats
from predictors.correlation import CorrelationPredictor
from predictors.eam.kmeans import choose_representatives
from predictors.eam.matrix import (
    activation_ratios,
    attainable_accuracy,
    choice_probability,
    normalize_rows,
)
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.expert_map.predictor import ExpertMapPredictor
from predictors.metrics import Phase
from train.accuracy import Block, forecasts
from train.baselines import chosen_columns

INSUFFICIENT_QUANTILE = 0.1
"""A sequence is forecast insufficiently when it is forecast worse, measured by what it would have
allowed, than nine tenths of the training requests were by matrices other than their own."""

STEP_TOKENS = 256
"""Tokens whose maps go into the store at once: about a prompt."""


def fit_correlation(trace: Trace, **options: Any) -> CorrelationPredictor:
    """Counts each training token's pairs of experts in consecutive layers (klotski 6.2, 8)."""
    spec = trace.spec
    experts = spec.num_experts
    pairs_LFE = np.zeros((spec.num_layers, experts, experts), np.float32)
    uses_LE = np.zeros((spec.num_layers, experts), np.float32)
    before_NK = None
    for layer, chosen_NK in enumerate(chosen_columns(trace)):
        # One more id than experts: a choice of none, counted and then left out.
        uses_LE[layer] = np.bincount(chosen_NK.ravel(), minlength=experts + 1)[:experts]
        if before_NK is not None:
            flat = (before_NK[:, :, None] * (experts + 1) + chosen_NK[:, None, :]).ravel()
            counted = np.bincount(flat, minlength=(experts + 1) ** 2)
            square = counted.reshape(experts + 1, experts + 1)
            pairs_LFE[layer] = square[:experts, :experts]
        before_NK = chosen_NK
    return CorrelationPredictor(spec, pairs_LFE, uses_LE, **options)


def request_matrices(trace: Trace, *phases: Phase) -> Floats:
    """`[N, L, E]`: the EAM of each training request in these phases, in the trace's order."""
    spec = trace.spec
    rows = trace.rows("train")
    requests, place = np.unique(trace.requests[rows], return_inverse=True)
    counted_N = np.isin(trace.phases[rows], phases)
    rows, place = rows[counted_N], place[counted_N]
    num_requests = len(requests)
    matrices = np.zeros((num_requests, spec.num_layers, spec.num_experts), np.float32)
    width = spec.num_experts + 1
    for layer in range(spec.num_layers):
        chosen_NK = trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64)
        flat = (place[:, None] * width + chosen_NK).ravel()
        counted = np.bincount(flat, minlength=num_requests * width)
        matrices[:, layer] = counted.reshape(num_requests, width)[:, : spec.num_experts]
    return matrices


def fit_eam_sequence(
    trace: Trace, *, capacity: int = 128, seed: int = 0, **options: Any
) -> EamSequencePredictor:
    """The members nearest to the centroids of a k-means over the training requests' EAMs."""
    matrices = request_matrices(trace, *Phase)
    kept = choose_representatives(matrices, capacity, np.random.default_rng(seed))
    options.setdefault("insufficient", insufficient_share(matrices, kept, trace.spec.top_k))
    return EamSequencePredictor(trace.spec, matrices[kept], capacity=capacity, seed=seed, **options)


def insufficient_share(matrices_NLE: Floats, kept: np.ndarray, top_k: int) -> float:
    """Share of the attainable accuracy below which a sequence counts as badly forecast: a low
    quantile of what the nearest stored EAM, its own left out, gives each training request.
    """
    if len(kept) < 2:
        return 0.0
    flat_NV = normalize_rows(matrices_NLE).reshape(len(matrices_NLE), -1)
    similarity_NC = flat_NV @ flat_NV[kept].T
    similarity_NC[kept, np.arange(len(kept))] = -1.0
    nearest_NLE = matrices_NLE[kept][similarity_NC.argmax(axis=1)]
    top_NLK = np.argsort(
        -choice_probability(activation_ratios(nearest_NLE), top_k), axis=2, kind="stable"
    )[..., :top_k]
    hits_N = np.take_along_axis(matrices_NLE, top_NLK, axis=2).sum(axis=(1, 2))
    accuracy_N = hits_N / np.maximum(matrices_NLE.sum(axis=(1, 2)), 1.0)
    share_N = accuracy_N / np.maximum(attainable_accuracy(matrices_NLE, top_k), 1e-12)
    return float(np.quantile(share_N, INSUFFICIENT_QUANTILE))


def fit_eam_request(trace: Trace, **options: Any) -> EamRequestPredictor:
    """Stores the training requests' EAMs one after another, as if they had just been served."""
    fitted = EamRequestPredictor.empty(trace.spec, **options)
    parts = [request_matrices(trace, phase) for phase in Phase]
    for counts_LE in np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]):
        if counts_LE.any():
            fitted.store(counts_LE)
    return fitted


def fit_expert_map(trace: Trace, **options: Any) -> ExpertMapPredictor:
    """Shows it the training tokens in their order, and keeps the store that this leaves."""
    shown = ExpertMapPredictor.empty(trace.spec, **{**options, "learning": True})
    rows = trace.rows("train")
    for first in range(0, len(rows), STEP_TOKENS):
        for _ in forecasts(shown, Block(trace, rows[first : first + STEP_TOKENS])):
            pass
    store = shown.store
    maps_NLE = np.moveaxis(store.maps_LEC[:, :, : store.size], 2, 0)
    return ExpertMapPredictor(
        trace.spec, maps_NLE, store.embeddings_DC[:, : store.size].T, **options
    )
