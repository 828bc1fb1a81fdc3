"""Comparison of the papers' figures with replays: transcription, folding, sums and intervals."""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.papers import cells, scaling
from benchmarks.papers.claims import Comparison, make_claims
from benchmarks.papers.paper_context import ExpertFold, load_hardware, load_shape
from benchmarks.papers.published import find_published, read_published
from benchmarks.papers.run import PAPERS
from runtime.config import SystemConfig
from runtime.sim.replay import replay
from runtime.sim.step import ArrayStep
from tests.builders.entries import tiny_spec
from tests.builders.simulated import one_token, toy_machine
from train.evaluate.forecasts import RecordedForecast

FOLD = ExpertFold(6, 3, 2)
"""Experts 0 and 1 become 0, 2 and 3 become 1, 4 and 5 become 2."""

SPEC = tiny_spec(num_layers=12, num_experts=60, top_k=4)


def test_published__every_number_stands_in_its_quote() -> None:
    for figure in read_published().values():
        assert re.search(r"(figure|table|section|abstract)", figure.where), figure
        if not figure.where.startswith("table"):
            # Not inside of another number, such as 6 % in 36 %.
            assert re.search(rf"(?<![\d.]){re.escape(figure.printed)}", figure.source), figure


def test_published__units_become_numbers() -> None:
    values = {name: find_published(*name).value for name in read_published()}
    assert values["promoe", "figure-10/prefill/static/mean"] == 1.42
    assert values["fmoe", "figure-9/tpot/on-demand"] == pytest.approx(0.70)
    assert values["moe-infinity-request", "fetch/NLLB"] == pytest.approx(2.5e-3)
    assert values["moe-infinity-sequence", "figure-13/throughput/6"] == pytest.approx(2400)
    assert values["fmoe", "figure-10/first"] == "fMoE"


def test_claims__cover_every_published_figure_or_name_why_not() -> None:
    table = cells.ReplayTable(SPEC)
    found = [(paper, compare(table)) for paper, figures in PAPERS.items() for compare in figures]
    claimed = {(paper, row.name) for paper, compared in found for row in compared}
    # Figure 13 is replayed on several machines.
    figure_13 = scaling.figure_13(defaultdict(lambda: (1.0, 1.0)))
    claimed |= {(scaling.PAPER, row.name) for row in figure_13}
    published = read_published()
    assert {name for name in published if published[name].not_replayed is None} == claimed
    assert len(table.asked) > 300


def test_totals__after_each_step_add_up() -> None:
    totals: list[cells.StepTotals] = []
    options = {"system": SystemConfig(), "hardware": toy_machine()}
    options["on_step"] = lambda *step: totals.append(cells.total_step(*step))
    spec, steps = tiny_spec(num_experts=4, top_k=1), [one_token(0, 1), one_token(0, 2)]
    stats = replay(steps, None, spec=spec, budget_slots=8, **options)
    first, last = totals
    assert (first.requests, first.hits, first.decode_stall_seconds) == (2, 0, 12.0)
    assert (last.requests, last.hits, last.decode_stall_seconds) == (4, 1, 18.0)
    assert [first.seconds, last.seconds] == stats.tpot_seconds
    assert last.decode_bytes == stats.total.bytes_moved == 9
    assert not last.is_prefill


def make_totals(**changes: float) -> cells.StepTotals:
    zeros = dict.fromkeys(cells.StepTotals._fields, 0)
    return cells.StepTotals(**{**zeros, "num_tokens": 1, **changes})  # type: ignore[arg-type]


def test_units__divide_a_replay_at_its_prefills() -> None:
    totals = [
        make_totals(is_prefill=True, num_tokens=5, seconds=9.0),
        make_totals(seconds=8.0, hits=1, requests=4),
        make_totals(is_prefill=True, num_tokens=7, seconds=3.0, hits=1, requests=4),
        make_totals(seconds=1.0, hits=2, requests=8, decode_stall_seconds=0.5),
        make_totals(seconds=2.0, hits=5, requests=12, decode_stall_seconds=0.75),
        make_totals(is_prefill=True, seconds=5.0, hits=5, requests=12, decode_stall_seconds=0.75),
    ]
    units = cells.UnitSums.of_replay(totals, warm_units=1)
    # The first unit, which found an empty cache, is in no figure.
    assert (units.prefill_seconds, units.decode_seconds) == ([3.0, 5.0], [3.0, 0.0])
    assert units.hits == [4, 0]
    sums = units.sum()
    assert (sums.ttft_seconds, sums.tpot_seconds, sums.hit_rate) == (4.0, 1.5, 0.5)
    assert sums.decode_stall_share == 0.25


