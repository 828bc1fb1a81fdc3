"""The rate of use by which experts are kept, from the probabilities of their next use."""

import numpy as np
import pytest

from predictors.base import HORIZONS
from runtime.policy.eviction.use_rate import discounted_rate


def chances(rates: list[float]) -> np.ndarray:
    """Returns `[H, E]` for experts that every token uses with the same probability."""
    return np.array([[1 - (1 - rate) ** h for rate in rates] for h in HORIZONS])


@pytest.mark.parametrize("slots", [2, 6, 15, 30])
def test_discounted_rate__of_steady_use_is_about_that_use(slots: int) -> None:
    rates = [0.02, 0.1, 0.3, 0.6, 1.0, *[0.05] * 40]
    found = discounted_rate(chances(rates), slots)
    assert found == pytest.approx(np.array(rates), rel=0.25)
    assert found[4] == pytest.approx(1.0)


def test_discounted_rate__large_caches_keep_what_is_used_later() -> None:
    """The first expert is used at once or never, the second is sure to be used within 16."""
    chance = np.array([[0.4, 0.05], [0.4, 0.1], [0.4, 0.3], [0.4, 0.7], [0.4, 1.0]])
    few, many = discounted_rate(chance, 0.3), discounted_rate(chance, 8)
    assert few[0] > few[1]
    assert many[1] > many[0]


def test_discounted_rate__nothing_used_is_zero() -> None:
    found = discounted_rate(np.zeros((len(HORIZONS), 3)), 4)
    assert found.tolist() == [0, 0, 0]
