"""Several simulated devices against timelines worked out by hand, and against one device."""

import random

import pytest

from benchmarks.cluster import Interconnect
from predictors.errors import MoecastError
from runtime.config import HardwareConfig, ShapeConfig, SystemConfig
from runtime.sim.hardware import describe_hardware
from runtime.sim.replay import replay
from runtime.sim.simulator import make_simulator
from tests.builders.simulated import routed_step, toy_machine
from tests.builders.traces import make_spec

SPEC = make_spec(num_layers=3, num_experts=8, top_k=2)


def run(steps, *, interconnect=None, spec=SPEC, hardware=None, **switches):
    system, hardware = SystemConfig(per_layer=False, **switches), hardware or toy_machine()
    make = make_simulator if interconnect is None else interconnect.make_machine
    machine = {"hardware": hardware, "make_machine": make, "budget_slots": 8}
    return replay(steps, None, spec=spec, system=system, **machine)


def together(*, nodes=1, devices=1, **links):
    free = {"device_latency_seconds": 0.0, "device_bytes_per_second": float("inf")}
    known = {"token_bytes": 1, **free, **links}
    return Interconnect(num_nodes=nodes, devices_per_node=devices, **known)


def random_steps(seed, *, tokens=1):
    rng, requests, experts = random.Random(seed), list(range(tokens)), range(SPEC.num_experts)
    layers = range(SPEC.num_layers)
    drawn = ([[rng.sample(experts, 2) for _ in requests] for _ in layers] for _ in range(30))
    return [routed_step(chosen, requests) for chosen in drawn]


@pytest.mark.parametrize("switches", [{}, {"eviction": "belady", "idle_prefetch": True}])
def test_cluster__of_one_device_is_that_device(switches):
    steps = random_steps(1, tokens=3)
    alone = run(steps, **switches).as_dict()
    assert run(steps, interconnect=together(), **switches).as_dict() == alone


@pytest.mark.parametrize("switch", ["hybrid", "adaptive"])
def test_cluster__refuses_what_one_device_decides(switch):
    with pytest.raises(MoecastError, match=f"system.{switch}=true: .* one device only"):
        run(random_steps(1), interconnect=together(devices=2), **{switch: True})


LAYER, PAIR = make_spec(num_layers=1, num_experts=8, top_k=2), routed_step([[[0, 1]]])


def test_cluster__devices_fetch_and_compute_at_once():
    """Experts 0 and 1 of layer 0 are on two devices: 10 + 6 + 1 s, on one 10 + 12 + 1."""
    assert run([PAIR], spec=LAYER).tpot_seconds == [23.0]
    stats = run([PAIR], spec=LAYER, interconnect=together(devices=2))
    assert (stats.tpot_seconds, stats.stall_seconds, stats.total.misses) == ([17.0], 6.0, 2)


def test_cluster__a_layer_is_over_when_the_last_device_is():
    """0, 2 and 4 are the first device's: it fetches for 18 s while the other has one expert."""
    spec = make_spec(num_layers=1, num_experts=8, top_k=4)
    stats = run([routed_step([[[0, 1, 2, 4]]], [0])], spec=spec, interconnect=together(devices=2))
    assert stats.tpot_seconds == [10.0 + 18.0 + 1.0]


def test_cluster__tokens_travel_while_experts_are_fetched():
    """Fetching takes 6 s: 2 s there are hidden, 2 s back are not; resident, both are paid."""
    slow = together(devices=2, device_latency_seconds=2.0)
    assert run([PAIR, PAIR], spec=LAYER, interconnect=slow).tpot_seconds == [19.0, 15.0]


def test_cluster__machines_share_tokens_and_pay_for_what_crosses():
    """Four requests on two machines: each computes a layer for two; of an expert's four tokens two
    come over the network, 1 s a byte, and go back."""
    spec = make_spec(num_layers=1, num_experts=8, top_k=1)
    step = routed_step([[[0]] * 4], [0, 1, 2, 3])
    machine = toy_machine(layer_per_token=0.1)
    network = together(nodes=2, node_bytes_per_second=1.0, node_latency_seconds=0.5)
    stats = run([step, step], spec=spec, interconnect=network, hardware=machine)
    fetching, travel, computing = 6.0, 2.5, 4.0
    expected = [10.2 + first + computing + travel for first in (fetching, travel)]
    assert stats.tpot_seconds == pytest.approx(expected)


def test_interconnect__shares_of_tokens_that_cross():
    speeds = {"device_bytes_per_second": 1.0, "node_bytes_per_second": 2.0}
    both = together(nodes=2, devices=4, token_bytes=8, **speeds)
    assert both.num_devices == 8
    # Of 16 tokens 8 come from the other machine, 6 from this one's other devices.
    assert both.travel_seconds(16) == 8 * 8 / 2 + 6 * 8 / 1
    assert both.travel_seconds(0) == 0.0
    assert [both.tokens_at_once(n) for n in (1, 2, 5)] == [1, 1, 3]


def test_interconnect__divides_disk_and_host_memory():
    shape = ShapeConfig(num_layers=2, num_experts=4, top_k=1, expert_bytes=100, layer_bytes=1)
    config = HardwareConfig(
        name="h", measured=False, link_bytes_per_second=1.0, store_bytes_per_second=8.0,
        memory_bytes_per_second=1.0, flops=1.0, host_bytes=400.0,
    )  # fmt: skip
    hardware = describe_hardware(config, shape)
    one = Interconnect(devices_per_node=4, token_bytes=1).device_hardware(hardware)
    assert (one.store_bytes_per_second, one.host_share) == (2.0, 0.125)
    # Two machines' memories hold all experts of the two between them.
    two = Interconnect(num_nodes=2, devices_per_node=4, token_bytes=1).device_hardware(hardware)
    assert two.host_share == 1.0
