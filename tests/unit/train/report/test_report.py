"""The report of a training run: whole, true to the results, and asking nothing of the network."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from collect.traces import Trace
from runtime.config import SystemConfig
from tests.builders.simulated import toy_accelerator
from tests.builders.traces import make_trace
from train.config import ScoringConfig, TrainConfig
from train.eviction_eval import compare_policies
from train.nonlearned import fit_correlation, fit_popularity, fit_token
from train.report.build import draw_report
from train.report.routing import cumulative_LE, share_of_choices
from train.residual import ResidualStack
from train.scoring import EvalContext, score_predictor

HARDWARE = toy_accelerator(kernel_seconds=1e-6, predictor_seconds=1e-5)
FIGURES = {
    *("accuracy-by-layer", "good-pred-by-horizon", "calibration"),
    *("share-of-most-chosen-experts", "hit-rate-by-eviction-policy"),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return make_trace(tmp_path_factory.mktemp("trace") / "t", prompt_tokens=14)


@pytest.fixture(scope="module")
def run(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `moecast train` leaves it, with predictors of three sorts."""
    context = EvalContext(
        trace=trace, shifted=trace, hardware=(HARDWARE,),
        config=ScoringConfig(system=SystemConfig(), budget="50%", replay_tokens=5),
    )  # fmt: skip
    routers = np.random.default_rng(0).standard_normal((4, 8, 16), dtype=np.float32)
    family = ResidualStack(trace.spec, routers, None, horizons=2, width=4)
    fits = {"token": fit_token, "popularity": fit_popularity, "correlation": fit_correlation}
    made = {**family.export(trace.spec), **{name: fit(trace) for name, fit in fits.items()}}
    results = {
        "predictors": {name: score_predictor(one, context) for name, one in made.items()},
        "trace": {
            "path": str(trace.path), "digest": trace.digest, "tokens": trace.num_tokens,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "setting": context.setting,
        "keeping": {"hit_rates": compare_policies(trace, [], num_tokens=5)},
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("run") / "r"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    draw_report(results, trace, TrainConfig(run_dir=folder, replay_tokens=5))
    return folder


def results_of(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


def table(run: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "report" / f"{name}.csv").read_text().splitlines()))


def number(text: str) -> float | None:
    return float(text) if text else None


def test_report__every_figure_has_its_png_and_csv(run: Path) -> None:
    folder = run / "report"
    html = (folder / "report.html").read_text()
    drawn = set(re.findall(r'<section id="([^"]+)" class="drawn">\n<h2>[^\n]*\n<figure>', html))
    assert drawn == FIGURES
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert table(run, name)
    assert not re.search(r"https?:|//cdn|<script|@import", html)


def test_report__accuracies_are_those_of_the_results(run: Path) -> None:
    found = table(run, "accuracy-by-layer")
    summary = {row["predictor"]: row for row in table(run, "summary")}
    for name, one in results_of(run)["predictors"].items():
        assert [number(row[name]) for row in found] == one["accuracy"]
        means = [number(summary[name][key]) for key in ("mean_accuracy", "GoodPred", "shifted")]
        shifted = one["shifted"]["mean_accuracy"]
        assert means == [one["mean_accuracy"], one["mean_good_pred"], shifted]


def test_report__each_distance_has_its_own_good_pred(run: Path) -> None:
    known = results_of(run)["predictors"]["residual"]["by_horizon"]
    found = {row["horizon"]: row for row in table(run, "good-pred-by-horizon")}
    assert set(found) == {"1", "2"}
    for horizon, row in found.items():
        assert number(row["accuracy"]) == known[horizon]["mean_accuracy"]
        product = known[horizon]["mean_replay_accuracy"] * known[horizon]["mean_fetch_rate"]
        assert number(row["good_pred"]) == pytest.approx(product)


def test_report__calibration_is_of_every_pair(run: Path, trace: Trace) -> None:
    rows = [row for row in table(run, "calibration") if row["predictor"] == "popularity"]
    pairs = len(trace.rows("held_out")) * trace.spec.num_layers * trace.spec.num_experts
    assert sum(int(row["pairs"]) for row in rows) == pairs
    gaps = [
        int(row["pairs"]) * abs(float(row["mean_score"]) - float(row["share_chosen"]))
        for row in rows
        if row["pairs"] != "0"
    ]
    assert float(rows[0]["error"]) == pytest.approx(sum(gaps) / pairs)


def test_routing__shares_of_hand_made_choices(tmp_path: Path) -> None:
    counts = np.array([[4, 4, 4, 4], [2, 10, 0, 4]])
    chosen_LNK = np.stack([np.repeat(np.arange(4), own)[:, None] for own in counts])
    expected = [[0.25, 0.5, 0.75, 1.0], [10 / 16, 14 / 16, 1.0, 1.0]]
    assert cumulative_LE(chosen_LNK, 4) == pytest.approx(np.array(expected))
    # The id 4 is no choice.
    with_none_LNK = np.concatenate([chosen_LNK, np.full_like(chosen_LNK, 4)], axis=1)
    assert cumulative_LE(with_none_LNK, 4) == pytest.approx(np.array(expected))
    assert share_of_choices(make_trace(tmp_path / "t", prompt_tokens=2, new_tokens=2)) is None
