"""Confidence intervals: coverage on known distributions, and pairs that cancel."""

import numpy as np
import pytest

from runtime.tools.intervals import LEAST_REQUESTS, bootstrap_ratio, mean_interval


def test_interval__contains_the_mean_in_about_95_of_100_samples() -> None:
    rng, inside = np.random.default_rng(1), 0
    for _ in range(100):
        counts = rng.integers(5, 30, 40)
        low, high = bootstrap_ratio(counts * rng.gamma(4.0, 2.5, 40), counts)
        inside += low <= 10.0 <= high
    assert 88 <= inside <= 99


def test_interval__is_that_of_the_normal_approximation() -> None:
    times = np.random.default_rng(2).normal(50.0, 5.0, 400)
    half = 1.96 * times.std() / 20
    expected = pytest.approx((times.mean() - half, times.mean() + half), abs=0.1 * half)
    assert bootstrap_ratio(times, np.ones(400)) == expected


def test_interval__of_a_ratio_is_narrow_where_requests_are_slow_for_both() -> None:
    slow = np.random.default_rng(3).gamma(2.0, 10.0, 50)
    assert bootstrap_ratio(1.2 * slow, slow) == pytest.approx((1.2, 1.2))


def test_interval__needs_some_requests() -> None:
    few = np.ones(LEAST_REQUESTS - 1)
    assert bootstrap_ratio(few, few) is None


def test_mean_interval__of_a_few_runs_is_students() -> None:
    # By hand: mean 2, standard deviation 1, 4.303 / sqrt(3).
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4843, 2 + 2.4843), abs=1e-3)
    assert mean_interval([1.0]) is None
    many = list(np.random.default_rng(4).normal(5.0, 1.0, 30))
    assert mean_interval(many) == bootstrap_ratio(many, [1.0] * 30)
