"""`doctor users=N tps=T`: the smallest budget that serves a load, found by replays."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from predictors.errors import MoecastError
from runtime.commands.capacity import REQUESTS, sample_texts
from runtime.commands.doctor import run
from runtime.config import DoctorConfig, HardwareConfig, ModelConfig, ShapeConfig
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.presets import ON_DEMAND, load_system
from runtime.sim.hardware import describe_hardware
from runtime.sim.replay import replay
from runtime.sim.step import batch_steps
from runtime.tools.doctor import capacity
from runtime.tools.doctor.capacity import (
    CapacityContext,
    UserLoad,
    candidate_batches,
    choose_system,
    plan_machine,
)
from tests.builders.models import tiny_qwen2_moe
from tests.builders.traces import make_spec

SPEC = make_spec(num_layers=2, num_experts=8, top_k=2)
SHAPE = ShapeConfig(
    name="big", source="here", num_layers=4, num_experts=16, top_k=2, hidden_size=8,
    expert_bytes=3_000_000, layer_bytes=1_000_000,
)  # fmt: skip
MACHINE = HardwareConfig(
    name="machine", source="made up", measured=False, link_bytes_per_second=1e9,
    memory_bytes_per_second=1e11, flops=1e13,
)  # fmt: skip


class Step:
    def __init__(self, request, tokens, rng):
        self.tokens_T = np.zeros(tokens, dtype=np.int64)
        self.requests_T = np.full(tokens, request)
        self._chosen = [
            np.array([rng.choice(8, 2, replace=False) for _ in range(tokens)]) for _ in range(2)
        ]

    def experts(self, layer):
        return self._chosen[layer]


def ground(num_requests=4):
    rng = np.random.default_rng(0)
    steps = [
        Step(request, tokens, rng) for request in range(num_requests) for tokens in (5, *[1] * 12)
    ]
    return CapacityContext(
        steps=steps, spec=SPEC, shape=SHAPE, system=load_system(ON_DEMAND), predictor=None
    )


def mean_tpot(base, slots, batch):
    """Written here: the second pass's mean decode step, of twice the layers."""
    steps = list(batch_steps(base.steps, batch)) * 2
    stats = replay(
        steps, None, spec=SPEC, system=load_system(ON_DEMAND),
        hardware=describe_hardware(MACHINE, SHAPE), budget_slots=slots,
    )  # fmt: skip
    half = len(stats.tpot_seconds) // 2
    return 2 * float(np.mean(stats.tpot_seconds[half:]))


@pytest.mark.parametrize("slots", [5, 9, 14])
def test_needed__is_the_smallest_budget_that_serves(slots):
    """Finds the budget whose throughput is requested, or a smaller one with the same throughput."""
    base, hardware = ground(), describe_hardware(MACHINE, SHAPE)
    target = mean_tpot(base, slots, 2) * 1.0001
    row = plan_machine(base, hardware, UserLoad(users=2, tokens_per_second=1 / target))
    found = round(row.budget_share * 16)
    enough = [n for n in range(2, 17) if mean_tpot(base, n, 2) <= target]
    assert row.users_of_a_machine == 2
    assert found in enough
    assert found <= slots
    assert row.tpot_seconds == pytest.approx(mean_tpot(base, found, 2))
    assert row.budget_bytes == math.ceil(found / 16 * 4 * 16 * 3_000_000)
    assert row.memory_bytes == row.budget_bytes + 4_000_000 + PROCESS_BYTES
    assert 0 < row.hit_rate < 1
    assert 0 < row.link_share <= 1
    assert 0 < row.stall_share < 1


def test_needed__divides_many_users_evenly_among_machines():
    base, hardware = ground(), describe_hardware(MACHINE, SHAPE)
    alone = plan_machine(base, hardware, UserLoad(users=1, tokens_per_second=1.0))
    several = plan_machine(base, hardware, UserLoad(users=6, tokens_per_second=1.0))
    assert (alone.machines, alone.users_of_a_machine) == (1, 1)
    # Four requests were recorded, so four users a machine at most: two machines with three each.
    assert (several.machines, several.users_of_a_machine) == (2, 3)
    assert several.tokens_per_second == pytest.approx(6 / several.tpot_seconds)


def test_needed__a_rate_that_computing_does_not_reach_says_so():
    base, hardware = ground(), describe_hardware(MACHINE, SHAPE)
    row = plan_machine(base, hardware, UserLoad(users=1, tokens_per_second=1e9))
    assert row.error is not None
    assert "computing takes longer" in row.error
    assert choose_system(
        base, hardware, UserLoad(users=1, tokens_per_second=1e9), load_system(ON_DEMAND)
    ).error


def test_needed__asks_for_less_where_the_rate_is_lower(monkeypatch):
    monkeypatch.setattr(capacity, "PRECISION", 0.0)
    base, hardware = ground(), describe_hardware(MACHINE, SHAPE)
    rates = [0.999 / mean_tpot(base, slots, 1) for slots in (4, 13)]
    slow, fast = (
        plan_machine(base, hardware, UserLoad(users=1, tokens_per_second=rate)).budget_bytes
        for rate in rates
    )
    assert slow < fast


def test_batches__all_users_or_powers_of_two_the_most_first():
    load = UserLoad(users=12, tokens_per_second=1)
    assert candidate_batches(load, 32) == [12, 8, 4, 2, 1]
    assert candidate_batches(load, 5) == [5, 4, 2, 1]
    assert candidate_batches(replace(load, users=1), 32) == [1]


def test_texts__are_of_the_requested_number_and_differ():
    made = sample_texts(REQUESTS)
    assert len(set(made)) == REQUESTS
    assert all(made)


def test_doctor__of_a_load_writes_rows_and_a_page(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    config = DoctorConfig(
        model=ModelConfig(name="tiny", id=str(folder)),
        users=2,
        tps=0.5,
        hardware=[MACHINE, HardwareConfig()],
        seconds=2,
        run_dir=tmp_path / "run",
    )
    report = json.loads(json.dumps(run(config), allow_nan=False))
    assert [row["hardware"] for row in report["capacity"]] == ["machine", "local"]
    for row in report["capacity"]:
        assert row["users_of_a_machine"] * row["machines"] >= 2
        assert row["tokens_per_second_of_a_user"] >= 0.5
    page = (tmp_path / "run/report.html").read_text()
    assert "2 users, 0.5 tokens/s each" in page
    assert "made up" in page
    assert (tmp_path / "run/capacity.csv").is_file()


def test_doctor__half_a_load_is_refused():
    for given in ({"users": 2}, {"tps": 1.0}, {"users": 0, "tps": 1.0}, {"users": 1, "tps": 0.0}):
        with pytest.raises(MoecastError, match=r"users=|tps="):
            DoctorConfig(**given)
