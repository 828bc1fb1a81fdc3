"""The simulator's clock against timelines worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictors.base import Forecast
from runtime.config import SystemConfig
from runtime.policy.forecast_payoff import ForecastPayoff
from runtime.sim.hardware import Overheads, PredictorLatencies, TokenLatency
from runtime.sim.replay import replay
from runtime.sim.step import batch_steps
from tests.builders.core_runs import RandomPredictor
from tests.builders.entries import tiny_spec
from tests.builders.simulated import Knows, one_token, routed_step, toy_accelerator, toy_machine

SPEC = tiny_spec(num_experts=4, top_k=1, hidden_size=1)
STEP = one_token(0, 1)
PROMPT = routed_step([range(4), range(4)])
"""A prefill of four tokens: one for each expert, on both layers."""


def run(predictor, steps=(STEP,), slots=8, *, spec=SPEC, machine=None, reuse=None, **switches):
    known: dict[str, Any] = {"spec": spec, "budget_slots": slots, "reuse_predictor": reuse}
    system, hardware = SystemConfig(**switches), machine or toy_machine()
    return replay(steps, predictor, system=system, hardware=hardware, **known)


def test_replay__without_prefetch_waits_for_every_miss():
    # Twice: a layer (10), the whole transfer (6), the expert (1).
    for stats in (run(None), run(Knows(SPEC, 1), prefetch=False)):
        assert (stats.tpot_seconds, stats.stall_seconds, stats.total.misses) == ([34.0], 12.0, 2)


def test_replay__a_right_forecast_hides_its_transfer():
    stats = run(Knows(SPEC, 1))
    # Known at 13, while layer 0's miss holds the link until 16; fetched 16-22; routed at 27.
    assert stats.tpot_seconds == [28.0]
    assert (stats.stall_seconds, stats.total.predicted, stats.total.fetch_rate) == (6.0, 1, 1)
    assert stats.total.promoe_good_pred == 0.5
    # A router's input is forecast from when the router has run: the next layer is one ahead.
    assert run(Knows(SPEC, 1), lookahead_layers=1).tpot_seconds == [28.0]


def test_replay__a_wrong_forecast_on_an_idle_link_is_free():
    stats = run(Knows(SPEC, 2))
    assert (stats.tpot_seconds, stats.total.fetch_rate) == ([34.0], None)
    assert stats.total.promoe_good_pred == 0.0


def test_replay__a_step_waits_for_reuse_scores_where_it_must_evict():
    reuse = RandomPredictor(0, spec=SPEC, num_rows=1)
    stats = run(None, [STEP] * 2, eviction="reuse", reuse=reuse)
    # The first step misses in two layers, and waits 3 s for the scores before each request.
    assert (stats.tpot_seconds, stats.predictor_seconds) == ([40.0, 22.0], 12.0)


def test_replay__phases_are_counted_apart():
    stats = run(None, steps=[PROMPT, STEP])
    assert [counters.misses for counters in stats.prefill] == [4, 4]
    assert [counters.hits for counters in stats.decode] == [1, 1]
    assert len(stats.ttft_seconds) == len(stats.tpot_seconds) == 1
    assert [stats.as_dict()[phase]["hit_rate"] for phase in ("prefill", "decode")] == [0.0, 1.0]


def test_replay__decode_steps_between_two_prefills_are_a_run():
    stats = run(None, steps=[STEP, PROMPT, PROMPT, STEP, STEP, PROMPT, STEP])
    assert [len(run) for run in stats.decode_runs] == [1, 2, 1]
    assert sum(stats.decode_runs, []) == stats.tpot_seconds


TWO_LINKS = toy_accelerator(
    link_bytes_per_second=0.5, store_bytes_per_second=0.25, memory_bytes_per_second=3.0,
    chunk_bytes=(1, 1, 1), layer_bytes=30,
)  # fmt: skip
"""The same times; into a second tier, a chunk takes 4 s."""


def test_replay__a_chunk_moves_up_while_the_next_is_read():
    stats = run(None, [one_token(1, 2)] * 2, (1, 8), machine=TWO_LINKS, prefetch=False)
    # Cold: router at 10, chunks read by 14, 18, 22 and copied by 16, 20, 24, computed at 25; the
    # second layer the same. Then both experts are in the lower tier: three copies each.
    assert stats.tpot_seconds == [50.0, 34.0]


def test_replay__a_token_of_each_request_is_one_decode_step():
    rows = [STEP] * 2 + [one_token(0, 2, request=1)] * 2
    stats = run(None, steps=batch_steps(rows, 2), prefetch=False)
    assert stats.ttft_seconds == []
    # Layer 0: a layer, one transfer, two tokens on the expert. Layer 1: two transfers (12), of
    # which the second hides the first one's token. Then all is there: 10 + 2 + 10 + 1 + 1.
    assert (stats.tpot_seconds, stats.total.requests) == ([10.0 + 6 + 2 + 10 + 12 + 1, 24.0], 6)
    assert stats.stall_share == pytest.approx((6 + 6 + 5) / 65.0)


def test_replay__percentiles_are_those_of_the_steps():
    figures = run(None, steps=[STEP] * 3).as_dict()
    assert figures["tpot_seconds"] == 22.0
    percentiles = figures["tpot_seconds_p95"], figures["tpot_seconds_p99"]
    assert percentiles == pytest.approx((22.0 + 12 * 0.9, 22.0 + 12 * 0.98))
    assert figures["ttft_seconds_p99"] is None


def test_replay__in_id_order_later_experts_hold_no_slot():
    # All four experts of layer 0, then one of layer 1; three slots in all.
    prompt = routed_step([range(4), [0] * 4])
    # The first prompt leaves experts 2 and 3 of layer 0, which the second asks for again: with both
    # pinned and the third slot for expert 1, its expert 0 would wait for ever.
    switches = {"prefetch": False, "reordered": False, "per_layer": False}
    stats = run(None, [prompt, prompt], 3, **switches)
    # A layer takes 10 s, then the link fetches its experts without a pause (6 s each) and the last
    # one is computed (1 s). Layer 1: 10 s, 6 s, and 4 tokens on one expert. The second prompt finds
    # expert 2, keeps it for its turn, and drops expert 3 for one that comes before it.
    assert stats.ttft_seconds == [10 + 4 * 6 + 1 + 10 + 6 + 4, 10 + 3 * 6 + 1 + 10 + 6 + 4]


def timed(predictor, steps, **overheads):
    return run(predictor, steps, machine=toy_machine(overheads=Overheads(**overheads)))


def test_overheads__each_step_pays_for_its_parts_outside_layers():
    assert timed(None, [STEP], step_seconds=5.0).tpot_seconds == [39.0]


def test_overheads__inline_predictors_and_synchronous_systems_delay_computing():
    # Routed at 10 and forecast until 13, while the layer's own miss is read: computed at 17. The
    # forecast expert arrives at 22, before its layer's router.
    inline = timed(Knows(SPEC, 1), [STEP], predictor_inline=True)
    for stats in (inline, run(Knows(SPEC, 1), synchronous=True)):
        assert stats.tpot_seconds == [10.0 + 6 + 1 + 10 + 1]
        assert stats.total.needed_predicted_in_time == 1


PAYING = [(1.0, 1, True), (100.0, 1, False), (0.0, 1, True), (0.0, 2, False)]


@pytest.mark.parametrize(("seconds", "expert", "pays"), PAYING)
def test_replay__adaptive_forecasts_end_where_they_save_less(seconds, expert, pays):
    """Also where only the link gives time to them, and they are always wrong."""
    overheads = Overheads(predictor_inline=seconds > 0, compute_speed_transferring=0.5)
    machine = toy_machine(predictor_seconds=seconds, overheads=overheads)
    steps = [PROMPT, *[one_token(0, 1)] * 40]
    system = {"machine": machine, "drop_used": True}
    fixed = run(Knows(SPEC, expert), steps, adaptive=False, **system).tpot_seconds
    adaptive = run(Knows(SPEC, expert), steps, adaptive=True, **system).tpot_seconds
    on_demand = run(None, steps, prefetch=False, **system).tpot_seconds
    assert (fixed[-1] < on_demand[-1]) == pays
    assert (adaptive[:6], adaptive[-20:]) == (fixed[:6], (fixed if pays else on_demand)[-20:])


def test_replay__a_predictor_is_charged_its_own_latency():
    measured = {"mlp": TokenLatency(one_us=2.0, more_us=1.0)}
    measured["knows"] = TokenLatency(one_us=4.0, more_us=2.0)
    machine = toy_machine(predictor_latencies=PredictorLatencies(kind="mlp", measured=measured))
    for step, num_us in ((STEP, 4), (PROMPT, 4 + 3 * 2)):
        assert run(Knows(SPEC, 1), [step], machine=machine).predictor_seconds == 3.0 * num_us / 2


class Slow(Knows):
    """Forecasts the next layer at both gates of a model of three layers."""

    def gate_input(self, layer, hidden_TD):
        return (Forecast(layer + 1, np.full((1, 4), 0.1, dtype=np.float32)),) if layer < 2 else ()


@pytest.mark.parametrize(("is_stateless", "predictions"), [(True, 1), (False, 3)])
def test_replay__late_events_are_skipped_without_a_state(is_stateless, predictions):
    # A prediction takes 100 s, a step 51: later events wait until their forecasts are late.
    predictor = Slow(SPEC, 1)
    predictor.stateless = is_stateless
    machine, spec = toy_machine(predictor_seconds=100.0), replace(SPEC, num_layers=3)
    stats = run(predictor, [one_token(0, 1, 2)] * 2, 12, spec=spec, machine=machine)
    first = 3 * (10 + 6 + 1)
    assert stats.tpot_seconds[0] == first
    # With a state, the second step begins when the first one's two events are complete.
    assert stats.tpot_seconds[1] == (0 if is_stateless else 10 + 2 * 100 - first) + 3 * (10 + 1)
    assert stats.predictor_seconds == 100.0 * predictions


def test_overheads__two_readers_read_concurrently():
    # Layer 0: router at 10. Chunks of expert 0: one at a time, on either reader: 16, computed
    # at 17. A prompt's four experts on two readers: two at a time.
    assert timed(None, [STEP], num_readers=2).tpot_seconds == [34.0]
    (alone,) = timed(None, [PROMPT]).ttft_seconds
    (both,) = timed(None, [PROMPT], num_readers=2).ttft_seconds
    # 12 chunks one after another take 24 s; two at a time 12, and what is computed between.
    assert alone == 2 * (10 + 24 + 1)
    assert both < alone - 10
    halved = timed(None, [PROMPT], num_readers=2, transfer_speed_together=0.5)
    # Two at half the speed are no faster than one after another.
    assert halved.ttft_seconds[0] >= alone - 2


def test_overheads__reads_and_computing_slow_each_other():
    # Fetched on the forecast: 16-22, while layer 1 computes 17-27; 5 s of it at half speed.
    stats = timed(Knows(SPEC, 1), [STEP], compute_speed_transferring=0.5)
    # Expert 0 computes 16-18 (1 s at half speed), layer 1 from 18: 4 s at half speed until 22.
    assert stats.tpot_seconds == [18.0 + 4 + 8 + 1]
    stats = timed(Knows(SPEC, 1), [STEP], transfer_speed_computing=0.5)
    # The chunks take 4 s each while computing: 16-28, a second after layer 1's router at 27: its
    # rest comes at full speed.
    assert stats.tpot_seconds == [27.0 + 0.5 + 1]


def test_replay__prompts_do_not_count_for_what_pays(monkeypatch):
    recorded = []
    monkeypatch.setattr(ForecastPayoff, "record_step", lambda _, seconds: recorded.append(seconds))
    stats = run(Knows(SPEC, 1), [PROMPT, STEP, PROMPT, STEP, STEP], adaptive=True)
    assert recorded == stats.tpot_seconds
