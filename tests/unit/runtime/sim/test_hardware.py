"""Described machines: times worked out by hand, and every profile, shape and predictor latency that
ships."""

from dataclasses import replace

import numpy as np
import pytest

from predictors.baselines import SkipPredictor
from predictors.registry import KINDS, REUSE_PREDICTORS
from runtime.config import HardwareConfig, ModelConfig, ShapeConfig
from runtime.presets import choice_names, load_hardware, load_shape
from runtime.profiling.local import read_model_shape
from runtime.sim import hardware
from tests.builders.traces import make_spec

MACHINE = HardwareConfig(
    name="toy", measured=False, link_bytes_per_second=10.0, link_latency_us=1e6,
    store_bytes_per_second=2.0, store_latency_us=3e6, memory_bytes_per_second=100.0, flops=50.0,
    kernel_us=0.0, predictor_us=5e5,
)  # fmt: skip
SHAPE = ShapeConfig(
    name="toy", num_layers=4, num_experts=10, top_k=1, expert_bytes=300, layer_bytes=200
)


def test_describe_hardware__times_by_hand() -> None:
    machine = hardware.describe_hardware(MACHINE, SHAPE)
    assert machine.chunk_bytes == (100, 100, 100)
    seconds = [machine.transfer_seconds(100, tier=tier) for tier in (0, 1)]
    assert (*seconds, machine.predictor_seconds) == (1.0 + 100 / 10.0, 3.0 + 100 / 2.0, 0.5)
    # 200 bytes at 100 a second; 100 weights x 2 operations x 1 token at 50 a second take longer.
    assert (machine.layer_seconds(1), machine.expert_seconds(1)) == (4.0, 2 * 150 / 50.0)
    assert machine.expert_seconds(3) == 3 * 2 * 150 / 50.0


def test_describe_hardware__packed_weights_only_read_faster() -> None:
    fast = replace(MACHINE, memory_bytes_per_second=1e9)
    machine = hardware.describe_hardware(fast, replace(SHAPE, bytes_per_weight=0.5))
    assert (machine.expert_seconds(1), machine.transfer_seconds(300)) == (2 * 600 / 50.0, 31.0)


def test_describe_hardware__launches_are_added() -> None:
    machine = hardware.describe_hardware(replace(MACHINE, kernel_us=1e6), SHAPE)
    assert (machine.layer_seconds(1), machine.expert_seconds(1)) == (4.0 + 20, 6.0 + 4)


def test_chunks__are_even_and_lose_nothing() -> None:
    assert hardware.split_chunks(134217728) == (44739242, 44739243, 44739243)


def test_count_tier_slots__host_memory_counts_where_it_is_too_small() -> None:
    # 40 experts of 300 bytes: 3,000 bytes hold a quarter; of 80 that are replayed, 20.
    small = hardware.describe_hardware(replace(MACHINE, host_bytes=3_000.0), SHAPE)
    assert hardware.count_tier_slots(small, 8, 80) == [8, 20]
    assert hardware.count_tier_slots(small, 30, 80) == [30, 30]
    for large in (replace(MACHINE, host_bytes=12_000.0), MACHINE):
        assert hardware.count_tier_slots(hardware.describe_hardware(large, SHAPE), 8, 80) == [8]


@pytest.mark.parametrize("name", choice_names("hardware"))
def test_profile__is_complete_and_names_its_source(name: str) -> None:
    one = load_hardware(name)
    assert one.name == name
    if one.measured:
        assert name == "local"
        return
    assert len(one.source) > 40
    figures = ("link_bytes_per_second", "memory_bytes_per_second", "flops")
    assert all(getattr(one, figure) > 0 for figure in figures)
    assert bool(one.host_bytes) == bool(one.store_bytes_per_second)
    assert one.predictor_kind in KINDS


@pytest.mark.parametrize("name", [one for one in choice_names("shape") if one != "trace"])
def test_shape__is_complete(name: str) -> None:
    one = load_shape(name)
    assert (one.name, "config.json" in one.source) == (name, True)
    assert 0 < one.top_k < one.num_experts
    assert min(one.num_layers, one.hidden_size, one.expert_bytes, one.layer_bytes) > 0
    assert hardware.describe_hardware(load_hardware("rtx4090-pcie4"), one).layer_seconds(1) > 0