def test_intervals__pair_the_requests_of_two_replays() -> None:
    """A ratio that is the same for every request has no spread, however they differ."""
    seconds = np.random.default_rng(0).uniform(1, 9, 50)
    fast, slow = SystemConfig(name="fast"), SystemConfig(name="slow", per_layer=False)
    shape, hardware = load_shape("mixtral-8x7b"), load_hardware("rtx4090-pcie4")
    units = {}
    for system, factor in ((fast, 1.0), (slow, 3.0)):
        cell = cells.PaperCell(system=system, shape=shape, hardware=hardware, share=0.5)
        ones = dict.fromkeys(cells.UnitSums.__dataclass_fields__, [1.0] * 50)
        ones["decode_seconds"] = (factor * seconds).tolist()
        units[cell.digest()] = cells.UnitSums(**ones)

    def compare(table: cells.ReplayTable) -> Iterator[Comparison]:
        found = [table.replay(each, shape, hardware, share=0.5) for each in (fast, slow)]
        times = [cell.tpot_seconds for cell in found]
        yield Comparison("figure-10/decode/static/mean", times[1] / times[0])
        yield Comparison("figure-10/decode/static/most", times[0])

    sums = cells.ReplayTable(SPEC, {key: each.sum() for key, each in units.items()})
    samples = cells.ReplayTable(SPEC, {key: each.resample() for key, each in units.items()})
    ratio, time = make_claims("promoe", compare(sums), compare(samples))
    assert (ratio.ours, ratio.low, ratio.high) == pytest.approx((3.0, 3.0, 3.0))
    assert time.ours == pytest.approx(seconds.mean())
    assert None not in (time.low, time.high)
    # 1.96 standard errors to either side.
    assert time.high - time.low == pytest.approx(2 * 1.96 * (seconds.std() / np.sqrt(50)), rel=0.15)
    assert np.shape(samples.find(samples.asked[0]).tpot_seconds) == (cells.NUM_SAMPLES,)


def test_digest__ignores_names_and_nothing_else() -> None:
    shape, hardware = load_shape("mixtral-8x7b"), load_hardware("rtx4090-pcie4")

    def digest(system: SystemConfig, share: float = 0.5) -> str:
        return cells.PaperCell(system=system, shape=shape, hardware=hardware, share=share).digest()

    assert digest(SystemConfig(name="a")) == digest(SystemConfig(name="b"))
    assert digest(SystemConfig(chunked=False)) != digest(SystemConfig())
    assert digest(SystemConfig(), 0.25) != digest(SystemConfig())


def test_fold__keeps_a_tokens_first_distinct_groups() -> None:
    chosen = np.array([[0, 1, 5], [4, 2, 0], [3, 2, 3]])
    # The last token's choices are all of one group, which then stands twice.
    assert FOLD.fold_experts(chosen).tolist() == [[0, 2], [2, 1], [1, 1]]
    step = ArrayStep(np.zeros(3, np.int64), np.zeros(3, np.int64), chosen[None])
    assert FOLD.fold_step(step).experts(0).tolist() == [[0, 2], [2, 1], [1, 1]]


def test_fold__a_group_is_as_likely_as_any_of_its_experts() -> None:
    scores = np.array([[0.5, 0.5, 0.0, 0.25, 0.0, 0.0]], np.float32)
    order = np.array([1, 5, 2, 3, 0, 9], np.float32)
    forecast = FOLD.fold_forecast(RecordedForecast(1, scores, [5, 4, 0], order), most=None)
    assert (forecast.layer, forecast.scores_TE.tolist()) == (1, [[0.75, 0.25, 0.0]])
    assert forecast.wanted == [2, 0]
    assert forecast.priority_E is not None
    assert forecast.priority_E.tolist() == [5, 3, 9]
    assert FOLD.fold_forecast(RecordedForecast(1, scores, [5, 4, 0]), most=1).wanted == [2]
