"""Latencies that `python -m benchmarks latency` measures."""

from benchmarks.latency import RandomStep, measure_kind
from predictors.base import Ints, Predictor
from runtime.sim.hardware import TokenLatency
from tests.builders.traces import make_spec


class Windowed(Predictor):
    """Looks at the last 16 tokens of a prompt."""

    def count_input_rows(self, requests_T: Ints) -> int:
        return min(len(requests_T), 16)


def test_measure_kind__is_by_the_rows_that_are_computed(monkeypatch) -> None:
    def time_step(predictor: Predictor, step: RandomStep) -> float:
        return 1e-6 * (5 + 2 * predictor.count_input_rows(step.requests_T))

    monkeypatch.setattr("benchmarks.latency.time_step", time_step)
    measured = measure_kind(Windowed(make_spec()), repetitions=1)
    assert measured == TokenLatency(one_us=7.0, more_us=2.0)
