"""skip, token and popularity against cases worked out by hand; saving and refusing."""

import numpy as np
import pytest

from predictors.baselines import PopularityPredictor, SkipPredictor, TokenPredictor
from predictors.errors import PredictorError
from predictors.registry import load_from_files
from predictors.stored import WEIGHTS
from tests.builders.entries import tiny_spec
from tests.builders.predictors import serve, small_spec

SPEC = tiny_spec(num_layers=3, num_experts=4, hidden_size=2)
NO_REQUESTS = np.zeros(2, np.int64)


def routers() -> np.ndarray:
    """Layer 1 likes the first feature in expert 3, layer 2 the second feature in expert 0."""
    matrices = np.zeros((3, 4, 2), np.float32)
    matrices[1, 3, 0] = 2.0
    matrices[2, 0, 1] = 2.0
    return matrices


def test_skip__applies_the_next_layers_router_to_this_gate_input() -> None:
    (forecast,) = SkipPredictor(SPEC, routers()).gate_input(0, np.array([[1.0, 0.0]], np.float32))
    assert forecast.layer == 1
    # softmax of (0, 0, 0, 2), twice, at most 1.
    others = 2 / (3 + np.e**2)
    np.testing.assert_allclose(forecast.scores_TE, [[others, others, others, 1.0]], rtol=1e-6)


def test_skip__at_horizon_two_applies_the_router_after_the_next() -> None:
    skip = SkipPredictor(SPEC, routers(), horizon=2)
    (forecast,) = skip.gate_input(0, np.array([[0.0, 1.0]], np.float32))
    assert (forecast.layer, forecast.chosen_TK(1).tolist()) == (2, [[0]])
    assert not skip.gate_input(1, np.zeros((1, 2), np.float32))


def test_skip__adds_the_routers_bias() -> None:
    biases = np.zeros((3, 4), np.float32)
    biases[1, 2] = 5.0
    skip = SkipPredictor(SPEC, routers(), biases)
    (forecast,) = skip.gate_input(0, np.array([[1.0, 0.0]], np.float32))
    assert forecast.chosen_TK(2).tolist() == [[2, 3]]


def token_table() -> TokenPredictor:
    """Id 5 came twice, id 9 once; layer 0 used experts {0,1}, {0,2} and {3,2}."""
    counts = np.zeros((2, 3, 4), np.int64)
    counts[0, 0] = [2, 1, 1, 0]
    counts[1, 0] = [0, 0, 1, 1]
    return TokenPredictor.from_counts(SPEC, np.array([5, 9]), counts, np.array([2, 1]))


def test_token__mixes_an_ids_uses_with_the_overall_shares_for_every_layer() -> None:
    forecasts = token_table().begin_step(np.array([5, 9]), NO_REQUESTS)
    assert [forecast.layer for forecast in forecasts] == [0, 1, 2]
    everyone = np.array([2, 1, 2, 1]) / 3
    expected = [(np.array([2, 1, 1, 0]) + everyone) / 3, (np.array([0, 0, 1, 1]) + everyone) / 2]
    np.testing.assert_allclose(forecasts[0].scores_TE, expected, rtol=1e-3)


@pytest.mark.parametrize("unseen", [0, 7, 1_000])
def test_token__gives_an_unseen_id_the_overall_shares(unseen: int) -> None:
    first = token_table().begin_step(np.array([unseen]), NO_REQUESTS[:1])[0]
    np.testing.assert_allclose(first.scores_TE, [np.array([2, 1, 2, 1]) / 3], rtol=1e-3)


def test_token__has_no_forecast_for_unknown_ids() -> None:
    assert not token_table().begin_step(np.array([-1, -1]), NO_REQUESTS)
    first = token_table().begin_step(np.array([5, -1]), NO_REQUESTS)[0]
    assert not first.scores_TE[1].any()
    alone = token_table().begin_step(np.array([5]), NO_REQUESTS[:1])[0]
    np.testing.assert_array_equal(first.scores_TE[0], alone.scores_TE[0])


def test_popularity__gives_every_token_the_shares_of_all_or_the_next_layer() -> None:
    shares = np.arange(12, dtype=np.float32).reshape(3, 4) / 12
    forecasts = PopularityPredictor(SPEC, shares).begin_step(np.array([1, 2]), NO_REQUESTS)
    np.testing.assert_array_equal(forecasts[2].scores_TE, [shares[2], shares[2]])
    popularity = PopularityPredictor(SPEC, shares, ahead=1)
    assert [one.layer for one in popularity.begin_step(np.array([1, 2]), NO_REQUESTS)] == [0]
    (forecast,) = popularity.routed(1, np.zeros((2, 2), np.int64), None)
    assert forecast.layer == 2
    np.testing.assert_array_equal(forecast.scores_TE, [shares[2], shares[2]])
    assert not popularity.routed(2, np.zeros((2, 2), np.int64), None)


@pytest.mark.parametrize("kind", ["skip", "token", "popularity"])
def test_from_files__refuses_missing_and_torn_tensors(kind: str) -> None:
    for files, message in (({}, WEIGHTS), ({WEIGHTS: b"\x08\0\0\0"}, "damaged")):
        with pytest.raises(PredictorError, match=message):
            load_from_files(kind, SPEC, files=files, options={"horizon": 1})


def test_registry__names_the_choices_and_the_closest() -> None:
    with pytest.raises(PredictorError, match=r"'strid'.*'stride'.*mlp, popularity"):
        load_from_files("strid", SPEC, files={}, options={})


def test_popularity__goes_on_counting() -> None:
    shares = np.full((2, 4), 0.25, np.float32)
    predictor = PopularityPredictor(small_spec(num_layers=2), shares, ahead=1, learning=True)
    serve(predictor, np.array([[[2], [2], [2]], [[0], [0], [1]]]))
    found = serve(predictor, np.array([[[0]], [[0]]]))
    # The trace's shares count as one token, and three were routed.
    np.testing.assert_allclose(found[-1][0].scores_TE, [np.array([0.25, 0.25, 3.25, 0.25]) / 4])
    np.testing.assert_allclose(found[0][1].scores_TE, [np.array([2.25, 1.25, 0.25, 0.25]) / 4])
    assert not predictor.stateless
    # The fifth and sixth token, without and with a restart after the fourth.
    for served in (predictor.as_learned().renewed(), predictor):
        serve(served, np.array([[[0]], [[0]]]))
        found = serve(served, np.array([[[0]], [[0]]]))
        np.testing.assert_allclose(found[-1][0].scores_TE, [np.array([2.25, 0.25, 3.25, 0.25]) / 6])
    np.testing.assert_allclose(
        serve(predictor.renewed(), np.array([[[0]], [[0]]]))[-1][0].scores_TE, shares[:1]
    )
