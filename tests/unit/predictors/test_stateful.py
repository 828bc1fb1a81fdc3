"""What holds for every predictor that is not learned: entries, batches, bounds, forecasts;
and files and options that do not belong together."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from predictors import baselines
from predictors.base import ConsecutiveForecasts, Forecast, Predictor, known_options
from predictors.correlation import CorrelationPredictor
from predictors.eam.request import EamRequestPredictor
from predictors.eam.sequence import EamSequencePredictor
from predictors.errors import MoecastError, PredictorError
from predictors.expert_map import ExpertMapPredictor
from predictors.registry import KINDS, LEARNED, load_from_files
from predictors.spec import ModelSpec
from predictors.stored import WEIGHTS
from tests.builders.predictors import serve, small_spec, token_step

SPEC = small_spec(num_layers=4, num_experts=12, top_k=2, hidden_size=5)
SMALL = small_spec()


def made() -> list[Predictor]:
    random = np.random.default_rng(0)
    matrices = random.poisson(3.0, (6, 4, 12)).astype(np.float32)
    maps = random.dirichlet(np.full(12, 0.5), (6, 4)).astype(np.float16)
    meanings = random.standard_normal((6, 5)).astype(np.float16)
    pairs = random.integers(0, 9, (4, 12, 12))
    routers = random.standard_normal((4, 12, 5), np.float32)
    uses = random.integers(0, 3, (2, 4, 12))
    return [
        EamSequencePredictor(
            SPEC, matrices, capacity=8, insufficient=0.9, idle_steps=1, rebuild_after=2
        ),
        EamRequestPredictor(SPEC, matrices, capacity=8, matches=2, idle_steps=1),
        ExpertMapPredictor(SPEC, maps, meanings, distance=2, capacity=8),
        CorrelationPredictor(SPEC, pairs, pairs.sum(axis=2) + 1, hot=3),
        baselines.SkipPredictor(SPEC, routers, np.ones((4, 12), np.float32), horizon=2),
        baselines.TokenPredictor.from_counts(SPEC, np.array([0, 2]), uses, np.array([4, 5])),
        baselines.PopularityPredictor(SPEC, random.random((4, 12), np.float32)),
        baselines.DependencyPredictor(SPEC),
    ]


def a_step(num_tokens: int, seed: int) -> dict:
    random = np.random.default_rng(seed)
    logits = random.standard_normal((4, num_tokens, 12)).astype(np.float32)
    chosen = np.argsort(-logits, axis=2)[:, :, :2]
    entering = random.standard_normal((num_tokens, 5)).astype(np.float32)
    return {"chosen_LTK": chosen, "logits_LTE": logits, "entering_TD": entering}


@pytest.mark.parametrize("predictor", made(), ids=lambda one: one.kind)
def test_predictor__answers_the_same_after_files_and_back(predictor: Predictor) -> None:
    options = json.loads(json.dumps(predictor.options()))
    loaded = load_from_files(predictor.kind, SPEC, files=predictor.files(), options=options)
    assert loaded.options() == predictor.options()
    for seed in range(3):
        one, other = serve(predictor, **a_step(3, seed)), serve(loaded, **a_step(3, seed))
        for place, found in one.items():
            assert sorted(found) == sorted(other[place])
            for layer, forecast in found.items():
                again = other[place][layer]
                np.testing.assert_allclose(forecast.scores_TE, again.scores_TE, atol=2e-3)
                assert (forecast.priority_E is None) == (again.priority_E is None)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - LEARNED.keys()))
def test_options__are_all_that_the_predictor_was_made_with(kind: str) -> None:
    (predictor,) = (one for one in made() if one.kind == kind)
    assert predictor.options().keys() == set(known_options(type(predictor)))
    assert predictor.options().get("idle_steps", 1) == 1


@pytest.mark.parametrize("place", range(len(made())), ids=lambda i: made()[i].kind)
def test_batch__answers_each_request_as_if_it_were_alone(place: int) -> None:
    together, step = made()[place], a_step(3, 7)
    batch = serve(together, requests=[0, 1, 2], **step)
    for token in range(3):
        own = {name: array[..., token : token + 1, :] for name, array in step.items()}
        for at, found in serve(made()[place], requests=[token], **own).items():
            for layer, forecast in found.items():
                shared_E = batch[at][layer].scores_TE[token]
                np.testing.assert_allclose(shared_E, forecast.scores_TE[0], atol=1e-5)


@pytest.mark.parametrize("predictor", made(), ids=lambda one: one.kind)
def test_scores__are_chances_of_experts_that_there_are(predictor: Predictor) -> None:
    for seed in range(20):
        for found in serve(predictor, requests=[seed // 2] * 2, **a_step(2, seed)).values():
            for forecast in found.values():
                assert forecast.scores_TE.shape == (2, 12)
                assert ((forecast.scores_TE >= 0) & (forecast.scores_TE <= 1)).all()
                assert set(forecast.experts(2)) <= set(range(12))


@pytest.mark.parametrize("predictor", made(), ids=lambda one: one.kind)
def test_state__is_bounded(predictor: Predictor) -> None:
    def held() -> int:
        arrays = [one for one in vars(predictor).values() if isinstance(one, np.ndarray)]
        for name in ("collection", "store"):
            inner = getattr(predictor, name, None)
            arrays += list(vars(inner).values()) if inner is not None else []
        return sum(one.nbytes for one in arrays if isinstance(one, np.ndarray))

    sizes = []
    for request in range(60):
        serve(predictor, requests=[request] * 3, **a_step(3, request))
        sizes.append(held())
    assert max(sizes[30:]) <= max(sizes[:30])
    assert len(predictor.files()) <= 1


@pytest.mark.parametrize("predictor", made()[:-1], ids=lambda one: one.kind)
def test_from_files__refuses_another_models_files(predictor: Predictor) -> None:
    other = ModelSpec(**{**SPEC.as_dict(), "num_experts": 13})
    with pytest.raises(PredictorError, match=r"shape \(.*12.*expected \(.*13"):
        load_from_files(predictor.kind, other, files=predictor.files(), options=predictor.options())


@pytest.mark.parametrize("predictor", made()[:2], ids=lambda one: one.kind)
def test_capacity__must_not_be_below_the_matrices(predictor: Predictor) -> None:
    with pytest.raises(PredictorError, match="capacity=5 and 6 matrices"):
        load_from_files(predictor.kind, SPEC, files=predictor.files(), options={"capacity": 5})


@pytest.mark.parametrize("cls", [EamRequestPredictor, EamSequencePredictor])
def test_frozen__learns_nothing(cls: type[EamRequestPredictor | EamSequencePredictor]) -> None:
    predictor = cls.empty(SMALL, idle_steps=1, learning=False)
    for request in range(5):
        assert not any(serve(predictor, token_step(1, 3, 0), [request]).values())
    assert predictor.collection.size == 0


def test_forecast__names_a_tokens_best_experts_in_order_and_none_without_a_chance() -> None:
    """Ties go to the lower id."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        score_E = rng.integers(0, 4, 12).astype(np.float32) / 4
        best = sorted((e for e in range(12) if score_E[e] > 0), key=lambda e: (-score_E[e], e))
        for top_k in (1, 4, 12):
            assert Forecast(0, score_E[None]).experts(top_k) == best[:top_k]
            assert Forecast(0, score_E[None], wanted=[2, 1]).experts(top_k) == [2, 1]


