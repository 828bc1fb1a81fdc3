"""The routing of recorded steps.

Shape suffixes: K top_k, T tokens of the step.
"""

from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from predictors.base import Ints
from predictors.spec import ModelSpec
from runtime.sim.step import RecordedStep


def count_tokens(experts_TK: Ints, num_experts: int) -> dict[int, int]:
    """Returns a layer's chosen experts, ascending, with their numbers of tokens.

    The id `num_experts` stands for a choice of none and is left out, as it is live.
    """
    if len(experts_TK) == 1:
        return {e: 1 for e in sorted(experts_TK[0].tolist()) if e < num_experts}
    count_E = np.bincount(experts_TK.reshape(-1), minlength=num_experts)[:num_experts]
    chosen = np.flatnonzero(count_E)
    return dict(zip(chosen.tolist(), count_E[chosen].tolist(), strict=True))


class RecordedRouting:
    """The experts that some token is routed to, ascending, for each step and layer.

    Takes two bytes for each expert and eight for each layer of a step: a million steps of twelve
    layers and four experts take 0.2 GB, where lists would take 2.
    """

    def __init__(self, steps: Iterable[RecordedStep], spec: ModelSpec):
        self._num_layers = spec.num_layers
        self._experts = array("h")
        self._starts = array("q", [0])
        for step in steps:
            for layer in range(spec.num_layers):
                self._experts.extend(count_tokens(step.experts(layer), spec.num_experts))
                self._starts.append(len(self._experts))

    def __iter__(self) -> Iterator[list[list[int]]]:
        for first in range(0, len(self._starts) - 1, self._num_layers):
            bounds = self._starts[first : first + self._num_layers + 1]
            yield [self._experts[start:end].tolist() for start, end in pairwise(bounds)]
