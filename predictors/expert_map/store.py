"""The deduplicated store of expert maps (fMoE, sections 4.1 and 4.4).

Shape suffixes: T new iterations, C capacity, L layers, E experts, D hidden size.
"""

import numpy as np

from predictors.base import Floats
from predictors.eam.matrix import normalize_rows


class ExpertMapStore:
    """Expert maps (each layer's router probabilities) and semantic embeddings of past iterations.

    Iterations are the last axis of the arrays, so that a search is one matrix product.
    """

    def __init__(self, capacity: int, num_layers: int, num_experts: int, hidden_size: int):
        self.capacity = capacity
        self.size = 0
        self.maps_LEC = np.zeros((num_layers, num_experts, capacity), np.float32)
        self.embeddings_DC = np.zeros((hidden_size, capacity), np.float32)
        """Each at length 1."""
        self.lengths_LC = np.zeros((num_layers, capacity), np.float32)
        """Length of layers 0..l of each flattened map: the divisor of equation 5."""

    def add(self, maps_LET: Floats, embeddings_DT: Floats, redundancy_TC: Floats) -> None:
        """Adds iterations; in a full store, each replaces the most redundant one (section 4.4).

        `redundancy_TC`, `[T, size]`, compares them with the stored maps.
        """
        num_new = maps_LET.shape[2]
        free = min(num_new, self.capacity - self.size)
        self._write(np.arange(self.size, self.size + free), slice(0, free), maps_LET, embeddings_DT)
        old, self.size = self.size, self.size + free
        if free == num_new:
            return
        if not old:
            # More than the capacity, and nothing to compare with: the first ones are stored.
            return
        # Of several that replace the same one, the last is stored.
        replaced = redundancy_TC[free:].argmax(axis=1)
        positions, last = np.unique(replaced[::-1], return_index=True)
        self._write(positions, num_new - 1 - last, maps_LET, embeddings_DT)

    def _write(
        self,
        positions: np.ndarray,
        new: np.ndarray | slice,
        maps_LET: Floats,
        embeddings_DT: Floats,
    ) -> None:
        maps = maps_LET[:, :, new]
        self.maps_LEC[:, :, positions] = maps
        self.embeddings_DC[:, positions] = normalize_rows(embeddings_DT[:, new].T).T
        self.lengths_LC[:, positions] = np.sqrt(np.cumsum(np.square(maps).sum(axis=1), axis=0))


def redundancy_scores(
    semantic_TC: Floats, trajectory_TC: Floats, *, distance: int, num_layers: int
) -> Floats:
    """Returns `RDY = d/L score_sem + (L - d)/L score_map` (fMoE, section 4.4).

    Each score is weighted by the share of layers that it forecasts.
    """
    share = distance / num_layers
    return share * semantic_TC + (1.0 - share) * trajectory_TC
