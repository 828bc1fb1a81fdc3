"""Arms, requests, rounds, children and figures of a benchmark, each by itself."""

import mmap
import sys

import numpy as np
import pytest

from predictors.errors import MoecastError
from predictors.popularity import Popularity
from runtime.config import ModelConfig, SystemConfig
from runtime.tools.bench import rounds
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.figures import bound_rows, rows_of
from runtime.tools.bench.popular import with_counts
from runtime.tools.bench.process import answer, cause
from runtime.tools.bench.requests import batched, requests_of
from runtime.tools.bench.residue import remembered_bytes
from runtime.tools.bench.rounds import run_rounds
from runtime.tools.bench.tasks import Failure, Plain
from runtime.tools.bench.variants import find_bounds, live_cases
from tests.builders.entries import tiny_entry, tiny_spec
from tests.builders.models import tiny_qwen2_moe
from tests.builders.outcomes import ZERO, made_run, outcome

LFU = SystemConfig(name="lfu", prefetch=False, eviction="lfu")
BOUND = SystemConfig(name="belady", prefetch=False, eviction="belady")


def test_live_cases__include_on_demand_and_no_bounds():
    config = BenchConfig(system=[LFU, BOUND], budget=["10%", "20%"], batch=[1, 4])
    found = [(a.condition.batch, a.condition.budget, a.variant.label) for a in live_cases(config)]
    assert found == [
        (batch, budget, name)
        for batch in (1, 4)
        for budget in ("10%", "20%")
        for name in ("on-demand", "lfu")
    ]
    assert find_bounds(config.system) == [BOUND]
    on_demand = live_cases(config)[0].variant.system
    assert (on_demand.prefetch, on_demand.eviction) == (False, "lru")


def test_ablation__is_promoe_without_each_technique():
    promoe = SystemConfig(name="promoe", predictor="mlp")
    config = BenchConfig(system=[promoe], budget=["10%"], ablation=True)
    live = [case.variant.system for case in live_cases(config)]
    off = [
        [name for name in ("chunked", "early_preemption", "reordered") if not getattr(one, name)]
        for one in live[1:]
    ]
    assert off == [[], ["chunked"], ["early_preemption"], ["reordered"]]
    assert {one.predictor for one in live[1:]} == {"mlp"}


def test_static__holds_what_the_zoo_s_popularity_names(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    model = ModelConfig(name="tiny", id=str(folder))
    static = SystemConfig(name="static", prefetch=False, eviction="static")
    assert with_counts(static, model, None) == static
    shares_LE = np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8)
    popularity = Popularity(tiny_spec(), shares_LE, ahead=1)
    tiny_entry(
        tmp_path / "entries" / "popularity",
        name="tiny/popularity",
        kind="popularity",
        options=popularity.options(),
        signals=popularity.signals,
        files=popularity.files(),
    )
    found = with_counts(static, model, tmp_path / "entries")
    assert np.allclose(found.eviction_options["counts"], shares_LE * 1e6, atol=1)
    assert with_counts(LFU, model, tmp_path / "entries") == LFU


def test_requests__take_the_prompts_in_turn_and_warm_up_first():
    config = BenchConfig(system=[LFU], requests=2, max_new_tokens=5, warm_up_tokens=3)
    found = batched([[1], [2], [3]], 2, config)
    assert [one.prompts for one in found] == [((1,), (2,)), ((3,), (1,)), ((2,), (3,))]
    assert [one.new_tokens for one in found] == [3, 5, 5]
    assert [one.is_measured for one in found] == [False, True, True]
    config = BenchConfig(system=[LFU], warm_up_tokens=0)
    assert [one.is_measured for one in batched([[1]], 1, config)] == [True]


def test_requests__longer_than_the_context_are_refused(tmp_path):
    folder = tiny_qwen2_moe(tmp_path)
    config = BenchConfig(system=[LFU], max_new_tokens=100_000)
    with pytest.raises(MoecastError, match="lower max_new_tokens"):
        requests_of(config, folder)


def test_rounds__go_through_all_arms_in_turns_and_leave_out_what_failed(tmp_path, monkeypatch):
    asked = []

    def answered(task, _folder):
        asked.append((task.system.name, task.budget))
        if task.system.name == "lfu" and task.budget == "20%":
            return Failure("no room")
        return made_run()

    monkeypatch.setattr(rounds, "answer", answered)
    config = BenchConfig(system=[LFU], budget=["10%", "20%"])
    done = []
    folder = tiny_qwen2_moe(tmp_path / "model")
    requests = {1: batched([[1]], 1, config)}
    outcomes = run_rounds(
        config, live_cases(config), requests, folder=folder, scratch=tmp_path, advance=done.append
    )
    once = [("on-demand", "10%"), ("lfu", "10%"), ("on-demand", "20%"), ("lfu", "20%")]
    assert asked == once + once[:3] + once[:3]
    assert sum(done) == 12
    assert [len(one.runs) for one in outcomes] == [3, 3, 3, 0]
    assert outcomes[3].failed == "no room"


