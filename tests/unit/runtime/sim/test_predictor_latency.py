"""Measured latencies of predictors, and the shape whose latencies a model gets."""

import pytest

from predictors.registry import KINDS, REUSE_PREDICTORS
from runtime.sim.hardware import (
    PredictorLatencies,
    TokenLatency,
    nearest_latencies,
    read_latencies,
)


def test_predictor_latencies__unknown_kinds_take_as_long_as_the_machines() -> None:
    measured = {
        "mlp": TokenLatency(one_us=10.0, more_us=1.0),
        "skip": TokenLatency(one_us=5.0, more_us=0.5),
    }
    latencies = PredictorLatencies(kind="mlp", measured=measured)
    assert latencies.ratio("mlp", 1) == 1.0
    assert latencies.ratio("skip", 1) == 0.5
    assert latencies.ratio("skip", 11) == 1.0
    assert latencies.ratio("truth", 11) == 1.0
    assert PredictorLatencies(kind="skip", measured=measured).ratio("mlp", 1) == 2.0


def test_read_latencies__every_kind_is_measured_for_every_shape() -> None:
    shapes = read_latencies()
    for shape in shapes.values():
        assert set(shape.kinds) == {*KINDS, *REUSE_PREDICTORS}
        assert all(latency.one_us > 0 <= latency.more_us for latency in shape.kinds.values())


@pytest.mark.parametrize("name", ["reference", "qwen1.5-moe", "mixtral-8x22b"])
def test_nearest_latencies__a_measured_shape_gets_its_own(name: str) -> None:
    shape = read_latencies()[name]
    nearest = nearest_latencies(
        "mlp", hidden_size=shape.hidden_size, num_experts=shape.num_experts + 1
    )
    assert nearest == PredictorLatencies(kind="mlp", measured=dict(shape.kinds))
