"""The routers of a model, which skip copies and residual starts from.

Shape suffixes: L layers, E experts, D hidden size.
"""

from functools import cached_property

import numpy as np

from predictors.base import Floats
from predictors.spec import ModelSpec
from runtime.config import ModelConfig
from train.errors import TrainError


class RouterWeights:
    """Router weights in float32, loaded from the model once, when they are first needed."""

    def __init__(self, model: ModelConfig, spec: ModelSpec):
        self.model = model
        self.spec = spec

    @property
    def matrices_LED(self) -> Floats:
        """`[L, E, D]`. Raises TrainError when a router is not one matrix over the experts."""
        return self._load[0]

    @property
    def biases_LE(self) -> Floats | None:
        """`[L, E]`, None where routers have no bias. Raises as `matrices_LED`."""
        return self._load[1]

    @cached_property
    def _load(self) -> tuple[Floats, Floats | None]:
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
