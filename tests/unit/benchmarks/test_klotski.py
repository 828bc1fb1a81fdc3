"""What the batch benchmark says of a run is what happened in it."""

import pytest

from benchmarks.klotski.live import Setting, check, requests_of
from benchmarks.klotski.page import page_of
from benchmarks.klotski.run import figures_of
from benchmarks.klotski.simulated import InBatches
from benchmarks.klotski.watch import Named, covered, reads, shares, timeline
from benchmarks.tables import grouping
from runtime.policy.tier import TransferTask


def task(layer, expert, size=10):
    return TransferTask((layer, expert), 0, 0, 1, size, True, None)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(0, 1), (3, 5)], 2),  # the window begins at 0.5 and ends at 4.5
        ([(0, 4), (1, 2), (3, 9)], 4),
        ([(1, 2), (1, 3), (2, 3)], 2),
        ([(5, 6), (0, 0.5)], 0),
    ],
)
def test_covered__counts_each_moment_once(spans, seconds):
    assert covered(spans, (0.5, 4.5)) == pytest.approx(seconds if spans else 0)


def spans_of_a_run():
    """A prefill of 10 s; then two steps of 4 s, of which the second waits 1 s for nothing."""
    spans = Named()
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
        spans.between(0, begin - 0.5, begin)
        spans.computed((0, 1), begin, begin + 1)
    return spans


def test_shares__are_of_decode_steps_and_count_waiting():
    found = shares(spans_of_a_run())
    assert found["seconds"] == 8
    assert found["link"] == pytest.approx((2 + 1 + 1.5) / 8)
    assert found["compute"] == pytest.approx(1 - 3 / 8)
    assert found["both_idle"] == pytest.approx(1.5 / 8)  # from 15.5, when the bytes had come, to 17
    assert found["bytes_per_second"] == pytest.approx(40 / 8)


def test_reads__within_a_step():
    assert reads(spans_of_a_run()) == {"most": 2, "mean": 5 / 4}


def test_timeline__begins_with_its_layers():
    found = timeline(spans_of_a_run(), layers=(0,))
    assert found["milliseconds"] == 1500
    assert found["experts"] == [[500, 1500]]
    assert found["stalls"] == [[0, 500]]
    assert found["transfers"] == [[0, 1500]]


def setting(tmp_path):
    return Setting(
        model=tmp_path, budget="25%", prompt_tokens=8, new_tokens=4, batch_size=4, n=2,
        sizes=(2, 4), groups=(1, 2), threads=1, repetitions=1, work=tmp_path,
    )  # fmt: skip


def test_requests_of__has_every_point_once(tmp_path):
    found = requests_of(setting(tmp_path))
    points = [(r.arm, r.batch_size, r.n, r.kv_budget) for r in found.values()]
    assert len(set(points)) == len(points)
    klotski = {(b, n) for arm, b, n, kv in points if arm == "klotski" and kv is None}
    assert klotski == {(2, 1), (2, 2), (4, 1), (4, 2)}


def test_check__finds_a_token_that_differs():
    rows = [
        {"name": "a", "batch_size": 2, "answers": [[1], [2]]},
        {"name": "b", "batch_size": 2, "answers": [[1], [3]]},
        {"name": "c", "batch_size": 1, "answers": [[9]]},
    ]
    with pytest.raises(RuntimeError, match="b: prompt 1"):
        check(rows)


def test_in_batches__a_layer_is_computed_batch_by_batch():
    made = {
        "name": "x", "link_bytes_per_second": 1.0, "link_latency_seconds": 0.0,
        "memory_bytes_per_second": 10.0, "flops": 4.0, "kernel_seconds": 0.0,
        "predictor_seconds": 0.0, "chunk_bytes": (2, 2, 2), "layer_bytes": 20,
    }  # fmt: skip
    # Weights are read in 2 s; a token takes 2 * 10 / 4 = 5 s.
    assert InBatches(**made, n=1).layer_seconds(12) == 60
    assert InBatches(**made, n=3).layer_seconds(12) == 3 * 20
    assert InBatches(**{**made, "flops": 400.0}, n=3).layer_seconds(12) == 3 * 2


def row(name, arm, batch, n, speed, **more):
    found = shares(spans_of_a_run())
    return {
        "name": name, "arm": arm, "batch_size": batch, "n": n, "tokens_per_second": speed,
        "speeds": [speed],
        "kv_budget": None, "steady": found, "reads_per_step": {"most": 1, "mean": 1.0},
        "bytes_moved": 1 << 30, "peak_memory_bytes": 400 << 20, "weights_bytes": 100 << 20,
        "arena_bytes": 200 << 20, "memory": [(0.0, 1, 2), (0.1, 3, 4)],
        "steps": [10.0, 4.0, 4.0],
        "timeline": timeline(spans_of_a_run(), layers=(0, 1)), **more,
    }  # fmt: skip


RESULTS = {
    "model": "m",
    "budget": "25%",
    "prompt_tokens": 8,
    "new_tokens": 4,
    "live": [
        row("single batch, on demand", "on-demand", 4, 1, 2.0),
        row("+ order (klotski)", "klotski", 4, 2, 11.0),
        row("batch 2, n 1", "klotski", 2, 1, 3.0),
        {"name": "simple pipeline", "failed": "why"},
    ],
    "accelerate": {"name": "accelerate, one batch of all", "rows": 8, "tokens_per_second": 1.0},
    "simulated": [
        {"environment": "env 1", "system": s, "batch": 4, "n": n, "tokens_per_second": 1.0 * n}
        for s, n in (("on-demand", 1), ("klotski", 1), ("klotski", 4))
    ],
    "quality": [
        {"window": None, "nats": 3.0, "perplexity": 20.0, "same_token_share": 1.0},
        {"window": 28, "nats": 3.1, "perplexity": 22.0, "same_token_share": 0.9},
    ],
}


def test_figures_of__are_ratios_of_the_arms():
    found = figures_of(RESULTS["live"], RESULTS["accelerate"])
    assert found["over_single_batch_on_demand"] == 5.5
    assert found["over_accelerate"] == 11.0
    assert found["decode_over_single_batch_on_demand"] == 2  # n = 2: as many steps, as long
    assert found["busiest_share"] == pytest.approx(5 / 8)
    assert found["beside_weights_and_budget_bytes"] == 100 << 20
    assert figures_of([], None) == {}


def test_grouped__tables_of_what_there_is(monkeypatch):
    monkeypatch.setattr(grouping, "result", lambda _: None)
    assert grouping.grouped() == []
    monkeypatch.setattr(grouping, "result", lambda _: RESULTS)
    text = "\n".join(grouping.grouped(every=True))
    assert "| + order (klotski) | 4 | 2 | 11.0 | 5.50x | 56 % | 62 % | 1 |" in text
    assert "| accelerate, one batch of all | 8 | 1 | 1.0 | 0.50x | - | - | - |" in text
    assert "| 4 | 1.0 | 4.0 |" in text
    assert "| 28 | 3.100 | 22.0 | 90 % |" in text


def test_page_of__writes_the_papers_figures(tmp_path):
    page = page_of(RESULTS).write(tmp_path)
    assert "Tokens a second against n" in page.read_text()
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert {"figure-12.png", "figure-14.png", "table-3.png"} <= set(pictures)
    assert any(name.startswith("figure-15") for name in pictures)
