import numpy as np
import pytest

from predictors import reuse
from predictors.reuse import CHANCE_DECAYS, COUNT_DECAYS, FadingSums

NUM_LAYERS, NUM_EXPERTS, HIDDEN_SIZE = 2, 9, 21
RANDOM = np.random.default_rng(3)


def make_sums() -> FadingSums:
    random = np.random.default_rng(4)
    shape = (NUM_LAYERS, NUM_EXPERTS)
    routers = random.standard_normal((*shape, HIDDEN_SIZE)).astype(np.float32)
    return FadingSums(routers, random.standard_normal(shape).astype(np.float32))


def expected_means(sums: FadingSums, layer: int, tokens: list[tuple[list[int], np.ndarray]]):
    """The sums written out: each token's uses and probabilities, by its distance to the last."""
    means = np.zeros((len(COUNT_DECAYS) + len(CHANCE_DECAYS), NUM_EXPERTS))
    for distance, (experts, hidden_D) in enumerate(reversed(tokens)):
        logits = sums.routers_LED[layer].astype(np.float64) @ hidden_D + sums.biases_LE[layer]
        chance = np.exp(logits) / np.exp(logits).sum()
        used = np.isin(np.arange(NUM_EXPERTS), experts)
        for row, decay in enumerate(COUNT_DECAYS):
            means[row] += (1 - decay) * decay**distance * used
        for row, decay in enumerate(CHANCE_DECAYS, len(COUNT_DECAYS)):
            means[row] += (1 - decay) * decay**distance * chance
    return means


@pytest.mark.parametrize("has_kernels", [False, True])
def test_add__is_the_decaying_mean_of_choices_and_probabilities(
    monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    if has_kernels and reuse.kernels is None:
        pytest.skip("the kernels are not compiled")
    if not has_kernels:
        monkeypatch.setattr(reuse, "kernels", None)
    sums, tokens = make_sums(), []
    for num_tokens in (3, 1, 1, 2):
        experts_NK = RANDOM.integers(0, NUM_EXPERTS + 1, (num_tokens, 4))  # 9 is no expert
        hidden_ND = RANDOM.standard_normal((num_tokens, HIDDEN_SIZE)).astype(np.float32)
        tokens += zip(experts_NK.tolist(), hidden_ND, strict=True)
        means_FE = sums.add(1, experts_NK, hidden_ND, is_one_request=True)
        np.testing.assert_allclose(means_FE, expected_means(sums, 1, tokens), atol=1e-5)
