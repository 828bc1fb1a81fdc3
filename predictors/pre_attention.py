"""Pre-attention: from what enters a layer to that layer's own experts.

The nearest forecast there is, for the first layer too, which no earlier layer can forecast; it
leaves only the layer's attention as time to fetch.
"""

from predictors.base import Floats, Forecasts, Signal
from predictors.learned import Learned


class PreAttention(Learned):
    """The same network as `mlp`, on the layer's input."""

    kind = "pre-attention"
    signals = frozenset({Signal.LAYER_INPUT})
    horizon = 0

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        return self.answer(layer, hidden_TD)
