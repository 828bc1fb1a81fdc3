"""EAM at request level against sections 4 and 5.1 of its paper, worked out by hand."""

import numpy as np

from predictors.eam.request import EamRequestPredictor
from tests.builders.predictors import serve, small_spec, token_step

STORED = np.array(
    [[[6, 2, 0], [0, 8, 0], [1, 0, 7]], [[7, 0, 1], [0, 4, 4], [0, 8, 0]],
     [[0, 0, 8], [8, 0, 0], [8, 0, 0]]],
    np.float32,
)  # fmt: skip
SPEC = small_spec(num_experts=3)


def test_forecasts__are_the_normalised_sums_of_the_matches() -> None:
    after_first = serve(EamRequestPredictor(SPEC, STORED, matches=2), token_step(0, 1, 1))[0]
    # Expert 0 at layer 0: the first two match. Cells summed: (0, 12, 4) and (1, 8, 7).
    for layer, cells in ((1, [0, 12, 4]), (2, [1, 8, 7])):
        np.testing.assert_allclose(after_first[layer].scores_TE, [np.array(cells) / 16])
        np.testing.assert_allclose(after_first[layer].priority_E, np.array(cells) / 16)


def test_match__is_the_cosine_of_the_flattened_rows_known_so_far() -> None:
    predictor = EamRequestPredictor(SPEC, STORED, matches=1)
    predictor.begin_step(np.zeros(2), np.zeros(2))
    predictor.routed(0, np.array([[0], [1]]), None)
    # Row (1, 1, 0) against (6, 2, 0), (7, 0, 1) and (0, 0, 8).
    expected = [8 / np.sqrt(2 * 40), 7 / np.sqrt(2 * 50), 0.0]
    np.testing.assert_allclose(predictor.similarity(0), [expected], rtol=1e-6)
    predictor.routed(1, np.array([[1], [1]]), None)
    # And row (0, 2, 0) against (0, 8, 0), (0, 4, 4) and (8, 0, 0).
    length = np.sqrt(2 + 4)
    expected = [(8 + 16) / (length * np.sqrt(40 + 64)), (7 + 8) / (length * np.sqrt(50 + 32)), 0.0]
    np.testing.assert_allclose(predictor.similarity(1), [expected], rtol=1e-6)


def test_iteration__restarts_with_each_step() -> None:
    predictor = EamRequestPredictor(SPEC, STORED, matches=1)
    first = serve(predictor, token_step(0, 1, 1))[0]
    serve(predictor, token_step(2, 0, 0))
    again = serve(predictor, token_step(0, 1, 1))[0]
    np.testing.assert_array_equal(first[1].scores_TE, again[1].scores_TE)


def test_step__of_several_requests_matches_each_by_its_own_rows() -> None:
    predictor = EamRequestPredictor(SPEC, STORED, matches=1)
    found = serve(predictor, np.array([[[0], [2]], [[1], [0]], [[2], [0]]]), [10, 11])[0][1]
    # (1, 0, 0): .949 with the first, .99 with the second; (0, 0, 1): 1 with the third.
    np.testing.assert_allclose(found.scores_TE, [[0, 0.5, 0.5], [1, 0, 0]])
    np.testing.assert_allclose(found.priority_E, np.array([0.5, 0.25, 0.25]))


def test_store__replaces_the_most_similar_when_it_is_full() -> None:
    predictor = EamRequestPredictor(SPEC, STORED, capacity=3)
    new = np.array([[0, 0, 5], [4, 1, 0], [5, 0, 0]], np.float32)
    predictor.store(new)
    assert np.array_equal(predictor.collection.counts, [STORED[0], STORED[1], new])


def test_ended_request__is_stored_as_prefill_and_decode() -> None:
    predictor = EamRequestPredictor.empty(SPEC, capacity=4, idle_steps=2)
    serve(predictor, np.array([[[0], [1]], [[2], [2]], [[1], [0]]]), [1, 1])
    serve(predictor, token_step(0, 1, 2), [1])
    serve(predictor, token_step(0, 1, 1), [1])
    assert predictor.collection.size == 0
    for _ in range(2):
        serve(predictor, token_step(2, 2, 2), [2])
    prompt, answer = [[1, 1, 0], [0, 0, 2], [1, 1, 0]], [[2, 0, 0], [0, 2, 0], [0, 1, 1]]
    assert predictor.collection.counts.tolist() == [prompt, answer]
