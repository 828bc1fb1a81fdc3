"""Latencies of predictors of every kind.

`predictor_latency.json` holds the latencies of one machine for the shapes of published models, as
`python -m benchmarks latency` measures them. Replays charge them as they are, or in proportion to
the latency of one kind that a described machine states or that was measured on this one.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LATENCY_FILE = Path(__file__).with_name("predictor_latency.json")


@dataclass(frozen=True, kw_only=True)
class TokenLatency:
    """Latency of one prediction: of all of a step's calls, divided by those that forecast."""

    one_us: float
    """For a step of one token."""
    more_us: float
    """For each further row of the step (`Predictor.count_rows`)."""

    def microseconds(self, num_rows: int) -> float:
        return self.one_us + self.more_us * (num_rows - 1)


@dataclass(frozen=True, kw_only=True)
class ShapeLatencies:
    """Latencies of each kind of predictor for one model."""

    hidden_size: int
    num_experts: int
    """Experts of all layers together."""
    kinds: Mapping[str, TokenLatency]

    def distance(self, hidden_size: int, num_experts: int) -> float:
        """Returns how far the model is from another: sum of the ratios' logarithms."""
        pairs = (self.hidden_size, hidden_size), (self.num_experts, num_experts)
        return sum(abs(math.log(max(1, first) / max(1, second))) for first, second in pairs)


@dataclass(frozen=True, kw_only=True)
class PredictorLatencies:
    """Latencies in proportion to that of one kind for one token.

    Args:
        kind: The kind that others are compared with.
        measured: Latencies of all kinds; empty: all take the same time.
    """

    kind: str = "mlp"
    measured: Mapping[str, TokenLatency] = field(default_factory=dict)

    @property
    def measured_us(self) -> float:
        """Latency of `kind` for one token, as measured; 0 if it was not."""
        return self.measured[self.kind].one_us if self.kind in self.measured else 0.0

    def ratio(self, kind: str, num_rows: int) -> float:
        """Returns the latency of `kind` for a step of `num_rows`; 1 if it was not measured."""
        if kind not in self.measured or self.kind not in self.measured:
            return 1.0
        return self.measured[kind].microseconds(num_rows) / self.measured[self.kind].one_us


def nearest_latencies(kind: str, *, hidden_size: int, num_experts: int) -> PredictorLatencies:
    """Returns the latencies for the measured shape that is most like this one.

    Args:
        kind: The kind whose latency a machine states.
        hidden_size: Width of the hidden state.
        num_experts: Experts of all layers together.
    """
    shape = min(
        read_latencies().values(), key=lambda shape: shape.distance(hidden_size, num_experts)
    )
    return PredictorLatencies(kind=kind, measured=dict(shape.kinds))


@functools.cache
def read_latencies() -> Mapping[str, ShapeLatencies]:
    """Returns the measured latencies by the shape's name."""
    return {
        name: ShapeLatencies(
            hidden_size=shape["hidden_size"],
            num_experts=shape["num_experts"],
            kinds={kind: TokenLatency(**latency) for kind, latency in shape["kinds"].items()},
        )
        for name, shape in json.loads(LATENCY_FILE.read_text())["shapes"].items()
    }