def test_consecutive_forecasts__are_those_of_each_layer() -> None:
    scores_THE = np.random.default_rng(1).random((1, 3, 12), np.float32) ** 2
    forecasts = ConsecutiveForecasts(4, scores_THE)
    apart = [Forecast(4 + h, scores_THE[:, h].astype(np.float64)) for h in range(3)]
    assert [one.layer for one in forecasts] == [4, 5, 6]
    assert [one.layer for one in forecasts[1:]] == [5, 6]
    ranked = forecasts.ranked_token(5)
    for h, (mine, other) in enumerate(zip(forecasts, apart, strict=True)):
        assert mine.experts(5) == other.experts(5)
        if ranked is not None:
            assert np.array_equal(ranked[0][h], mine.probability_E)
            assert ranked[1][h] == mine.ranked(5)
    assert ConsecutiveForecasts(0, np.concatenate([scores_THE, scores_THE])).ranked_token(5) is None


WRONG_OPTIONS = [
    ("skip", {"horizon": [1]}, "skip: horizon=[1]: must be a valid integer"),
    ("skip", {"horizon": True}, "skip: horizon=True: must be a number"),
    ("skip", {"horizon": 2**64}, "skip: horizon=18446744073709551616: must fit in 64 bits"),
    ("skip", {"horizon": 0.5}, "skip: horizon=0.5: must be a valid integer"),
    ("correlation", {"least": float("nan")}, "least=nan: must be a finite number"),
    ("eam-sequence", {"rebuild_after": 0}, "rebuild_after=0: at least 1"),
    ("eam-sequence", {"seed": -1}, "no eam-sequence predictor can be made of these files and"),
    ("eam-sequence", {"capacity": 2**40}, "Unable to allocate"),
    ("residual", {"decays": [0.5]}, "no residual predictor can be made"),
    ("correlation", {"lerning": True}, "unknown option 'lerning'. Did you mean 'learning'"),
    ("skip", {"horizon": 3}, "skip with horizon 3: the model has 3 layers"),
    ("popularity", {"ahead": 0}, "ahead=0"),
    ("correlation", {"hot": 5}, "hot=5: the model has 4"),
    ("correlation", {"prior_tokens": 0}, "=0"),
    ("correlation", {"least": 0.0}, "least=0.0"),
    ("correlation", {"least": 0.5, "hot": 1}, "hot=1: one"),
    ("eam-request", {"matches": 0}, "matches=0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG_OPTIONS)
def test_load__names_the_option(kind: str, options: dict, message: str) -> None:
    files = {} if kind == "residual" else KINDS[kind].empty(SMALL).files()
    with pytest.raises(MoecastError) as error:
        load_from_files(kind, SMALL, files=files, options=options)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_load__refuses_numbers_that_are_not_finite(value: float) -> None:
    files = KINDS["popularity"].empty(SMALL).files()
    arrays = {name: np.full_like(array, value) for name, array in load(files[WEIGHTS]).items()}
    with pytest.raises(MoecastError, match="shares of the popularity predictor has infinities"):
        load_from_files("popularity", SMALL, files={WEIGHTS: save(arrays)}, options={})


def test_popularity__further_ahead_than_there_are_layers_forecasts_all_at_once() -> None:
    files = KINDS["popularity"].empty(SMALL).files()
    predictor = load_from_files("popularity", SMALL, files=files, options={"ahead": 2**31})
    answers = serve(predictor, np.zeros((SMALL.num_layers, 1, 1), np.int64))
    assert [*answers[-1]] == [*range(SMALL.num_layers)]
    assert not any(answers[layer] for layer in range(SMALL.num_layers))
