"""Times of steps add up over any run, and take no more memory the longer it is."""

import pytest

from runtime.engine import stats
from runtime.engine.stats import StepStats


def run(times: StepStats, seconds: list[float], monkeypatch, *, is_prefill: bool = False) -> None:
    for one in seconds:
        clock = iter([10.0, 10.0 + one])
        monkeypatch.setattr(stats.time, "perf_counter", lambda clock=clock: next(clock))
        times.begin_step(is_prefill=is_prefill)
        times.end_step()


def test_stats__of_a_long_run_keep_the_first_and_the_last_times(monkeypatch):
    monkeypatch.setattr(stats, "KEPT", 4)
    times = StepStats()
    run(times, [7.0, 1.0, 2.0], monkeypatch, is_prefill=True)
    longest = 0
    for number in range(1, 31):
        run(times, [float(number)], monkeypatch)
        longest = max(longest, len(times.decode_seconds))
        last = min(number, 4)
        kept = times.decode_seconds[-last:]
        assert kept == pytest.approx([float(n) for n in range(number - last + 1, number + 1)])
    assert longest <= 8
    assert times.decode_seconds[0] == pytest.approx(1.0)
    said = times.as_dict()
    assert (said["num_decode_steps"], said["ttft_seconds"]) == (30, pytest.approx(7.0))
