"""Kinds that are counted or collected from a trace, against plain counts of the same trace."""

from collections import defaultdict

import numpy as np
import pytest

from collect.traces import Trace, TraceSignal
from collect.traces.layout import ROUTING_SIGNALS
from predictors.config import PredictorConfig
from predictors.errors import PredictorError
from predictors.registry import KINDS
from runtime.config import ModelConfig
from tests.builders.traces import make_trace
from train import nonlearned
from train.accuracy import accuracy_table, score_layers
from train.kinds import collect_signals, leave_out_kinds, list_compared_kinds, options_by_kind
from train.nonlearned import RouterWeights


def plain_matrices(trace: Trace, phases: set[int]) -> dict[int, np.ndarray]:
    """The EAM of each training request, row by row."""
    found: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((4, 8)))
    for row in trace.rows("train"):
        for layer in range(4):
            chosen = trace.column(TraceSignal.EXPERTS, layer)[row]
            found[trace.requests[row]][layer, chosen] += trace.phases[row] in phases
    return found


@pytest.mark.parametrize("phases", [{0}, {1}, {0, 1}])
def test_request_matrices__count_each_requests_tokens(trace: Trace, phases: set[int]) -> None:
    expected = list(plain_matrices(trace, phases).values())
    assert np.array_equal(nonlearned.request_matrices(trace, *phases), expected)


def test_eam_sequence__stores_every_request_where_there_is_room(trace: Trace) -> None:
    fitted = nonlearned.fit_eam_sequence(trace, capacity=64)
    assert np.array_equal(fitted.collection.counts, nonlearned.request_matrices(trace, 0, 1))
    assert 0 < fitted.insufficient < 1
    assert nonlearned.fit_eam_sequence(trace, capacity=5).collection.size == 5


def test_eam_request__stores_prompt_and_answer_of_the_last_requests(trace: Trace) -> None:
    prompts, answers = nonlearned.request_matrices(trace, 0), nonlearned.request_matrices(trace, 1)
    fitted = nonlearned.fit_eam_request(trace, capacity=2 * len(prompts))
    pairs = np.stack([prompts, answers], axis=1).reshape(-1, *prompts.shape[1:])
    assert np.array_equal(fitted.collection.counts, pairs)
    full = nonlearned.fit_eam_request(trace, capacity=3)
    # The one that came last replaced some other, and nothing came after it.
    assert any(np.array_equal(one, answers[-1]) for one in full.collection.counts)


def test_correlation__counts_pairs_of_the_training_tokens(trace: Trace) -> None:
    rows = trace.rows("train")
    expected = np.zeros((8, 8))
    one, two = (trace.column(TraceSignal.EXPERTS, layer)[rows] for layer in (1, 2))
    np.add.at(expected, (one[:, :, None], two[:, None, :]), 1)
    fitted = nonlearned.fit_correlation(trace, prior_tokens=10**9)
    assert np.array_equal(fitted._pairs_LFE[2], expected)
    assert np.array_equal(fitted._uses_LE[1], np.bincount(one.ravel(), minlength=8))


def test_expert_map__stores_training_tokens_as_they_came(trace: Trace) -> None:
    rows = trace.rows("train")
    fitted = nonlearned.fit_expert_map(trace, distance=2, capacity=1_000)
    odds = np.exp(trace.column(TraceSignal.GATE_LOGITS, 3)[rows].astype(np.float32))
    assert fitted.store.size == len(rows)
    maps_NE = fitted.store.maps_LEC[3, :, : len(rows)].T
    np.testing.assert_allclose(maps_NE, odds / odds.sum(axis=1, keepdims=True), rtol=1e-4)
    assert nonlearned.fit_expert_map(trace, distance=2, capacity=17).store.size == 17


def test_score__of_a_learning_predictor_changes_no_later_score(trace: Trace) -> None:
    made = nonlearned.fit_expert_map(trace, distance=2, capacity=50)
    first = accuracy_table(score_layers(made.renewed(), trace))
    assert accuracy_table(score_layers(made.renewed(), trace))["accuracy"] == first["accuracy"]


