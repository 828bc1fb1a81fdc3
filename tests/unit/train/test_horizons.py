"""Accuracy by distance, and networks of eight bits."""

import numpy as np
import pytest
import torch

from collect.traces import Trace
from predictors.base import Forecast, Predictor, Signal
from tests.builders.traces import make_spec
from train.accuracy import accuracy_table, blocks, measure_horizons, score_layers
from train.evaluate.forecasts import record_forecasts
from train.export import quantise
from train.residual import ResidualStack


class TwoAhead(Predictor):
    """Right about the next layer, and says the same of the one after it."""

    kind = "two-ahead"
    signals = frozenset({Signal.GATE_INPUT})
    stateless = True

    def __init__(self, trace: Trace):
        super().__init__(trace.spec)
        rows = trace.rows("held_out")
        self.chosen = [trace.column("experts", layer)[rows] for layer in range(4)]

    def gate_input(self, layer, hidden_TD):
        if layer + 1 == self.spec.num_layers:
            return ()
        scores = np.zeros((len(hidden_TD), self.spec.num_experts), np.float32)
        np.put_along_axis(scores, self.chosen[layer + 1].astype(np.int64), 1.0, axis=1)
        targets = range(layer + 1, min(layer + 3, self.spec.num_layers))
        return [Forecast(target, scores) for target in targets]


def test_by_horizon__tells_distances_apart(trace: Trace) -> None:
    predictor = TwoAhead(trace)
    table = measure_horizons(predictor, trace)
    assert table["1"]["accuracy"] == [None, 1.0, 1.0, 1.0]
    assert table["1"]["worst_layer_accuracy"] == 1.0
    pairs = (zip(*predictor.chosen[n : n + 2], strict=True) for n in (1, 2))
    expected = [np.mean([len({*a} & {*b}) / 2 for a, b in pair]) for pair in pairs]
    assert table["2"]["accuracy"] == [None, None, *map(pytest.approx, expected)]
    assert table["2"]["mean_accuracy"] == pytest.approx(np.mean(expected))


def test_score__of_what_is_always_right_is_one_and_of_no_forecast_none(trace: Trace) -> None:
    table = accuracy_table(score_layers(TwoAhead(trace), trace))
    assert table["accuracy"][:2] == [None, 1.0]
    assert (table["gate_mass_recall"][1], table["calibration_error"][1]) == (pytest.approx(1), 0)
    assert table["tokens"] == len(trace.rows("held_out"))


def test_only_ahead__passes_on_one_distance(trace: Trace) -> None:
    (step,) = blocks(trace, "held_out")
    (alone,) = record_forecasts(TwoAhead(trace), [step]).at_distance("2").steps
    heard = {layer: [one.layer for one in forecasts] for (_, layer), forecasts in alone.items()}
    assert heard == {0: [2], 1: [3], 2: []}


def test_quantised__is_far_smaller_and_ranks_nearly_the_same() -> None:
    spec = make_spec(hidden_size=64)
    torch.manual_seed(0)
    routers = np.random.default_rng(0).standard_normal((4, 8, 64), dtype=np.float32)
    family = ResidualStack(spec, routers, None, horizons=3, width=256)
    whole = family.export(spec)["residual"]
    small = quantise(family.export(spec)["residual"])
    assert sum(map(len, small.files().values())) < 0.4 * sum(map(len, whole.files().values()))
    ids = np.arange(200)
    hidden = np.random.default_rng(1).standard_normal((200, 64), dtype=np.float32)
    found = []
    for one in (whole, small):
        one.begin_step(ids, ids)
        one.layer_input(0, hidden)
        one.gate_input(1, hidden)
        logits = hidden @ routers[1].T
        found.append(one.routed(1, np.argsort(-logits, axis=1)[:, :2], logits)[0].scores_TE)
    assert not np.array_equal(*found)
    chosen = [np.argsort(-scores, axis=1)[:, :2] for scores in found]
    assert (chosen[0][:, :, None] == chosen[1][:, None, :]).any(axis=2).mean() > 0.9
