"""What an entry's card promises of a layer that is forecast as early as it is while serving."""

from typing import Any

import pytest

from predictors.metrics import ENTRY, CardAccuracy, name_distance

TABLE: dict[str, Any] = {
    "accuracy": [0.8, 0.9],
    "accuracy_decode": [0.7, 0.85],
    "by_horizon": {
        "0": {"accuracy": [None, 0.9]},
        "1": {"accuracy": [None, 0.6]},
        ENTRY: {"accuracy": [0.8, None]},
    },
}


def parse(**changes: Any) -> Any:
    return CardAccuracy.parse("tiny/residual", {**TABLE, **changes}, num_layers=2)


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
def test_parse__a_table_that_says_nothing_of_the_layers_is_no_card(wrong: Any) -> None:
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
