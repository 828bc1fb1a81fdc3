"""Every figure against a case worked out by hand, and what a card promises of a layer."""

import numpy as np
import pytest

from predictors import metrics
from predictors.metrics import ENTRY, LayerScore, MeanAccumulator, Phase, name_distance

SCORES = np.array([[0.9, 0.8, 0.1, 0.0], [0.1, 0.2, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]], np.float32)
CHOSEN = np.array([[0, 1], [2, 0], [3, 2]])
PHASES = np.array([Phase.PREFILL, Phase.DECODE, Phase.DECODE])


def scored(weights: np.ndarray | None = None) -> LayerScore:
    layer = LayerScore(top_k=2, extras=(1,))
    layer.add(SCORES, CHOSEN, phases_T=PHASES, weights_TK=weights)
    return layer


def test_accuracy__is_counted_by_phase_and_recall_further_down_the_ranking() -> None:
    # Predicted {0,1}, {2,3}, {0,1}; chosen {0,1}, {2,0}, {3,2}: 2, 1 and 0 of 2.
    layer = scored()
    assert (layer.accuracy[Phase.PREFILL].value, layer.accuracy[Phase.DECODE].value) == (1.0, 1 / 4)
    assert layer.overall.value == 3 / 6
    # Best three: {0,1,2}, {2,3,1}, {0,1,2}: 2, 1 and 1 of 2.
    assert layer.recall[1].value == 4 / 6


def test_gate_mass__weighs_each_chosen_expert_by_its_gate() -> None:
    weights = np.array([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]], np.float32)
    # Found: all of the first, expert 2 (0.9) of the second, none of the third; mass 3.
    assert scored(weights).gate_mass.value == pytest.approx((1.0 + 0.9) / 3)
    assert scored().gate_mass.value is None


def test_scores__leave_out_the_id_of_no_choice() -> None:
    """The id after the last expert: LongCat's zero experts."""
    layer, chosen = LayerScore(top_k=2, extras=(1,)), np.array([[0, 4], [4, 4], [3, 2]])
    weights = np.array([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]], np.float32)
    layer.add(SCORES, chosen, phases_T=PHASES, weights_TK=weights)
    # Predicted {0,1}, {2,3}, {0,1}: of three experts the first one's; expert 2 is the third's next.
    assert layer.accuracy[Phase.PREFILL] == MeanAccumulator(1, 1)
    assert layer.accuracy[Phase.DECODE] == MeanAccumulator(0, 2)
    assert layer.recall[1] == MeanAccumulator(2, 3)
    assert layer.gate_mass.value == pytest.approx(0.7 / 1.7)
    assert layer.calibration.sums_3B[1:].sum(axis=1).tolist() == [3, 12]


def test_calibration__adds_bins_of_two_parts_and_a_score_of_one_to_the_last() -> None:
    one, other = metrics.CalibrationBins(), metrics.CalibrationBins()
    one.add(np.array([[0.95, 0.05]], np.float32), np.array([[0]]))
    other.add(np.array([[1.0, 0.0]], np.float32), np.array([[1]]))
    found = (one + other).as_dict()
    # Bins of 1/15.
    assert (found["pairs"], found["score"][0]) == ([2, *[0] * 13, 2], pytest.approx(0.025))
    assert (found["score"][-1], found["chosen"]) == (pytest.approx(0.975), [0.5, *[None] * 13, 0.5])
    # The gaps of score and share.
    assert found["error"] == pytest.approx((abs(0.05 - 1) + abs(1.95 - 1)) / 4)


def test_share__of_nothing_is_none() -> None:
    assert MeanAccumulator().value is None
    assert metrics.sum_means([MeanAccumulator(), MeanAccumulator()]).value is None
    assert metrics.sum_means([MeanAccumulator(1, 2), MeanAccumulator(3, 8)]).value == 4 / 10


BY_DISTANCE = {"0": [None, 0.9], "1": [None, 0.6], ENTRY: [0.8, None]}
TABLE = {
    "accuracy": [0.8, 0.9],
    "accuracy_decode": [0.7, 0.85],
    "by_horizon": {name: {"accuracy": values} for name, values in BY_DISTANCE.items()},
}


def parse(**changes):
    return metrics.CardAccuracy.parse("tiny/residual", {**TABLE, **changes}, num_layers=2)


def test_expect__follows_the_distance_of_the_forecast() -> None:
    """A system that leaves out the last forecasts must not seem to have drifted."""
    card = parse()
    assert card.expect(1, "0") == 0.85
    assert card.expect(1, "1") == pytest.approx(0.85 - (0.9 - 0.6))
    assert card.expect(0, ENTRY) == 0.7
    assert card.expect(0, "1") is None  # was never measured
    assert card.expect(1, "7") is None


def test_expect__of_one_distance_is_the_cards_own() -> None:
    card = parse(accuracy_decode=[None, 0.85], by_horizon=None)
    assert (card.expect(0, "1"), card.expect(1, "1")) == (None, 0.85)


@pytest.mark.parametrize("wrong", ["high", [0.5], [0.5, float("nan")], [0.5, 1.5], [0.5, "0.5"]])
def test_parse__a_table_that_says_nothing_of_the_layers_is_no_card(wrong) -> None:
    """Entries come from strangers: their tables may hold anything."""
    assert parse(accuracy_decode=wrong) is None
    assert parse(accuracy=None) is None


def test_parse__leaves_out_distances_that_are_no_table() -> None:
    card = parse(by_horizon={"0": {"accuracy": [None, 0.9]}, "1": 3, "2": {"accuracy": [7, 7]}})
    assert set(card.by_distance) == {"0"}


def test_distance__from_the_beginning_of_a_step_has_its_own_name() -> None:
    assert name_distance("begin_step", -1, 3) == ENTRY
    assert name_distance("layer_input", 0, 1) == ENTRY
    assert name_distance("layer_input", 2, 2) == "0"
    assert name_distance("gate_input", 0, 2) == "2"
