"""Arms, requests, rounds, children and figures of a benchmark, each by itself."""

import mmap
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from predictors.baselines import PopularityPredictor
from predictors.errors import MoecastError
from runtime.commands.bench import choose_fastest
from runtime.config import ModelConfig, StoreConfig, SystemConfig
from runtime.tools.bench import tasks
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.rows import BenchRow, compare_simulated, make_rows
from runtime.tools.bench.serve import with_counts
from runtime.tools.child_process import ChildFailure, describe_exit, run_in_child
from tests.builders.entries import tiny_spec
from tests.builders.outcomes import ZERO, made_run, outcome
from zoo.entry import write_entry

LFU = SystemConfig(name="lfu", prefetch=False, eviction="lfu")
BELADY = SystemConfig(name="belady", prefetch=False, eviction="belady")


def test_live_cases__include_on_demand_and_no_bounds():
    config = BenchConfig(system=[LFU, BELADY], budget=["10%", "20%"], batch_size=[1, 4])
    cases = tasks.live_cases(config)
    found = [(one.condition.batch, one.condition.budget, one.variant.label) for one in cases]
    assert found == list(product((1, 4), ("10%", "20%"), ("on-demand", "lfu")))
    assert tasks.find_replayed(config.system) == [BELADY]
    on_demand = cases[0].variant.system
    assert (on_demand.prefetch, on_demand.eviction) == (False, "lru")


def test_ablation__is_promoe_without_each_technique():
    promoe = SystemConfig(name="promoe", predictor="mlp")
    config = BenchConfig(system=[promoe], budget=["10%"], ablation=True)
    live = [case.variant.system for case in tasks.live_cases(config)]
    techniques = ("chunked", "early_preemption", "reordered")
    off = [[name for name in techniques if not getattr(one, name)] for one in live[1:]]
    assert off == [[], ["chunked"], ["early_preemption"], ["reordered"]]
    assert {one.predictor for one in live[1:]} == {"mlp"}


def test_static__holds_what_the_zoo_s_popularity_names(tiny, tmp_path):
    model = ModelConfig(name="tiny", id=str(tiny))
    static = SystemConfig(name="static", prefetch=False, eviction="static")
    assert with_counts(static, model, None) == static
    shares_LE = np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8)
    popularity = PopularityPredictor(tiny_spec(), shares_LE, ahead=1)
    write_entry(tmp_path / "entries" / "popularity", popularity, name="tiny/popularity")
    found = with_counts(static, model, tmp_path / "entries")
    assert np.allclose(found.eviction_options["counts"], shares_LE * 1e6, atol=1)
    assert with_counts(LFU, model, tmp_path / "entries") == LFU


def test_requests__take_the_prompts_in_turn_and_warm_up_first():
    config = BenchConfig(system=[LFU], requests=2, max_new_tokens=5, warm_up_tokens=3)
    found = tasks.batch_prompts([[1], [2], [3]], 2, config)
    expected = [(((1,), (2,)), 3, False), (((3,), (1,)), 5, True), (((2,), (3,)), 5, True)]
    assert [(one.prompts, one.new_tokens, one.is_measured) for one in found] == expected
    config = BenchConfig(system=[LFU], warm_up_tokens=0)
    assert [one.is_measured for one in tasks.batch_prompts([[1]], 1, config)] == [True]


def test_requests__longer_than_the_context_are_refused(tiny):
    config = BenchConfig(system=[LFU], max_new_tokens=100_000)
    with pytest.raises(MoecastError, match="lower max_new_tokens"):
        tasks.make_requests(config, tiny)


def test_rounds__take_all_arms_in_turns_and_leave_out_what_failed(tiny, tmp_path, monkeypatch):
    asked = []

    def run_in_child(_function, task, _folder, **_):
        asked.append((task.case.variant.system.name, task.case.condition.budget))
        return ChildFailure("no room") if asked[-1] == ("lfu", "20%") else asdict(made_run())

    monkeypatch.setattr(tasks, "run_in_child", run_in_child)
    config, done = BenchConfig(system=[LFU], budget=["10%", "20%"]), []
    requests = {1: tasks.batch_prompts([[1]], 1, config)}
    options = {"folder": tiny, "scratch": tmp_path}
    cases = tasks.live_cases(config)
    outcomes = tasks.run_rounds(config, cases, requests, **options, advance=done.append)
    once = [("on-demand", "10%"), ("lfu", "10%"), ("on-demand", "20%"), ("lfu", "20%")]
    assert asked == once + once[2::-1] + once[:3]
    assert (sum(done), [len(one.runs) for one in outcomes]) == (12, [3, 3, 3, 0])
    assert outcomes[3].failed == "no room"


def test_run_rounds__drop_the_pages_of_a_store_below_the_home_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "experts").touch()
    dropped = []
    monkeypatch.setattr(tasks, "drop", dropped.append)
    monkeypatch.setattr(tasks, "run_in_child", lambda *_, **__: ChildFailure("no room"))
    config = BenchConfig(system=[LFU], store=StoreConfig(path=Path("~/store")))
    options = {"folder": tiny, "scratch": tmp_path}
    tasks.run_rounds(config, tasks.live_cases(config), {1: []}, **options, advance=lambda _: None)
    assert tmp_path / "store" / "experts" in dropped