def test_answer__a_child_that_fails_says_why(tmp_path):
    nowhere = Plain(model=ModelConfig(id="nowhere"), device="cpu", requests={})
    found = answer(nowhere, tmp_path / "refused")
    assert isinstance(found, Failure)
    assert found.reason.startswith("model 'nowhere' is not on this machine")
    folder = tiny_qwen2_moe(tmp_path / "model")
    broken = Plain(model=ModelConfig(id=str(folder)), device="no device", requests={})
    found = answer(broken, tmp_path / "broken")
    assert isinstance(found, Failure)
    assert "no device" in found.reason
    wrong = answer("no task", tmp_path / "wrong")  # type: ignore[arg-type]
    assert isinstance(wrong, Failure)
    assert "AssertionError" in wrong.reason


def test_answer__a_child_that_takes_too_long_is_ended(tmp_path):
    task = Plain(model=ModelConfig(id="nowhere"), device="cpu", requests={})
    found = answer(task, tmp_path / "late", limit_seconds=0.0)
    assert found == Failure("took more than 0 s and was ended")


def test_cause__is_the_last_line_or_the_signal():
    assert cause(1, "Traceback\n  ...\nKeyError: 'x'\n\n") == "KeyError: 'x'"
    assert cause(1, "") == "the process ended with exit code 1"
    assert cause(-9, "whatever") == "the process was killed by signal 9 (out of memory?)"


def test_figures__are_medians_of_runs_and_ratios_within_a_repetition():
    base = outcome("on-demand")
    base.runs = [
        made_run(tpot_seconds=[0.4, 0.4], ttft_seconds=[2.0]),
        made_run(tpot_seconds=[0.8, 0.8], ttft_seconds=[2.0]),
        made_run(tpot_seconds=[0.4, 0.4], ttft_seconds=[8.0]),
    ]
    one = outcome("moecast")
    decode = {
        **ZERO, "hits": 3, "requests": 4, "bytes_moved": 60, "bytes_late": 5,
        "stall_seconds": 0.1, "predictor_seconds": 0.05, "link_seconds": 0.2,
    }  # fmt: skip
    prefill = {**ZERO, "hits": 1, "requests": 10, "bytes_moved": 40, "link_seconds": 0.3}
    one.runs = [
        made_run(tpot_seconds=[0.1, 0.3, 0.1], decode=decode, prefill=prefill, wall_seconds=2.0),
        made_run(tpot_seconds=[0.2, 0.2, 0.1], decode=decode, prefill=prefill, wall_seconds=1.0),
        made_run(tpot_seconds=[0.4, 0.4, 0.2], decode=decode, prefill=prefill, wall_seconds=3.0),
    ]
    row = rows_of([base, one])[1]
    assert row["tpot_of_runs"] == [0.1, 0.2, 0.4]
    assert row["tpot_seconds"] == 0.2
    # Within the repetitions: 4, 4 and 1.
    assert row["tpot_speed_up"] == 4.0
    assert row["ttft_speed_up"] == 2.0
    steps = [0.1, 0.3, 0.1, 0.2, 0.2, 0.1, 0.4, 0.4, 0.2]
    assert row["tpot_p95_seconds"] == np.percentile(steps, 95)
    # Three tokens of one row, in 2, 1 and 3 seconds.
    assert row["tokens_per_second"] == 1.5
    assert (row["decode_hit_rate"], row["prefill_hit_rate"]) == (0.75, 0.1)
    assert row["decode_stall_share"] == pytest.approx(0.1 / 0.5)
    assert row["decode_predictor_share"] == pytest.approx(0.05 / 0.5)
    assert (row["bytes_moved"], row["bytes_late"]) == (100, 5)
    assert row["bytes_moved_per_decode_step"] == 20
    assert row["read_bytes_per_second"] == pytest.approx(200)
    assert row["memory_beside_bytes"] == 400 - 50 - 100


def test_figures__of_a_bound_stand_beside_on_demand_of_the_same_cell():
    live = rows_of([outcome("on-demand", tpot_seconds=[0.4, 0.4]), outcome("lfu", budget="9%")])
    found = {"budget": "50%", "batch": 1, "system": "oracle", "tpot_seconds": 0.1,
             "ttft_seconds": 0.5, "hit_rate": 0.9}  # fmt: skip
    here, elsewhere = bound_rows([found, {**found, "budget": "9%"}], live)
    assert (here["simulated"], here["decode_hit_rate"]) == (True, 0.9)
    assert (here["tpot_speed_up"], here["ttft_speed_up"]) == (4.0, 2.0)
    assert "tpot_speed_up" not in elsewhere


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_remembered_bytes__counts_pages_that_were_read(tmp_path):
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_bytes(bytes(3 * mmap.PAGESIZE + 1))
    empty.touch()
    file.read_bytes()
    assert remembered_bytes([file, empty]) == 4 * mmap.PAGESIZE
