"""The correlation table and the dependency predictor, worked out by hand."""

import numpy as np
import pytest

from predictors.baselines import DependencyPredictor
from predictors.correlation import CorrelationPredictor
from tests.builders.predictors import serve, small_spec

SPEC = small_spec(num_layers=2, num_experts=3, top_k=2)
USES = np.array([[4, 4, 2], [5, 3, 2]])
"""Five tokens, two choices each."""


def pairs() -> np.ndarray:
    """Of the 4 tokens with expert 0 in layer 0, 4 went on to expert 0, 3 to 1, 1 to 2."""
    table = np.zeros((2, 3, 3))
    table[1] = [[4, 3, 1], [4, 2, 2], [2, 1, 1]]
    return table


def step(first: list[int], second: list[int]) -> np.ndarray:
    return np.array([[first], [second]])


@pytest.mark.parametrize(("least", "wanted"), [(None, [0, 1]), (0.5, [0, 1]), (0.7, [0])])
def test_tendency__is_the_mean_of_the_tokens_experts(least: float | None, wanted: list[int]):
    """`least` names the experts that enough tokens are expected to use."""
    found = serve(CorrelationPredictor(SPEC, pairs(), USES, least=least), step([0, 2], [0, 1]))
    # The first layer is forecast by its experts' own shares.
    np.testing.assert_allclose(found[-1][0].scores_TE, [[0.8, 0.8, 0.4]])
    # Of expert 0's tokens: 1, 3/4, 1/4; of expert 2's: 1, 1/2, 1/2.
    np.testing.assert_allclose(found[0][1].scores_TE, [[1.0, 0.625, 0.375]])
    assert found[0][1].wanted == wanted


def test_hot_experts__have_the_largest_sum_of_tendencies() -> None:
    table = np.zeros((2, 3, 3))
    table[1] = [[0, 4, 0], [0, 0, 4], [2, 0, 0]]
    predictor = CorrelationPredictor(SPEC, table, USES, hot=1, learning=False)
    found = serve(predictor, np.array([[[0, 1], [0, 2], [0, 1]], [[1, 2]] * 3]), [0, 1, 2])[0][1]
    # Expert 1: 3 x .5; expert 2: 2 x .5; expert 0: .5.
    np.testing.assert_allclose(found.expected_tokens_E, [0.5, 1.5, 1.0])
    assert found.wanted == [1]


def test_table__counts_while_serving_and_an_entry_keeps_the_initial_counts() -> None:
    predictor = CorrelationPredictor.empty(SPEC)
    before = predictor.files()
    assert serve(predictor, step([0, 1], [2, 1]))[0][1].scores_TE.tolist() == [[0, 0, 0]]
    found = serve(predictor, step([0, 2], [2, 1]))
    # Expert 0's one token went to 2 and 1; expert 2 had none.
    np.testing.assert_allclose(found[0][1].scores_TE, [[0, 0.5, 0.5]])
    np.testing.assert_allclose(found[-1][0].scores_TE, [[1, 1, 0]])
    assert predictor.files() == before
    # A token more: both of expert 0's, and expert 2's one, went to 2 and 1.
    learned = predictor.as_learned().renewed()
    np.testing.assert_allclose(serve(learned, step([0, 2], [2, 1]))[0][1].scores_TE, [[0, 1, 1]])


def test_prior__weighs_at_most_prior_tokens() -> None:
    predictor = CorrelationPredictor(SPEC, pairs() * 1_000, USES * 1_000, prior_tokens=5)
    serve(predictor, step([0, 1], [1, 2]))
    found = serve(predictor, step([0, 1], [1, 2]))[0][1]
    # Of the 4 tokens of the prior and the one that was served since.
    of_zero, of_one = np.array([4, 3 + 1, 1 + 1]) / 5, np.array([4, 2 + 1, 2 + 1]) / 5
    np.testing.assert_allclose(found.scores_TE, [(of_zero + of_one) / 2], rtol=1e-5)


def test_no_choice__has_no_tendency() -> None:
    found = serve(CorrelationPredictor(SPEC, pairs(), USES), step([0, 3], [3, 1]))[0][1]
    np.testing.assert_allclose(found.scores_TE, np.array([[4, 3, 1]]) / 4 / 2)


def test_dependency__forecasts_every_expert_of_the_next_layer() -> None:
    answers = serve(DependencyPredictor(SPEC), step([2, 1], [0, 1]))
    assert {place: sorted(found) for place, found in answers.items()} == {-1: [0], 0: [1], 1: []}
    assert answers[0][1].experts(2) == [0, 1, 2]
    np.testing.assert_allclose(answers[0][1].scores_TE, [[2 / 3] * 3])