PLAIN = "runtime.tools.bench.serve:run_plain_task"


ELSEWHERE = BenchConfig(model=ModelConfig(id="nowhere"), device="cpu", system=[LFU])
NOWHERE = tasks.RequestsTask(config=ELSEWHERE, requests={})


def test_run_in_child__a_failing_child_gives_its_reason(tmp_path):
    failure = run_in_child(PLAIN, NOWHERE, tmp_path / "refused")
    assert failure.is_user_error
    assert failure.reason.startswith("model 'nowhere' is not on this machine")
    wrong = run_in_child(PLAIN, "not a task", tmp_path / "wrong")
    assert not wrong.is_user_error
    assert "AttributeError" in wrong.reason


def test_run_in_child__a_child_over_its_limit_is_killed(tmp_path):
    failure = run_in_child(PLAIN, NOWHERE, tmp_path / "late", limit_seconds=0.0)
    assert failure == ChildFailure("took more than 0 s and was ended")


def test_describe_exit__is_the_last_line_or_the_signal():
    assert describe_exit(1, "Traceback\n  ...\nKeyError: 'x'\n\n") == "KeyError: 'x'"
    assert describe_exit(1, "") == "the process ended with exit code 1"
    assert describe_exit(-9, "any") == "the process was killed by signal 9 (out of memory?)"


def test_figures__are_medians_of_runs_and_ratios_within_a_repetition():
    base = outcome("on-demand")
    times = ((0.4, 2.0), (0.8, 2.0), (0.4, 8.0))
    base.runs = [made_run(tpot_seconds=[tpot] * 2, ttft_seconds=[ttft]) for tpot, ttft in times]
    one = outcome("moecast")
    decode = {
        **ZERO, "hits": 3, "requests": 4, "bytes_moved": 60, "bytes_late": 5,
        "stall_seconds": 0.1, "predictor_seconds": 0.05, "link_seconds": 0.2,
    }  # fmt: skip
    prefill = {**ZERO, "hits": 1, "requests": 10, "bytes_moved": 40, "link_seconds": 0.3}
    counts = {"decode": decode, "prefill": prefill}
    times = (([0.1, 0.3, 0.1], 2.0), ([0.2, 0.2, 0.1], 1.0), ([0.4, 0.4, 0.2], 3.0))
    one.runs = [made_run(tpot_seconds=tpot, wall_seconds=wall, **counts) for tpot, wall in times]
    row = make_rows([base, one])[1]
    assert (row.tpot_of_runs, row.tpot_seconds) == ([0.1, 0.2, 0.4], 0.2)
    # Within the repetitions: 4, 4 and 1.
    assert (row.tpot_speed_up, row.ttft_speed_up) == (4.0, 2.0)
    steps = [0.1, 0.3, 0.1, 0.2, 0.2, 0.1, 0.4, 0.4, 0.2]
    assert row.tpot_p95_seconds == np.percentile(steps, 95)
    assert row.tpot_mean_seconds == pytest.approx(np.mean(steps))
    # One request in each of 3 runs, 1/6, 1/6 and 1/3 s: Student's interval.
    half = 4.303 * np.std([1 / 6, 1 / 6, 1 / 3], ddof=1) / 3**0.5
    ends = (np.mean(steps) - half, np.mean(steps) + half)
    assert row.tpot_interval_seconds == pytest.approx(ends)
    # Three tokens of one row, in 2, 1 and 3 seconds.
    assert (row.tokens_per_second, row.decode_hit_rate, row.prefill_hit_rate) == (1.5, 0.75, 0.1)
    # Of .5 s, .1 and .05.
    assert (row.decode_stall_share, row.decode_predictor_share) == pytest.approx((0.2, 0.1))
    assert (row.bytes_moved, row.bytes_late, row.bytes_moved_per_decode_step) == (100, 5, 20)
    assert row.read_bytes_per_second == pytest.approx(200)
    assert row.memory_beside_bytes == 400 - 50 - 100


def test_simulated_rows__are_relative_to_on_demand():
    live = make_rows([outcome("on-demand", tpot_seconds=[0.4, 0.4]), outcome("lfu", budget="9%")])
    figures = {"batch": 1, "system": "oracle", "simulated": True, "tpot_seconds": 0.1,
               "ttft_seconds": 0.5}  # fmt: skip
    rows = [BenchRow(budget=budget, **figures) for budget in ("50%", "9%")]
    here, elsewhere = compare_simulated(rows, live)
    assert (here.tpot_speed_up, here.ttft_speed_up, elsewhere.tpot_speed_up) == (4.0, 2.0, None)


def test_remembered_bytes__counts_pages_that_were_read(tmp_path):
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_bytes(bytes(3 * mmap.PAGESIZE + 1))
    empty.touch()
    file.read_bytes()
    assert tasks.cached_bytes([file, empty]) == 4 * mmap.PAGESIZE


def test_choose_fastest__is_the_machine_when_nothing_else_ran():
    slow, fast, failed = ({"step_seconds": 0.045}, []), ({"step_seconds": 0.03}, []), (None, [])
    ran = [[slow, fast], [fast, slow], [failed, slow], [failed, failed], []]
    assert [choose_fastest(arms) for arms in ran] == [fast, fast, slow, failed, (None, [])]
