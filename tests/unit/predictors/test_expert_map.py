"""Expert maps against fMoE, sections 4.2 to 4.4, worked out by hand."""

import numpy as np
import pytest

from predictors import expert_map
from predictors.errors import PredictorError
from predictors.expert_map import ExpertMapPredictor, ExpertMapStore
from tests.builders.predictors import serve, small_spec

SPEC = small_spec(num_layers=3, num_experts=4, top_k=1)
FIRST = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]]
SECOND = [[0.1, 0.1, 0.1, 0.7], [0.1, 0.1, 0.7, 0.1], [0.1, 0.2, 0.3, 0.4]]
MAPS = np.array([FIRST, SECOND])
MEANINGS = np.array([[3.0, 0.0], [0.0, 0.5]])


def logits(*rows: list[float]) -> np.ndarray:
    """A token's logits at each layer, from its probabilities."""
    return np.log(np.array(rows, np.float32))[:, None, :]


CHOSEN = np.zeros((3, 1, 1), np.int64)
"""It is the logits that count."""
EVEN = [0.25] * 4


def serve_token(predictor: ExpertMapPredictor, meaning: list[float], *rows: list[float]) -> dict:
    """Serves a token of this meaning with these probabilities."""
    entering_TD = np.array([meaning], np.float32)
    return serve(predictor, CHOSEN, logits_LTE=logits(*rows), entering_TD=entering_TD)


def test_semantic_search__forecasts_the_first_layers() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=2)
    answers = serve_token(predictor, [1.0, 2.0], EVEN, EVEN, EVEN)
    # Cosines (equation 4): 1 / sqrt 5 and 2 / sqrt 5: the second.
    assert sorted(answers[-1]) == [0, 1]
    np.testing.assert_allclose(answers[-1][0].scores_TE, [MAPS[1, 0]], rtol=1e-6)
    np.testing.assert_allclose(answers[-1][1].scores_TE, [MAPS[1, 1]], rtol=1e-6)


def test_trajectory_search__forecasts_d_layers_ahead() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=1)
    rows = [[0.6, 0.2, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], EVEN]
    predictor.begin_step(np.zeros(1), np.zeros(1))
    predictor.layer_input(0, np.array([[0.0, 1.0]], np.float32))
    for layer in range(2):
        (forecast,) = predictor.routed(layer, CHOSEN[layer], logits(*rows)[layer])
        flat = np.array(rows[: layer + 1]).ravel()
        # Equation 5, over layers 0..layer.
        past = MAPS[:, : layer + 1].reshape(2, -1)
        expected = past @ flat / np.linalg.norm(past, axis=1) / np.linalg.norm(flat)
        np.testing.assert_allclose(predictor.similarity(layer), [expected], rtol=1e-5)
        best = int(np.argmax(expected))
        assert forecast.layer == layer + 1
        np.testing.assert_allclose(forecast.scores_TE, [MAPS[best, layer + 1]], rtol=1e-6)
    # The first layer is like the first map, both layers together are like the second.
    assert expected[1] > expected[0]


def test_threshold__is_one_minus_the_score_within_zero_and_one() -> None:
    delta = expert_map.selection_threshold(np.array([0.25, 1.0, -0.5], np.float32))
    np.testing.assert_allclose(delta, [0.75, 0.0, 1.0])


@pytest.mark.parametrize(
    ("delta", "top_k", "kept"),
    [(0.0, 1, [1]), (0.0, 2, [1, 3]), (0.45, 1, [1]), (0.55, 1, [1, 3]), (0.85, 1, [0, 1, 3]),
     (1.1, 1, [0, 1, 2, 3])],
)  # fmt: skip
def test_select_experts__reaches_delta_and_at_least_top_k(delta, top_k, kept):
    probability = np.array([[0.15, 0.5, 0.05, 0.3]], np.float32)
    mask = expert_map.select_experts(probability, np.array([delta], np.float32), top_k)
    assert np.flatnonzero(mask[0]).tolist() == kept


