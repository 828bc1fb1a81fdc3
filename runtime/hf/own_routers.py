"""The predictor that is made of the model itself: a later layer's own router."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from predictors.skip import SkipPredictor
from runtime.hf.layers import MoeLayer


def build_skip_predictor(
    layers: Sequence[MoeLayer], given: Mapping[str, Any]
) -> SkipPredictor | None:
    """Skip from the routers' weights, or None where a router is not one matrix.

    `given` are the `spec` of the model and the predictor's options. A router's bias is left out.
    """
    spec = given["spec"]
    weights = [getattr(layer.router, "weight", None) for layer in layers]
    shape = (spec.num_experts, spec.hidden_size)
    found = [w for w in weights if isinstance(w, Tensor) and tuple(w.shape) == shape]
    if spec.num_layers < 2 or len(found) < len(layers):
        return None
    routers_LED = np.stack([weight.detach().float().cpu().numpy() for weight in found])
    return SkipPredictor(routers_LED=routers_LED, **given)
