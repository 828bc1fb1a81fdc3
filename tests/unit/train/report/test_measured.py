"""What the report measures itself, against plain versions."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from tests.builders.traces import make_spec, make_trace
from train.nonlearned import fit_token
from train.report.measured import BUDGETS, measure_growth, measure_hit_rates, take_share
from train.report.routing import count_routing, cumulative_E, entropy_L


def test_hit_rates__lru_is_a_plain_lru_and_belady_bounds_all(tmp_path: Path) -> None:
    # One expert a token and no prompts: nothing depends on the order within a step.
    spec = make_spec(top_k=1)
    trace = make_trace(tmp_path / "t", spec=spec, prompt_tokens=1, new_tokens=20)
    steps = list(trace.steps("held_out"))
    rows = measure_hit_rates(trace, [], num_tokens=len(steps))
    for budget in BUDGETS:
        slots = spec.num_experts * budget // 100
        if not slots:
            continue
        hits = 0
        for layer in range(spec.num_layers):
            cache: OrderedDict[int, None] = OrderedDict()
            for step in steps:
                expert = int(step.experts(layer)[0, 0])
                hits += expert in cache
                cache[expert] = None
                cache.move_to_end(expert)
                if len(cache) > slots:
                    cache.popitem(last=False)
        rates = {row.eviction: row.hit_rate for row in rows if row.cache_percent == budget}
        assert rates["lru"] == pytest.approx(hits / (len(steps) * spec.num_layers))
        assert max(rates.values()) == rates["belady"]
        assert "reuse" not in rates


def test_fewer__parts_are_nested_requests_and_the_whole_is_the_trace(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    parts = [take_share(trace, share) for share in (0.25, 0.5, 1.0)]
    rows = [set(part.rows("train").tolist()) for part in parts]
    assert rows[0] < rows[1] < rows[2] == set(trace.rows("train").tolist())
    for part, mine in zip(parts, rows, strict=True):
        stepped = [
            row for step in part.steps("train") for row in range(step.rows.start, step.rows.stop)
        ]
        assert set(stepped) == mine
        assert part.rows("held_out").tolist() == trace.rows("held_out").tolist()
    whole = fit_token(trace).files()
    assert fit_token(parts[2]).files() == whole
    assert fit_token(parts[0]).files() != whole


def test_growth__counts_tokens_and_prompts_of_each_part(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    rows = [row for row in measure_growth(trace) if row["predictor"] == "token"]
    train = len({int(one) for one in trace.requests[trace.rows("train")]})
    assert [row["prompts"] for row in rows] == [round(train * s) for s in (0.125, 0.25, 0.5, 1)]
    assert [row["train_tokens"] for row in rows] == [10 * row["prompts"] for row in rows]
    assert rows[-1]["mean_accuracy"] > rows[0]["mean_accuracy"]


def test_routing__entropy_and_share_of_hand_made_counts() -> None:
    counts = np.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0], [2, 10, 0, 4]])
    assert entropy_L(counts)[:3] == pytest.approx([1.0, 0.0, 0.5])
    assert cumulative_E(counts)[3] == pytest.approx([10 / 16, 14 / 16, 1.0, 1.0])
    assert cumulative_E(counts)[0] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_routing__without_long_requests_there_is_none(tmp_path: Path) -> None:
    assert count_routing(make_trace(tmp_path / "t", prompt_tokens=2, new_tokens=2)) is None


def test_routing__request_and_step_are_of_one_request(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", prompt_tokens=12, new_tokens=6)
    found = count_routing(trace)
    assert found is not None
    assert found.request_tokens == 18
    assert (found.request_LE.sum(axis=1) == 18 * trace.spec.top_k).all()
    assert (found.step_LE.sum(axis=1) == trace.spec.top_k).all()
    assert (found.step_LE <= found.request_LE).all()
    assert (found.requests_RLE.sum(axis=0) == found.corpus_LE).all()
