"""EAM at sequence level against algorithm 1 and equation 1, worked out by hand."""

import numpy as np
import pytest

from predictors.eam.collection import normalize_rows
from predictors.eam.sequence import EPSILON, REBUILD_STEPS, EamSequencePredictor
from tests.builders.predictors import serve, small_spec, token_step

FIRST = [[8, 0, 0, 0], [6, 2, 0, 0], [0, 0, 4, 4]]
SECOND = [[0, 8, 0, 0], [0, 0, 1, 7], [5, 3, 0, 0]]
STORED = np.array([FIRST, SECOND], np.float32)
"""Two sequences of 8 tokens, top-1, three layers of four experts."""


def test_forecasts__are_the_nearest_matrixs_ratios() -> None:
    answers = serve(EamSequencePredictor(small_spec(), STORED), token_step(1, 3, 0))
    # Expert 1 at layer 0: only the second matrix has used it.
    for layer in (1, 2):
        ratios = STORED[1, layer] / 8
        assert answers[0][layer].scores_TE.tolist() == [ratios.tolist()]
        np.testing.assert_allclose(answers[0][layer].priority_E, ratios + EPSILON, rtol=1e-6)
    assert [sorted(answers[layer]) for layer in range(3)] == [[1, 2], [2], []]


def test_chances__are_top_k_times_the_ratio() -> None:
    stored = np.array([[[4, 3, 1, 0], [4, 4, 0, 0]]], np.float32)
    predictor = EamSequencePredictor(small_spec(num_layers=2, top_k=2), stored)
    answers = serve(predictor, np.array([[[0, 1]], [[0, 1]]]))
    assert answers[0][1].scores_TE.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("num_layers", [2, 5, 9])
def test_lookup__of_a_stored_matrix_by_its_own_prefix_finds_it(num_layers: int) -> None:
    """At every length of the prefix: masking the layers that are known, and not those that are not
    known yet, as a public implementation does, finds it by chance only."""
    stored = np.random.default_rng(num_layers).poisson(1.0, (32, num_layers, 60)).astype(np.float32)
    stored[:, :, 0] += 1
    spec = small_spec(num_layers=num_layers, num_experts=60)
    for place, matrix in enumerate(stored):
        predictor = EamSequencePredictor(spec, stored)
        num_tokens = int(matrix.sum(axis=1).max())
        predictor.begin_step(np.zeros(num_tokens), np.zeros(num_tokens))
        for layer, row in enumerate(matrix.astype(np.int64)):
            # A layer's row in tokens; those that are missing chose no expert.
            chosen = np.repeat(np.arange(60), row)
            chosen = np.pad(chosen, (0, num_tokens - len(chosen)), constant_values=60)
            forecasts = predictor.routed(layer, chosen[:, None], None)
            assert predictor.similarity(0).argmax() == place
            for forecast in forecasts:
                expected = matrix[forecast.layer] / matrix[forecast.layer].sum()
                np.testing.assert_allclose(forecast.scores_TE[0], expected, rtol=1e-6)


def test_similarity__is_one_minus_equation_1() -> None:
    random = np.random.default_rng(0)
    stored = random.poisson(2.0, (6, 3, 8)).astype(np.float32)
    predictor = EamSequencePredictor(small_spec(num_experts=8, top_k=2), stored, learning=False)
    counts = np.zeros((3, 8), np.float32)
    for _ in range(5):
        chosen = np.stack([random.permuted(np.tile(range(8), (3, 1)), axis=1)[:, :2]] * 3)
        serve(predictor, chosen)
        for layer in range(3):
            np.add.at(counts[layer], chosen[layer], 1)
    # The mean cosine of the rows.
    expected = (normalize_rows(counts) * normalize_rows(stored)).sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(predictor.similarity(0), expected, atol=1e-5)


def test_begin_step__forecasts_a_running_sequence_from_layer_0() -> None:
    predictor = EamSequencePredictor(small_spec(), STORED)
    assert serve(predictor, token_step(1, 3, 0))[-1] == {}
    again = serve(predictor, token_step(1, 3, 0))[-1]
    assert (sorted(again), again[0].scores_TE.tolist()) == ([0, 1, 2], [[0, 1, 0, 0]])


def test_step__of_several_requests_gives_each_its_own_forecast() -> None:
    chosen = np.array([[[0], [1], [0]], [[0], [3], [1]], [[2], [0], [3]]])
    together = serve(EamSequencePredictor(small_spec(), STORED), chosen, [10, 11, 10])[0]
    first, second = [6 / 8, 2 / 8, 0, 0], [0, 0, 1 / 8, 7 / 8]
    assert together[1].scores_TE.tolist() == [first, second, first]
    # Priorities: the mean over the two requests.
    expected = np.array([6, 2, 1, 7]) / 16 + EPSILON
    np.testing.assert_allclose(together[1].priority_E, expected, rtol=1e-6)


def drifting(dataset: np.ndarray | None = None, *, rebuild_after: int = 1) -> EamSequencePredictor:
    options = {"capacity": 2, "insufficient": 0.5, "idle_steps": 1, "rebuild_after": rebuild_after}
    return EamSequencePredictor(small_spec(), STORED, dataset, **options)


def test_drift__rebuilds_the_collection_from_bad_forecasts() -> None:
    predictor = drifting(rebuild_after=2)
    # Always experts 2, 1, 1: forecast 0 right of what its own matrix gets right every time.
    for request in range(4):
        for _ in range(3):
            serve(predictor, token_step(2, 1, 1), [request])
    early = serve(predictor, token_step(2, 1, 1), [98])[0][1]
    assert early.chosen_TK(1).tolist() != [[1]], "not yet"
    for _ in range(REBUILD_STEPS):
        serve(predictor, token_step(2, 1, 1), [98])
    found = serve(predictor, token_step(2, 1, 1), [99])[0]
    assert [found[layer].chosen_TK(1).tolist() for layer in (1, 2)] == [[[1]]] * 2


def test_drift__clusters_the_whole_data_set_again() -> None:
    # Three layers, four experts: sequences that begin with expert 0, and others with expert 1.
    predictor = drifting(9 * np.eye(4)[[[first, 1, 2] for first in (0, 0, 0, 1, 1, 1)]])
    options = predictor.options() | {"idle_steps": 1}
    again = EamSequencePredictor.from_files(small_spec(), predictor.files(), options)
    for served in (predictor, again):
        for request in range(REBUILD_STEPS + 2):
            serve(served, token_step(3, 2, 2), [request])
        assert len(set(served.collection.counts[:, 0].argmax(axis=1).tolist())) == 2
        assert (served.collection.counts[:, 2, 2] > 0).all(), "of the data set, none of STORED"


def test_drift__keeps_the_collection_while_forecasts_are_good() -> None:
    predictor = drifting()
    for request in range(4):
        serve(predictor, token_step(1, 3, 0), [request])
    assert np.array_equal(predictor.collection.counts, STORED)


def test_cold_start__fills_from_the_sequences_that_end() -> None:
    predictor = EamSequencePredictor.empty(small_spec(), capacity=2, idle_steps=1)
    assert serve(predictor, token_step(1, 3, 0), [0])[0] == {}
    serve(predictor, token_step(0, 0, 2), [1])
    assert serve(predictor, token_step(1, 0, 0), [2])[0][1].chosen_TK(1).tolist() == [[3]]
