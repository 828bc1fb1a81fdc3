"""Replays under eviction policies: the recorded stream gives what the predictor itself gives."""

from dataclasses import replace

import pytest
import torch

from runtime.presets import load_system
from runtime.sim.replay import replay
from tests.builders.traces import make_spec, make_trace
from train import eviction_eval
from train.reuse import ReuseStack


def test_replay_policy__recorded_reuse_evicts_as_the_predictor(trace) -> None:
    spec = trace.spec
    torch.manual_seed(0)
    reuse_predictor = ReuseStack(spec, width=8).export(spec)["reuse"]
    steps = list(trace.steps("held_out"))
    slots = spec.num_layers * max(spec.top_k, spec.num_experts // 2)
    system = load_system(eviction_eval.SYSTEM)
    stream = eviction_eval.record_stream(steps, [reuse_predictor], spec)
    # Twice: the stream keeps no state of a replay.
    recorded, again, other = (
        stream.replay(replace(system, eviction=policy), "50%")
        for policy in ("reuse", "reuse", "lru")
    )
    expected = replay(
        steps, None, spec=spec, system=replace(system, eviction="reuse"),
        hardware=eviction_eval.ANY, budget_slots=slots, reuse_predictor=reuse_predictor,
    )  # fmt: skip
    assert recorded == again == expected
    assert sum(counters.evictions for counters in expected.decode) > 0
    assert other.decode != expected.decode


def test_hit_rates__lru_is_a_plain_lru_and_belady_bounds_all(tmp_path) -> None:
    # One expert a token and no prompts: nothing depends on the order within a step.
    spec = make_spec(top_k=1)
    trace = make_trace(tmp_path / "t", spec=spec, prompt_tokens=1, new_tokens=20)
    steps = list(trace.steps("held_out"))
    tables = eviction_eval.compare_policies(trace, [], num_tokens=len(steps))
    for budget, rates in tables[eviction_eval.PER_LAYER].items():
        slots = spec.num_experts * int(budget.rstrip("%")) // 100
        if not slots:
            continue
        hits = 0
        for layer in range(spec.num_layers):
            recent: list[int] = []
            for step in steps:
                expert = int(step.experts(layer)[0, 0])
                hits += expert in recent[-slots:]
                recent = [*(one for one in recent if one != expert), expert]
        assert rates["lru"]["decode"] == pytest.approx(hits / (len(steps) * spec.num_layers))
        assert max(rate["decode"] for rate in rates.values()) == rates["belady"]["decode"]
        assert "reuse" not in rates


def test_hit_rates__of_a_budget_below_one_token_are_those_of_the_least(tmp_path) -> None:
    # 10 % of eight experts are none, 25 % are the two of a token.
    trace = make_trace(tmp_path / "t", spec=make_spec(num_layers=1), num_units=1)
    for rates in eviction_eval.compare_policies(trace, [], num_tokens=20).values():
        assert rates["10%"] == rates["25%"] != rates["50%"]
