"""Predictors that need no training: counted on a trace, collected from it or copied from the model.

Shape suffixes: N tokens or requests, L layers, E experts, F experts of the layer before, K top_k,
S token ids seen, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from collect.traces import Trace, TraceSignal
from collect.traces.reader import TraceStep
from predictors.base import Floats, Ints, Predictor
from predictors.baselines import (
    DependencyPredictor,
    PopularityPredictor,
    SkipPredictor,
    TokenPredictor,
)
from predictors.correlation import CorrelationPredictor
from predictors.eam.collection import (
    activation_ratios,
    attainable_accuracy,
    choice_probability,
    choose_representatives,
    count_rows,
    normalize_rows,
)
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import DATASET_SIZE, EamSequencePredictor
from predictors.expert_map import ExpertMapPredictor
from predictors.metrics import Phase
from predictors.spec import ModelSpec
from runtime.config import ModelConfig
from train.accuracy import replay_forecasts
from train.errors import TrainError


@dataclass(frozen=True)
class RouterWeights:
    """Router weights in float32, loaded from the model once, when they are first needed."""

    model: ModelConfig
    spec: ModelSpec

    @cached_property
    def weights(self) -> tuple[Floats, Floats | None]:
        """Matrices `[L, E, D]`, and biases `[L, E]` or None where routers have none.

        Raises:
            TrainError: a router is not one matrix over the experts.
        """
        # Late: torch and Transformers, which a replay does without.
        from runtime.hf.loading import load_stripped
        from runtime.store.model_source import resolve

        expected = (self.spec.num_experts, self.spec.hidden_size)
        matrices, biases = [], []
        for layer in load_stripped(resolve(self.model), self.model.dtype).layers:
            parameters = dict(layer.router.named_parameters())
            over_experts = [p for p in parameters.values() if p.shape[0] == expected[0]]
            of_rank = {parameter.ndim: parameter for parameter in over_experts}
            if 2 not in of_rank or of_rank[2].shape != expected:
                shapes = {name: tuple(p.shape) for name, p in parameters.items()}
                raise TrainError(
                    f"the router of {layer.name} has the parameters {shapes}: skip needs one "
                    f"matrix {expected}"
                )
            matrices.append(of_rank[2].detach().float().cpu().numpy())
            if 1 in of_rank:
                biases.append(of_rank[1].detach().float().cpu().numpy())
        return np.stack(matrices), np.stack(biases) if len(biases) == len(matrices) else None


SKIP_HORIZONS = (1, 2, 3)
"""Layers ahead at which skip is made, unless its options name one."""

INSUFFICIENT_QUANTILE = 0.1
"""A sequence is forecast insufficiently when it is forecast worse, measured by what it would have
allowed, than nine tenths of the training requests were by matrices other than their own."""

STEP_TOKENS = 256
"""Tokens whose maps go into the store at once: about a prompt."""


def chosen_columns(trace: Trace) -> Iterator[Ints]:
    """Yield each layer's chosen experts `[N, K]` over the training tokens, bottom first."""
    rows = trace.rows("train")
    for layer in range(trace.spec.num_layers):
        yield trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64)


def count_uses(trace: Trace) -> Ints:
    """Return `[L, E]`: how many training tokens each layer routed to each expert."""
    experts = trace.spec.num_experts
    columns = chosen_columns(trace)
    return np.stack([np.bincount(own.ravel(), minlength=experts)[:experts] for own in columns])


def fit_popularity(trace: Trace, **options: Any) -> PopularityPredictor:
    """Measure the share of the training tokens that each layer routed to each expert."""
    shares_LE = count_uses(trace) / max(1, len(trace.rows("train")))
    return PopularityPredictor(trace.spec, shares_LE.astype(np.float32), **options)


def fit_token(trace: Trace) -> TokenPredictor:
    """Counts the experts of each layer that each token id was routed to, over training tokens."""
    spec = trace.spec
    tokens = trace.tokens[trace.rows("train")].astype(np.int64)
    ids_S, place_N, uses_S = np.unique(tokens, return_inverse=True, return_counts=True)
    counts_SLE = np.empty((len(ids_S), spec.num_layers, spec.num_experts), np.int64)
    for layer, chosen_NK in enumerate(chosen_columns(trace)):
        counts_SLE[:, layer] = count_rows(chosen_NK, place_N, len(ids_S), spec.num_experts)
    return TokenPredictor.from_counts(spec, ids_S, counts_SLE, uses_S)


def fit_correlation(trace: Trace, **options: Any) -> CorrelationPredictor:
    """Count each token's pairs of experts in consecutive layers (Klotski, sections 6.2 and 8)."""
    spec = trace.spec
    experts = spec.num_experts
    pairs_LFE = np.zeros((spec.num_layers, experts, experts), np.float32)
    for layer, (before_NK, chosen_NK) in enumerate(pairwise(chosen_columns(trace)), start=1):
        for before_N in before_NK.T:
            # One more group than experts: of a choice of none, which is left out.
            pairs_LFE[layer] += count_rows(chosen_NK, before_N, experts + 1, experts)[:experts]
    uses_LE = count_uses(trace).astype(np.float32)
    return CorrelationPredictor(spec, pairs_LFE, uses_LE, **options)


