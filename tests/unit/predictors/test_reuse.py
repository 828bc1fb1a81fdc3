import numpy as np
import pytest

from predictors import reuse
from predictors.reuse import CHANCE_DECAYS, COUNT_DECAYS, FadingSums

NUM_LAYERS, NUM_EXPERTS = 2, 9
RANDOM = np.random.default_rng(3)


def expected_means(tokens: list[tuple[list[int], np.ndarray]]) -> np.ndarray:
    """The sums written out: each token's uses and probabilities, by its distance to the last."""
    means = np.zeros((len(COUNT_DECAYS) + len(CHANCE_DECAYS), NUM_EXPERTS))
    for distance, (experts, logits_E) in enumerate(reversed(tokens)):
        chance = np.exp(logits_E.astype(np.float64))
        chance /= chance.sum()
        used = np.isin(np.arange(NUM_EXPERTS), experts)
        for row, decay in enumerate(COUNT_DECAYS):
            means[row] += (1 - decay) * decay**distance * used
        for row, decay in enumerate(CHANCE_DECAYS, len(COUNT_DECAYS)):
            means[row] += (1 - decay) * decay**distance * chance
    return means


@pytest.mark.parametrize("kernels", [None, reuse.kernels], ids=["numpy", "compiled"])
def test_add__is_the_decaying_mean_of_choices_and_probabilities(monkeypatch, kernels):
    monkeypatch.setattr(reuse, "kernels", kernels)
    sums, tokens = FadingSums(NUM_LAYERS, NUM_EXPERTS), []
    for num_tokens in (3, 1, 1, 2):
        experts_NK = RANDOM.integers(0, NUM_EXPERTS + 1, (num_tokens, 4))  # 9 is no expert
        logits_NE = RANDOM.standard_normal((num_tokens, NUM_EXPERTS)).astype(np.float32)
        tokens += zip(experts_NK.tolist(), logits_NE, strict=True)
        means_FE = sums.add(1, experts_NK, logits_NE, is_one_request=True)
        np.testing.assert_allclose(means_FE, expected_means(tokens), atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("is_one_request", [True, False])
@pytest.mark.parametrize("kernels", [None, reuse.kernels], ids=["numpy", "compiled"])
def test_add__leaves_a_token_out_whose_logits_are_not_finite(monkeypatch, kernels, is_one_request):
    monkeypatch.setattr(reuse, "kernels", kernels)
    sums, tokens = FadingSums(NUM_LAYERS, NUM_EXPERTS), []
    for spoilt in (None, np.nan, np.inf, None):
        experts_NK = RANDOM.integers(0, NUM_EXPERTS, (1, 4))
        logits_NE = RANDOM.standard_normal((1, NUM_EXPERTS)).astype(np.float32)
        if spoilt is None:
            tokens.append((experts_NK[0].tolist(), logits_NE[0]))
        else:
            logits_NE[0, 5] = spoilt
        means_FE = sums.add(1, experts_NK, logits_NE, is_one_request=is_one_request)
        np.testing.assert_allclose(means_FE, expected_means(tokens), atol=1e-5)
