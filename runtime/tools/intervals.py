"""Confidence intervals of mean times and of their ratios, by resampling requests.

Requests are resampled, not steps: the times of a request's steps depend on each other. A few live
runs, too few to be resampled, have an interval by Student's distribution.

Shape suffixes: R resamples, N requests.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2_000
"""Enough for a 95 % interval whose ends move by a few percent of its width with the seed."""
LEAST_REQUESTS = 5
"""Resampling fewer requests says nothing."""

STUDENT = (12.706, 4.303, 3.182)
"""The 97.5 % quantiles of Student's distribution with 1 degree of freedom, 2, 3."""

Interval = tuple[float, float]
"""Lower and upper end."""


def bootstrap_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of `sum(numerators) / sum(denominators)` over requests.

    A mean time per step has the time of each request's steps over their number. A speed-up has the
    time of each request under one system over its time under another: the requests are resampled
    in pairs, so that a request that is slow for both does not widen the interval.

    Args:
        numerators: A sum for each request.
        denominators: A sum for each of the same requests, above 0.

    Returns:
        Percentiles of a seeded bootstrap; None for fewer than `LEAST_REQUESTS` requests.
    """
    numerators_N, denominators_N = np.asarray(numerators), np.asarray(denominators)
    assert numerators_N.shape == denominators_N.shape, (len(numerators), len(denominators))
    num_requests = len(numerators_N)
    if num_requests < LEAST_REQUESTS:
        return None
    draws_RN = draw_requests(num_requests)
    ratios_R = (draws_RN @ numerators_N) / (draws_RN @ denominators_N)
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(ratios_R, [outside, 100 - outside])
    return float(low), float(high)


def mean_interval(means: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of a mean over requests or runs; None for a single one.

    Args:
        means: A mean time for each request of each run, of equally many steps.
    """
    count = len(means)
    if count >= LEAST_REQUESTS:
        return bootstrap_ratio(means, [1.0] * count)
    if count < 2:
        return None
    center = float(np.mean(means))
    half = STUDENT[count - 2] * float(np.std(means, ddof=1)) / count**0.5
    return center - half, center + half


def draw_requests(num_requests: int) -> NDArray[np.int64]:
    """Returns `[R, N]`: the number of times that each resample draws each request."""
    rng = np.random.default_rng(0)
    return rng.multinomial(num_requests, np.full(num_requests, 1 / num_requests), size=RESAMPLES)
