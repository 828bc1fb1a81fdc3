"""Predictors that are counted or copied, not trained: token, popularity, skip.

Shape suffixes: L layers, E experts, D hidden size, S token ids seen.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from collect.traces import Trace, TraceSignal
from predictors.base import Floats, Ints
from predictors.popularity import PopularityPredictor
from predictors.skip import SkipPredictor
from predictors.spec import ModelSpec
from predictors.token import TokenPredictor
from runtime.config import ModelConfig
from runtime.store.model_source import resolve
from train.errors import TrainError


def chosen_columns(trace: Trace) -> Iterator[Ints]:
    """Each layer's chosen experts `[N, K]` over the training tokens, bottom first."""
    rows = trace.rows("train")
    for layer in range(trace.spec.num_layers):
        yield trace.column(TraceSignal.EXPERTS, layer)[rows].astype(np.int64)


def fit_popularity(trace: Trace, **options: Any) -> PopularityPredictor:
    """Share of the training tokens that each layer routed to each expert."""
    spec = trace.spec
    shares = [
        np.bincount(chosen.ravel(), minlength=spec.num_experts) / max(1, len(chosen))
        for chosen in chosen_columns(trace)
    ]
    return PopularityPredictor(spec, np.stack(shares).astype(np.float32), **options)


def fit_token(trace: Trace) -> TokenPredictor:
    """How often each token id went to each expert of each layer, over the training tokens."""
    spec = trace.spec
    tokens = trace.tokens[trace.rows("train")].astype(np.int64)
    ids_S, place_N, uses_S = np.unique(tokens, return_inverse=True, return_counts=True)
    counts_SLE = np.zeros((len(ids_S), spec.num_layers, spec.num_experts), dtype=np.int64)
    for layer, chosen_NK in enumerate(chosen_columns(trace)):
        # One flat count is far faster than adding at pairs of indices.
        flat = place_N[:, None] * spec.num_experts + chosen_NK
        counted = np.bincount(flat.ravel(), minlength=len(ids_S) * spec.num_experts)
        counts_SLE[:, layer] = counted.reshape(len(ids_S), spec.num_experts)
    return TokenPredictor.from_counts(spec, ids_S, counts_SLE, uses_S)


def router_weights(model: ModelConfig, spec: ModelSpec) -> tuple[Floats, Floats | None]:
    """The routers' matrices `[L, E, D]` and biases `[L, E]` (None without), in float32.

    Raises TrainError when a router is not one matrix over the experts.
    """
    # Late: torch and Transformers, which the rest of this file does without.

    from runtime.hf.loading import load_stripped

    stripped = load_stripped(resolve(model), model.dtype)
    matrices, biases = [], []
    for layer in stripped.layers:
        shapes = {name: tuple(one.shape) for name, one in layer.router.named_parameters()}
        found = {len(shape): name for name, shape in shapes.items() if shape[0] == spec.num_experts}
        if shapes.get(found.get(2, "")) != (spec.num_experts, spec.hidden_size):
            raise TrainError(
                f"the router of {layer.name} has the parameters {shapes}: skip needs one matrix "
                f"({spec.num_experts}, {spec.hidden_size})"
            )
        parameters = dict(layer.router.named_parameters())
        matrices.append(parameters[found[2]].detach().float().cpu().numpy())
        if 1 in found:
            biases.append(parameters[found[1]].detach().float().cpu().numpy())
    return np.stack(matrices), np.stack(biases) if len(biases) == len(matrices) else None


def make_skip(
    model: ModelConfig, spec: ModelSpec, *, horizons: tuple[int, ...]
) -> list[SkipPredictor]:
    """The skip baseline at each horizon that the model has layers for."""
    matrices, biases = router_weights(model, spec)
    return [
        SkipPredictor(spec, matrices, biases, horizon=horizon)
        for horizon in horizons
        if horizon < spec.num_layers
    ]