def test_routing_log__is_enough_for_kinds_without_hidden_states(tmp_path) -> None:
    trace = make_trace(tmp_path / "t", signals=ROUTING_SIGNALS)
    kinds = KINDS.keys() - leave_out_kinds(PredictorConfig(kind="popularity"), KINDS, trace)
    eams = {"eam-sequence", "eam-request"}
    assert set(kinds) == {"token", "popularity", "dependency", "correlation", *eams}
    routers = RouterWeights(ModelConfig(), trace.spec)
    counted = nonlearned.count_baselines(trace, routers, kinds, options={}, seed=0)
    for name, made in counted.items():
        assert accuracy_table(score_layers(made, trace))["mean_accuracy"] is not None, name


def test_wanted_kinds__begin_with_the_selected_one() -> None:
    assert list_compared_kinds("correlation") == ("correlation", "skip", "token", "popularity")
    learned = ("residual", "mlp", "stride", "skip", "token", "popularity")
    assert list_compared_kinds("residual") == learned
    assert list_compared_kinds("all") == tuple(KINDS)
    with pytest.raises(PredictorError, match="'corelation'.*'correlation'"):
        list_compared_kinds("corelation")


def test_signals_of__are_what_the_kinds_are_shown() -> None:
    routing = (TraceSignal.EXPERTS, TraceSignal.WEIGHTS)
    assert collect_signals(["eam-sequence", "token"]) == routing
    assert collect_signals(["skip"]) == (TraceSignal.GATE_INPUT, *routing)
    states = {TraceSignal.LAYER_INPUT, TraceSignal.GATE_LOGITS}
    assert set(collect_signals(["expert-map"])) == {*states, *routing}


def test_options_of__are_those_of_the_kind_or_an_error() -> None:
    config = PredictorConfig(kind="eam-request", options={"capacity": 9})
    assert options_by_kind(config) == {"eam-request": {"capacity": 9}}
    with pytest.raises(PredictorError, match="eam-request: unknown option 'size'. Choices: capac"):
        options_by_kind(PredictorConfig(kind="eam-request", options={"size": 9}))
    unused = PredictorConfig(kind="residual", options={"prompt_window": 9, "horizons": 1})
    with pytest.raises(PredictorError, match="residual does not use prompt_window, horizons: leav"):
        options_by_kind(unused)
    with pytest.raises(PredictorError, match="belong to one kind"):
        options_by_kind(PredictorConfig(kind="all", options={"capacity": 9}))


def test_fits__leave_out_choices_of_none(tmp_path) -> None:
    trace = make_trace(tmp_path / "t", num_units=1)
    for layer in range(trace.spec.num_layers):
        column = trace.column(TraceSignal.EXPERTS, layer)
        chosen_NK = np.array(column)
        chosen_NK[::3, 1] = trace.spec.num_experts
        column.chunks = (chosen_NK,)
    rows = trace.rows("train")
    popularity, token = (nonlearned.FITS[kind](trace) for kind in ("popularity", "token"))
    tokens_N = trace.tokens[rows]
    token_T = tokens_N[:1].astype(np.int64)
    forecasts = token.begin_step(token_T, np.zeros(1, np.int64))
    unseen = token.begin_step(np.array([10**6]), np.zeros(1, np.int64))
    for layer, forecast in enumerate(forecasts):
        chosen_NK = trace.column(TraceSignal.EXPERTS, layer)[rows]
        counts_E = np.bincount(chosen_NK.ravel())[: trace.spec.num_experts]
        np.testing.assert_allclose(popularity._shares_LE[layer], counts_E / len(rows), rtol=1e-6)
        np.testing.assert_allclose(unseen[layer].scores_TE[0], counts_E / len(rows), rtol=1e-3)
        alike_NK = chosen_NK[tokens_N == token_T]
        counts_E = np.bincount(alike_NK.ravel(), minlength=9)[: trace.spec.num_experts]
        assert counts_E[forecast.scores_TE[0].argmax()] == counts_E.max()
    assert len(forecasts) == trace.spec.num_layers
