"""The batch benchmark: its measures and requests; groups of the paper's lengths: what is drawn,
where it fits, and the accuracy of forecasts."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.klotski import workload as work
from benchmarks.klotski.config import KlotskiConfig
from benchmarks.klotski.environments import ENVIRONMENTS, GroupMachine, describe_machine
from benchmarks.klotski.group_replays import GroupReplays
from benchmarks.klotski.live import AnswersDiffer, check_answers, list_requests
from benchmarks.klotski.measures import ExpertSpans, covered_seconds, measure_reads, measure_shares
from benchmarks.klotski.prefetch_accuracy import count_hot
from benchmarks.klotski.rows import ReadsPerStep
from benchmarks.klotski.simulated import replay_group
from benchmarks.klotski.workload import KV_BYTES, NEW_TOKENS, PROMPT_TOKENS, GroupWorkload
from benchmarks.papers.cells import DrawnGroups, PaperCell
from benchmarks.papers.paper_context import load_hardware
from predictors.base import Forecast, Predictor, Signal
from runtime.policy.tier import TransferTask
from runtime.presets import load_system
from tests.builders.entries import tiny_spec
from tests.builders.traces import make_trace

ENVIRONMENT = ENVIRONMENTS["environment 1, Mixtral-8x22B"]
MACHINE = GroupMachine(
    name="x", link_bytes_per_second=1e6, link_latency_seconds=0.0, memory_bytes_per_second=10.0,
    flops=4.0, kernel_seconds=0.0, predictor_seconds=0.0, chunk_bytes=(5, 5, 5), layer_bytes=20,
    plain_bytes=60,
)  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return make_trace(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def pool(trace):
    return work.TokenPool(trace)


def test_pool__draws_consecutive_tokens(trace, pool):
    rows = trace.rows("held_out")
    recorded = trace.column("experts", 1)[rows[trace.phases[rows] == 0]]
    drawn = pool.draw_prompts(np.array([7, 8]), np.random.default_rng(1))
    assert drawn.requests_T.tolist() == [7] * PROMPT_TOKENS + [8] * PROMPT_TOKENS
    endless = np.tile(recorded, (2 + PROMPT_TOKENS // len(recorded), 1))
    for part in np.split(drawn.experts(1), 2):
        assert any((endless[i : i + len(part)] == part).all() for i in range(len(recorded)))


def test_workload__has_prompts_then_a_token_of_each_request(pool):
    workload = GroupWorkload(batch=2, n=3, merges_experts=False, moves_caches=True, weight_bytes=5)
    prompts, first, *_ = workload.draw(pool, np.random.default_rng(0))
    assert len(prompts.tokens_T) == 6 * PROMPT_TOKENS
    assert prompts.load_bytes == (5, 0, 0)  # a prompt has no cache yet
    assert first.requests_T.tolist() == list(range(6))
    cache_bytes = 2 * (PROMPT_TOKENS + NEW_TOKENS // 2) * KV_BYTES
    assert first.load_bytes == (cache_bytes + 5, cache_bytes, cache_bytes)
    assert not first.merges_experts


def test_tiled_step__repeats_the_recorded_layers():
    step = work.TiledStep(np.arange(2), np.array([[[0], [1]], [[2], [3]]]))
    assert [step.experts(layer).tolist() for layer in (1, 2)] == [[[2], [3]], [[0], [1]]]


def test_environment__moves_what_does_not_fit_beside_experts():
    # 4 GB are left: neither the attention's weights (9.9 GB) nor a batch's caches (8.0 GB) fit.
    workload = ENVIRONMENT.workload(batch=64, n=1, merges_experts=True)
    assert (workload.moves_caches, workload.weight_bytes) == (True, 176_160_768)
    roomy = replace(ENVIRONMENT, device_bytes=ENVIRONMENT.arena_bytes + 18.1e9)
    workload = roomy.workload(batch=64, n=1, merges_experts=True)
    assert (workload.moves_caches, workload.weight_bytes) == (False, 0)
    # In 4.3 bits a weight, the attention's fit.
    workload = ENVIRONMENT.workload(batch=64, n=1, merges_experts=True, weight_ratio=4.3 / 16)
    assert (workload.moves_caches, workload.weight_bytes) == (True, 0)


def test_machine__keeps_caches_and_experts_in_host_memory():
    experts = 56 * 8 * 603_979_776
    workload = ENVIRONMENT.workload(batch=64, n=10, merges_experts=True)
    caches = 640 * (PROMPT_TOKENS + NEW_TOKENS) * KV_BYTES * 56
    share = describe_machine(ENVIRONMENT, workload).host_share
    assert share == pytest.approx((230e9 - caches) / experts)


def test_machine__decodes_quantised_experts_before_it_computes():
    # 60 bytes are read in 6 s and computed on 12 tokens in 2 * 30 * 12 / 4 = 180 s.
    plain = replace(MACHINE, chunk_bytes=(20, 20, 20))
    assert plain.expert_seconds(1) == 15
    assert plain.expert_seconds(12) == 180
    assert MACHINE.expert_seconds(12) == 180 + (15 + 60) / 10


def test_groups__in_larger_ones_serve_more(trace, pool):
    spec = work.tile_spec(trace, replace(ENVIRONMENT.model, num_layers=6))
    system = load_system("klotski")
    speeds = []
    for n in (1, 4):
        speed, _ = replay_group(
            system,
            GroupWorkload(batch=2, n=n, merges_experts=True, moves_caches=False, weight_bytes=0),
            replace(MACHINE, link_bytes_per_second=0.01, flops=1e9, memory_bytes_per_second=1e9),
            spec=spec, arena_bytes=15 * 12, pool=pool,
            predictor=work.fill_correlation_table(spec, pool),
        )  # fmt: skip
        speeds.append(speed)
    assert speeds[1] > 1.5 * speeds[0]


class Fixed(Predictor):
    """Forecasts experts 0 and 1 of every layer when the step begins."""

    kind = "fixed"
    signals = frozenset({Signal.TOKENS})

    def begin_step(self, tokens_T, requests_T):
        scores_TE = np.zeros((len(tokens_T), self.spec.num_experts), np.float32)
        return [Forecast(layer, scores_TE, wanted=[0, 1]) for layer in range(self.spec.num_layers)]


def test_accuracy__counts_the_hottest_experts():
    spec = tiny_spec(num_layers=2, num_experts=4, top_k=2)
    # Layer 0: expert 0 has one token, 1 none, 2 and 3 more. Layer 1: 0 and 1 have all.
    experts_LTK = np.array([[[2, 3], [2, 3], [0, 3]], [[0, 1], [1, 0], [0, 1]]])
    (counts,) = count_hot(Fixed(spec), [work.TiledStep(np.arange(3), experts_LTK)])
    assert counts == (4, 0 + 2)


def test_group_replays__leave_the_first_group_out(trace):
    title = "environment 1, Mixtral-8x7B"
    environment = ENVIRONMENTS[title]
    drawn = DrawnGroups(environment=title, n=2, groups=2, merges_experts=True)
    cell = PaperCell(
        system=load_system("klotski"), shape=replace(environment.model, num_layers=3),
        hardware=load_hardware(environment.hardware), share=0.7, batch=4, drawn=drawn,
        measures_accuracy=True,
    )  # fmt: skip
    units = GroupReplays(trace).run(cell, drawn).units
    assert (units.prefills, units.decode_steps) == ([1, 1], [work.SIMULATED_STEPS] * 2)
    assert units.ranked == [work.SIMULATED_STEPS * 3 * 2] * 2  # two hot experts of each layer
    assert all(0 < correct < units.ranked[0] for correct in units.ranked_correctly)


def task(layer, expert, size=10):
    return TransferTask((layer, expert), 0, 0, 1, size, True, None)


COVERED = [
    ([], 0),
    ([(0, 1), (3, 5)], 2),  # the window begins at 0.5 and ends at 4.5
    ([(0, 4), (1, 2), (3, 9)], 4),
    ([(5, 6), (0, 0.5)], 0),
]


@pytest.mark.parametrize(("spans", "seconds"), COVERED)
def test_covered_seconds__counts_each_moment_once(spans, seconds):
    assert covered_seconds(spans, (0.5, 4.5)) == pytest.approx(seconds)


def test_spans__tell_shares_of_decode_steps_and_reads_within_them():
    """A prefill of 10 s; then two steps of 4 s, of which the second waits 1 s for nothing."""
    spans = ExpertSpans()
    for begin, end in ((0, 10), (10, 14), (14, 18)):
        spans.step(2, begin, end)
    spans.transferred("disk", task(0, 1), 1, 9, track="a")
    spans.transferred("disk", task(0, 1), 10, 12, track="a")
    spans.transferred("disk", task(1, 3), 12, 13, track="a")
    spans.transferred("disk", task(0, 1), 14, 15, track="a")
    spans.transferred("disk", task(0, 1), 14.5, 15.5, track="b")
    spans.stalled(0, 10, 11)
    spans.stalled(1, 15, 17)
    for begin in (11, 17):
        spans.computed_dense(0, begin - 0.5, begin)
        spans.computed((0, 1), begin, begin + 1)
    shares = measure_shares(spans)
    assert (shares.seconds, shares.link) == (8, pytest.approx((2 + 1 + 1.5) / 8))
    assert shares.compute == pytest.approx(1 - 3 / 8)
    assert shares.both_idle == pytest.approx(1.5 / 8)  # from 15.5, when the bytes arrived, to 17
    assert shares.bytes_per_second == pytest.approx(40 / 8)
    assert measure_reads(spans) == ReadsPerStep(most=2, mean=5 / 4)


def test_requests__have_every_point_once(tmp_path):
    points = {"batch_size": 4, "n": 2, "sizes": [2, 4], "groups": [1, 2]}
    config = KlotskiConfig(model=tmp_path, trace=tmp_path, threads=1, **points)
    points = [(r.variant, r.batch_size, r.n, r.kv_budget) for r in list_requests(config).values()]
    assert len(set(points)) == len(points)
    klotski = {(b, n) for variant, b, n, kv in points if variant == "klotski" and kv is None}
    assert klotski == {(2, 1), (2, 2), (4, 1), (4, 2)}


def test_check_answers__finds_a_token_that_differs():
    known = {}
    check_answers(known, "a", 2, [[1], [2]])
    check_answers(known, "c", 1, [[9]])
    with pytest.raises(AnswersDiffer, match="b: prompt 1"):
        check_answers(known, "b", 2, [[1], [3]])
