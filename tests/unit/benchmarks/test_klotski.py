"""Measures and requests of the batch benchmark."""

import pytest

from benchmarks.klotski.config import KlotskiConfig
from benchmarks.klotski.live import AnswersDiffer, check_answers, list_requests
from benchmarks.klotski.measures import ExpertSpans, covered_seconds, measure_reads, measure_shares
from benchmarks.klotski.rows import ReadsPerStep
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
def test_covered_seconds__counts_each_moment_once(spans, seconds):
    assert covered_seconds(spans, (0.5, 4.5)) == pytest.approx(seconds if spans else 0)


def spans_of_a_run():
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
    return spans


def test_shares__are_of_decode_steps_and_count_waiting():
    shares = measure_shares(spans_of_a_run())
    assert shares.seconds == 8
    assert shares.link == pytest.approx((2 + 1 + 1.5) / 8)
    assert shares.compute == pytest.approx(1 - 3 / 8)
    assert shares.both_idle == pytest.approx(1.5 / 8)  # from 15.5, when the bytes arrived, to 17
    assert shares.bytes_per_second == pytest.approx(40 / 8)


def test_reads__are_counted_within_a_step():
    assert measure_reads(spans_of_a_run()) == ReadsPerStep(most=2, mean=5 / 4)


def test_requests__have_every_point_once(tmp_path):
    config = KlotskiConfig(
        model=tmp_path, trace=tmp_path, batch_size=4, n=2, sizes=[2, 4], groups=[1, 2], threads=1
    )
    requests = list_requests(config)
    points = [(r.variant, r.batch_size, r.n, r.kv_budget) for r in requests.values()]
    assert len(set(points)) == len(points)
    klotski = {(b, n) for variant, b, n, kv in points if variant == "klotski" and kv is None}
    assert klotski == {(2, 1), (2, 2), (4, 1), (4, 2)}


def test_check_answers__finds_a_token_that_differs():
    known = {}
    check_answers(known, "a", 2, [[1], [2]])
    check_answers(known, "c", 1, [[9]])
    with pytest.raises(AnswersDiffer, match="b: prompt 1"):
        check_answers(known, "b", 2, [[1], [3]])
