"""Accuracy that an entry's card promises, for comparison with the accuracy while it serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

ENTRY = "entry"
"""Name of the distance of forecasts at a step's start or from the first layer's input."""


def name_distance(signal: str, layer: int, target: int) -> str:
    """Returns the number of layers that a forecast looks ahead, or `ENTRY`.

    Args:
        signal: Event that was answered with the forecast.
        layer: Layer of the event; negative at the beginning of a step.
        target: Layer that was forecast.
    """
    # The input of the first layer is all that its first forecasts can have.
    if layer < 0 or (signal == "layer_input" and layer == 0):
        return ENTRY
    return f"{target - layer}"


Accuracies = Sequence[float | None]
"""One for each layer; None: not forecast, or not measured."""


@dataclass(frozen=True, kw_only=True)
class CardAccuracy:
    """Held-out accuracy of an entry, as `moecast train` measured it."""

    entry: str
    """Name of the entry."""
    decode: Accuracies
    """In decode steps, of each layer's last forecast."""
    overall: Accuracies
    """The same in all steps."""
    by_distance: Mapping[str, Accuracies] = field(default_factory=dict)
    """In all steps, of all forecasts at a distance (`name_distance`); empty for predictors with one
    distance."""

    def expect(self, layer: int, distance: str) -> float | None:
        """Returns the accuracy to expect in decode steps of a layer forecast at this distance.

        A system may leave out a predictor's last forecasts, which are often too late to be used
        (`refresh_last=false`). The difference to earlier ones was measured over all steps.
        """
        decode = self.decode[layer]
        if decode is None or not self.by_distance:
            return decode
        last, earlier = self.overall[layer], self._find(layer, distance)
        return None if last is None or earlier is None else decode - (last - earlier)

    def _find(self, layer: int, distance: str) -> float | None:
        accuracies = self.by_distance.get(distance)
        return None if accuracies is None else accuracies[layer]

    @classmethod
    def parse(cls, entry: str, table: Mapping[str, Any], *, num_layers: int) -> Self | None:
        """Reads the layers' table of an entry's `metrics.json`, which anyone may have written.

        Returns None if it does not have the accuracies of all layers.
        """
        decode = parse_accuracies(table.get("accuracy_decode"), num_layers)
        overall = parse_accuracies(table.get("accuracy"), num_layers)
        if decode is None or overall is None:
            return None
        horizons = table.get("by_horizon")
        parsed = {
            str(name): parse_accuracies(figures.get("accuracy"), num_layers)
            for name, figures in (horizons.items() if isinstance(horizons, dict) else ())
            if isinstance(figures, dict)
        }
        by_distance = {name: values for name, values in parsed.items() if values is not None}
        return cls(entry=entry, decode=decode, overall=overall, by_distance=by_distance)


def parse_accuracies(values: object, num_layers: int) -> tuple[float | None, ...] | None:
    """Returns a list of shares, one for each layer; None if it is anything else."""
    if not isinstance(values, list) or len(values) != num_layers:
        return None
    if not all(one is None or (isinstance(one, int | float) and 0 <= one <= 1) for one in values):
        return None
    return tuple(values)