def request_matrices(trace: Trace, *phases: Phase) -> Floats:
    """`[N, L, E]`: the EAM of each training request in these phases, in the trace's order."""
    rows = trace.rows("train")
    requests, place_N = np.unique(trace.requests[rows], return_inverse=True)
    is_counted_N = np.isin(trace.phases[rows], phases)
    counts = [
        count_rows(
            chosen_NK[is_counted_N], place_N[is_counted_N], len(requests), trace.spec.num_experts
        )
        for chosen_NK in chosen_columns(trace)
    ]
    return np.stack(counts, axis=1)


def fit_eam_sequence(
    trace: Trace, *, capacity: int = 128, seed: int = 0, **options: Any
) -> EamSequencePredictor:
    """The members nearest to the centroids of a k-means over the training requests' EAMs."""
    matrices = request_matrices(trace, *Phase)
    kept = choose_representatives(matrices, capacity, np.random.default_rng(seed))
    options.setdefault("insufficient", insufficient_share(matrices, kept, trace.spec.top_k))
    # Those that are stored, and others evenly over the trace.
    others = np.setdiff1d(np.arange(len(matrices)), kept)
    num_others = min(len(others), max(0, DATASET_SIZE - len(kept)))
    others = others[np.linspace(0, len(others) - 1, num_others).astype(np.int64)]
    dataset = matrices[np.sort(np.concatenate([kept, others]))]
    return EamSequencePredictor(
        trace.spec, matrices[kept], dataset, capacity=capacity, seed=seed, **options
    )


def insufficient_share(matrices_NLE: Floats, kept: np.ndarray, top_k: int) -> float:
    """Returns the share of the attainable accuracy below which a sequence counts as badly forecast.

    It is a low quantile of the share that the nearest stored EAM, without the request's, gives
    each training request.
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
    """Store the training requests' EAMs one after another, as if they had just been served."""
    fitted = EamRequestPredictor.empty(trace.spec, **options)
    parts = [request_matrices(trace, phase) for phase in Phase]
    for counts_LE in np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]):
        if counts_LE.any():
            fitted.store(counts_LE)
    return fitted


def fit_expert_map(trace: Trace, **options: Any) -> ExpertMapPredictor:
    """Show the predictor the training tokens in order and keep its store."""
    shown = ExpertMapPredictor.empty(trace.spec, **{**options, "learning": True})
    rows = trace.rows("train")
    for first in range(0, len(rows), STEP_TOKENS):
        for _ in replay_forecasts(shown, TraceStep(trace, rows[first : first + STEP_TOKENS])):
            pass
    store = shown.store
    maps_NLE = np.moveaxis(store.maps_LEC[:, :, : store.size], 2, 0)
    return ExpertMapPredictor(
        trace.spec, maps_NLE, store.embeddings_DC[:, : store.size].T, **options
    )


def make_skip(routers: RouterWeights, horizon: int) -> SkipPredictor | None:
    """Return skip at this horizon, None if the model has too few layers for it.

    Raises:
        TrainError: a router is not one matrix over the experts.
    """
    if horizon >= routers.spec.num_layers:
        return None
    return SkipPredictor(routers.spec, *routers.weights, horizon=horizon)


FITS: Mapping[str, Callable[..., Predictor]] = MappingProxyType(
    {
        TokenPredictor.kind: fit_token,
        PopularityPredictor.kind: fit_popularity,
        DependencyPredictor.kind: lambda trace, **_options: DependencyPredictor(trace.spec),
        EamSequencePredictor.kind: fit_eam_sequence,
        EamRequestPredictor.kind: fit_eam_request,
        ExpertMapPredictor.kind: fit_expert_map,
        CorrelationPredictor.kind: fit_correlation,
    }
)
"""Functions that fit each kind on a trace's training requests; skip is copied from the model."""


def fit_baseline(kind: str, trace: Trace, options: Mapping[str, Any], *, seed: int) -> Predictor:
    """Fit a kind of `FITS`; the seed is that of random choices, unless the options have one."""
    seeded = {"seed": seed} if kind == EamSequencePredictor.kind else {}
    return FITS[kind](trace, **{**seeded, **options})


def count_baselines(
    trace: Trace,
    routers: RouterWeights,
    kinds: Iterable[str],
    *,
    options: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> dict[str, Predictor]:
    """Return the predictors of these kinds that are not learned, by their name in the results."""
    baselines: dict[str, Predictor] = {}
    for kind in kinds:
        own = options.get(kind, {})
        if kind == SkipPredictor.kind:
            horizons = (int(own["horizon"]),) if own else SKIP_HORIZONS
            for horizon in horizons:
                if skip := make_skip(routers, horizon):
                    baselines[kind if horizon == 1 else f"{kind}-{horizon}"] = skip
        elif kind in FITS:
            baselines[kind] = fit_baseline(kind, trace, own, seed=seed)
    return baselines