def test_forecast__names_more_experts_for_less_similarity() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=1, learning=False)
    predictor.begin_step(np.zeros(1), np.zeros(1))
    (alike,) = predictor.layer_input(0, np.array([[1.0, 0.0]], np.float32))
    assert alike.wanted == [0]
    # Cosine .6 with the first, .8 with the second; of whose (.1 .1 .1 .7) delta = .2 takes one.
    (near,) = predictor.layer_input(0, np.array([[0.6, 0.8]], np.float32))
    assert near.wanted == [3]
    # Cosine .196 at best: delta = .804 takes .7, .1 and, .8 being too few, another.
    (far,) = predictor.layer_input(0, np.array([[-0.98, 0.2]], np.float32))
    assert (far.wanted[0], len(far.wanted)) == (3, 3)


def test_ablation__without_semantic_search_the_first_layers_have_no_forecast() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=2, semantic=False)
    answers = serve_token(predictor, [1.0, 2.0], [0.6, 0.2, 0.1, 0.1], EVEN, EVEN)
    assert (answers[-1], sorted(answers[0])) == ({}, [2])
    # What is learned does not depend on how it is searched.
    assert predictor.store.size == 3


def test_ablation__without_dynamic_selection_top_k_experts_are_named() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=1, dynamic=False)
    predictor.begin_step(np.zeros(1), np.zeros(1))
    (far,) = predictor.layer_input(0, np.array([[-0.98, 0.2]], np.float32))
    assert far.wanted == [3]
    assert predictor.options()["dynamic"] is False


def test_redundancy__weighs_scores_by_forecast_layers() -> None:
    semantic, trajectory = np.array([[0.2, 0.8]]), np.array([[1.0, 0.4]])
    found = expert_map.redundancy_scores(semantic, trajectory, distance=3, num_layers=12)
    np.testing.assert_allclose(found, [[0.25 * 0.2 + 0.75 * 1.0, 0.25 * 0.8 + 0.75 * 0.4]])


def test_full_store__replaces_the_most_redundant_map() -> None:
    predictor = ExpertMapPredictor(SPEC, MAPS, MEANINGS, distance=1, capacity=2)
    new = [[0.1, 0.1, 0.2, 0.6], [0.1, 0.1, 0.6, 0.2], [0.2, 0.2, 0.2, 0.4]]
    serve_token(predictor, [0.5, 0.5], *new)
    # Equally alike in meaning; in trajectory, the second.
    stored = np.moveaxis(predictor.store.maps_LEC, 2, 0)
    np.testing.assert_allclose(stored, [MAPS[0], new], rtol=1e-5)
    np.testing.assert_allclose(predictor.store.embeddings_DC[:, 1], [0.70711, 0.70711], rtol=1e-4)


def test_store__adds_iterations_up_to_its_capacity() -> None:
    store = ExpertMapStore(3, 1, 2, 1)
    maps = np.array([[[0.1, 0.2, 0.3, 0.4, 0.5], [0.9, 0.8, 0.7, 0.6, 0.5]]])
    store.add(maps[:, :, :2], np.ones((1, 2)), np.zeros((2, 0)))
    assert store.size == 2
    # One takes the place that is free, the two others that of the second, of which one stays.
    store.add(maps[:, :, 2:], np.ones((1, 3)), np.array([[0.0, 1.0]] * 3))
    assert store.size == 3
    np.testing.assert_allclose(store.maps_LEC[0, 0], [0.1, 0.5, 0.3], rtol=1e-6)


def test_incomplete_step__is_not_stored() -> None:
    predictor = ExpertMapPredictor.empty(SPEC, distance=1)
    predictor.begin_step(np.zeros(1), np.zeros(1))
    predictor.layer_input(0, np.ones((1, 2), np.float32))
    predictor.routed(0, np.zeros((1, 1)), np.zeros((1, 4), np.float32))
    predictor.end_step()
    assert predictor.store.size == 0


def test_cold_start__finds_an_iteration_that_came_before() -> None:
    predictor = ExpertMapPredictor.empty(SPEC, distance=1, capacity=8)
    assert not any(serve_token(predictor, [1.0, 0.0], *MAPS[0]).values())
    again = serve_token(predictor, [1.0, 0.0], *MAPS[0])
    np.testing.assert_allclose(again[0][1].scores_TE, [MAPS[0, 1]], rtol=1e-5)


def test_distance__must_lie_within_the_model() -> None:
    with pytest.raises(PredictorError, match="distance=3: the model has 3 layers"):
        ExpertMapPredictor.empty(SPEC, distance=3)
