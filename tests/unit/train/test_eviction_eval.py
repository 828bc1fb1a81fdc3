"""Replays under eviction policies: the recorded stream gives what the predictor itself gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runtime.sim.replay import replay
from tests.builders.traces import make_spec, make_trace
from train.eviction_eval import eviction_system, record_stream, replay_policy
from train.report.measured import ANY
from train.reuse import ReuseStack


def test_replay_policy__recorded_reuse_evicts_as_the_predictor(tmp_path: Path) -> None:
    spec = make_spec()
    random = np.random.default_rng(0)
    routers = random.standard_normal(
        (spec.num_layers, spec.num_experts, spec.hidden_size), dtype=np.float32
    )
    biases = np.zeros((spec.num_layers, spec.num_experts), np.float32)
    torch.manual_seed(0)
    reuse_predictor = ReuseStack(spec, routers, biases, width=8).export(spec)["reuse"]
    steps = list(make_trace(tmp_path / "t", spec=spec).steps("held_out"))
    slots = spec.num_layers * max(spec.top_k, spec.num_experts // 2)
    system = eviction_system()
    stream = record_stream(steps, [reuse_predictor], spec)
    setting = {"spec": spec, "hardware": ANY}
    # Twice: the stream keeps no state of a replay.
    recorded = [
        replay_policy("reuse", stream, system=system, slots=slots, **setting) for _ in range(2)
    ]
    expected = replay(
        steps,
        None,
        system=replace(system, eviction="reuse"),
        budget_slots=slots,
        reuse_predictor=reuse_predictor,
        **setting,
    )
    assert recorded == [expected, expected]
    assert sum(counters.evictions for counters in expected.decode) > 0
    other = replay_policy("lru", stream, system=system, slots=slots, **setting)
    assert other.decode != expected.decode
