"""Cold start, drift and latency, on traces whose routing is known."""

from pathlib import Path

import numpy as np
import pytest

from predictors.baselines import PopularityPredictor
from predictors.correlation import CorrelationPredictor
from runtime.config import SystemConfig
from tests.builders.traces import make_trace
from tests.unit.train.test_pipeline import HARDWARE
from train.accuracy import HorizonPredictor, accuracy_table, score_layers
from train.drift import MARKS, accuracy_curve, measure_drift
from train.nonlearned import fit_correlation, fit_eam_request, fit_eam_sequence, fit_expert_map
from train.scoring import (
    BATCHES,
    EvalContext,
    decode_steps,
    measure_latency,
    replay_context,
    score_predictor,
)


def test_curve__is_the_accuracy_between_the_marks(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    shares = np.random.default_rng(0).random((4, 8)).astype(np.float32)
    predictor = PopularityPredictor(trace.spec, shares)
    points = accuracy_curve(predictor, trace.steps())
    assert [one["requests"] for one in points] == [*(mark for mark in MARKS if mark <= 20), 40]
    # Every request has as many tokens, so that the mean over requests is the mean over tokens.
    sizes = np.diff([0, *(one["requests"] for one in points)])
    mean = np.average([one["accuracy"] for one in points], weights=sizes)
    assert mean == pytest.approx(
        accuracy_table(score_layers(predictor, trace, None))["mean_accuracy"]
    )


@pytest.mark.parametrize(
    "fit", [fit_eam_sequence, fit_eam_request, fit_expert_map, fit_correlation]
)
def test_drift__measures_every_kind_that_learns(tmp_path: Path, fit) -> None:
    trace = make_trace(tmp_path / "t", num_units=1)
    shifted = make_trace(tmp_path / "s", num_units=1, seed=1)
    found = measure_drift(fit(trace), trace, shifted)
    assert found["cold_start"][-1]["requests"] == len(set(trace.requests[trace.rows("train")]))
    assert [one["requests"] for one in found["shifted"]["learning"]] == [1, 2, 5, 10, 20]
    assert measure_drift(fit(trace), trace, None)["shifted"] is None


def test_drift__shows_what_learning_is_worth(tmp_path: Path) -> None:
    """The shifted trace comes from other routers: counts of the first are worth nothing there."""
    trace = make_trace(tmp_path / "t", num_units=2)
    shifted = make_trace(tmp_path / "s", num_units=4, seed=1)
    found = measure_drift(fit_correlation(trace, prior_tokens=50), trace, shifted)["shifted"]
    last = {name: points[-1]["accuracy"] for name, points in found.items()}
    assert last["learning"] > last["frozen"] + 0.05


def test_decode_steps__are_one_generated_token_of_each_request(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    (first, second) = decode_steps(trace, 3, 2, "train")
    assert len(set(trace.requests[first.rows])) == 3
    assert set(trace.phases[first.rows]) == {1}
    assert np.array_equal(second.rows, first.rows + 1)
    # More than there are requests: other tokens of the same ones.
    (large,) = decode_steps(trace, 64, 1, "train")
    assert len(set(large.rows.tolist())) == 64


def test_latency__is_measured_per_batch_size_on_a_copy(
    tmp_path: Path,
) -> None:
    trace = make_trace(tmp_path / "t")
    predictor: CorrelationPredictor = fit_correlation(trace)
    before = predictor._pairs_LFE.copy()
    found = measure_latency(predictor, trace, num_steps=8)
    assert set(found) == {str(batch) for batch in BATCHES}
    assert all(0 < one["layer_p50"] <= one["layer_p99"] for one in found.values())
    assert np.array_equal(predictor._pairs_LFE, before)


def test_latency__is_null_where_nothing_was_generated(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t", new_tokens=0)
    assert measure_latency(fit_correlation(trace), trace)["1"] is None


def test_scored__has_every_column_of_the_table(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t")
    context = EvalContext(
        trace=trace,
        shifted=make_trace(tmp_path / "s", num_units=1, seed=1),
        system=SystemConfig(),
        hardware=(HARDWARE,),
        budget="50%",
        replay_tokens=5,
    )
    predictor = fit_correlation(trace)
    table = score_predictor(predictor, context)
    assert table["worst_layer_accuracy"] == min(table["accuracy"])
    assert table["mean_good_pred"] == pytest.approx(
        table["mean_replay_accuracy"] * table["mean_fetch_rate"]
    )
    decode = table["replay"]["decode"]
    assert table["mean_replay_accuracy"] == decode["needed_predicted"] / decode["requests"]
    assert 0 <= table["mean_resident"] <= table["mean_fetch_rate"]
    # A forecast one layer ahead covers all layers but the first, which counts 0.
    near = replay_context(HorizonPredictor(fit_correlation(trace), 1), context, HARDWARE)
    assert near["covered_layers"] == 1 - 1 / trace.spec.num_layers
    assert near["good_pred"][0] is None
    rate = near["mean_fetch_rate"]
    assert near["mean_good_pred"] == pytest.approx(near["mean_replay_accuracy"] * rate)
    assert near["mean_good_pred_covered"] > near["mean_good_pred"]
    assert table["hardware"]["test"]["mean_fetch_rate"] == table["mean_fetch_rate"]
    assert table["shifted"]["tokens"] == 200
    assert table["bytes"] == len(predictor.files()["weights.safetensors"])
