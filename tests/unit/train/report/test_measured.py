"""What the report measures itself, against plain versions."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from tests.builders.traces import make_spec, make_trace
from train.report.measured import BUDGETS, measure_hit_rates
from train.report.routing import cumulative_LE, share_of_choices


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


def test_routing__shares_of_hand_made_choices(tmp_path: Path) -> None:
    counts = np.array([[4, 4, 4, 4], [2, 10, 0, 4]])
    chosen_LNK = np.stack([np.repeat(np.arange(4), own)[:, None] for own in counts])
    expected = [[0.25, 0.5, 0.75, 1.0], [10 / 16, 14 / 16, 1.0, 1.0]]
    assert cumulative_LE(chosen_LNK, 4) == pytest.approx(np.array(expected))
    assert share_of_choices(make_trace(tmp_path / "t", prompt_tokens=2, new_tokens=2)) is None
