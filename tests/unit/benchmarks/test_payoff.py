"""The benchmark of the promise that forecasting never costs much."""

import json
from pathlib import Path

import pytest

from benchmarks import payoff
from benchmarks.config import PayoffConfig
from predictors.errors import MoecastError
from tests.builders.serving import speaking_model


def test_payoff__fails_where_moecast_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payoff, "LIMIT", 0.0)
    config = PayoffConfig(
        model=str(speaking_model(tmp_path / "model")),
        format=["float32"],
        budget=["75%"],
        repetitions=1,
        requests=2,
        new_tokens=4,
        output=tmp_path / "payoff.json",
    )
    with pytest.raises(MoecastError, match="times as long: float32 at 75% "):
        payoff.run_payoff(config)
    (row,) = json.loads((tmp_path / "payoff.json").read_text())["rows"]
    assert row["tokens_equal"]
    assert row["ratio"] == row["moecast_seconds"] / row["on_demand_seconds"] > 0
    assert row["ratio_interval"] is None


def test_row__takes_its_interval_over_requests() -> None:
    row = payoff.PayoffRow(
        format="int8",
        budget="25%",
        on_demand_seconds=1.0,
        moecast_seconds=1.05,
        ratio=1.05,
        ratio_interval=(1.01, 1.09),
        tokens_equal=True,
    )
    assert not row.is_slower