def billions(one: ShapeConfig) -> float:
    """Weights of experts and layers, embeddings left out."""
    each = one.num_experts * one.expert_bytes + one.layer_bytes
    return one.num_layers * each / one.bytes_per_weight / 1e9


PUBLISHED = [
    # Table 1 of ProMoE and of fMoE; vocabulary x hidden size, twice where the head is untied.
    ("deepseek-moe", 16.4, 0.42), ("deepseek-v2-lite", 15.7, 0.42), ("qwen1.5-moe", 14.3, 0.62),
    ("qwen2-moe", 57.4, 1.09), ("qwen2-moe-int4", 57.4, 1.09), ("mixtral-8x7b", 46.7, 0.26),
    ("mixtral-8x7b-int4", 46.7, 0.26), ("mixtral-8x22b", 141.0, 0.39), ("phi-3.5-moe", 42.0, 0.26),
]  # fmt: skip


@pytest.mark.parametrize(("name", "published", "embeddings"), PUBLISHED)
def test_shape__adds_up_to_the_published_parameters(name, published, embeddings):
    assert billions(load_shape(name)) + embeddings == pytest.approx(published, rel=0.01)


def test_own_shape__is_read_from_the_checkpoint() -> None:
    one = read_model_shape(ModelConfig())
    assert (one.num_layers, one.num_experts, one.top_k, one.hidden_size) == (12, 60, 4, 256)
    # bf16: three matrices of 256 x 40.
    assert one.expert_bytes == 3 * 256 * 40 * 2
    assert one.layer_bytes > 0
    assert not one.is_own


def test_prediction_seconds__are_the_measured_ones_where_the_machine_states_none() -> None:
    shape = replace(SHAPE, hidden_size=2048, num_layers=24, num_experts=60)
    machine = hardware.describe_hardware(replace(MACHINE, predictor_us=0.0), shape)
    measured = hardware.read_latencies()["qwen1.5-moe"].kinds["skip"]
    routers = np.zeros((2, 8, 4), np.float32)
    skip = SkipPredictor(make_spec(num_layers=2, num_experts=8, hidden_size=4), routers)
    for number in (1, 64):
        seconds = hardware.prediction_seconds(machine, skip, np.zeros(number, np.int64))
        assert seconds == pytest.approx(1e-6 * measured.microseconds(number))


def test_predictor_latencies__unknown_kinds_take_as_long_as_the_machines() -> None:
    measured = {"mlp": hardware.TokenLatency(one_us=10.0, more_us=1.0)}
    measured["skip"] = hardware.TokenLatency(one_us=5.0, more_us=0.5)
    latencies = hardware.PredictorLatencies(kind="mlp", measured=measured)
    assert (latencies.ratio("mlp", 1), latencies.ratio("skip", 1)) == (1.0, 0.5)
    assert (latencies.ratio("skip", 11), latencies.ratio("truth", 11)) == (1.0, 1.0)
    assert hardware.PredictorLatencies(kind="skip", measured=measured).ratio("mlp", 1) == 2.0


def test_read_latencies__every_kind_is_measured_for_every_shape() -> None:
    for shape in hardware.read_latencies().values():
        assert set(shape.kinds) == {*KINDS, *REUSE_PREDICTORS}
        assert all(latency.one_us > 0 <= latency.more_us for latency in shape.kinds.values())


@pytest.mark.parametrize("name", ["reference", "qwen1.5-moe", "mixtral-8x22b"])
def test_nearest_latencies__a_measured_shape_gets_its_own(name: str) -> None:
    shape = hardware.read_latencies()[name]
    sizes = {"hidden_size": shape.hidden_size, "num_experts": shape.num_experts + 1}
    own = hardware.PredictorLatencies(kind="mlp", measured=dict(shape.kinds))
    assert hardware.nearest_latencies("mlp", **sizes) == own
