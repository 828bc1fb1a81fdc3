"""From a name in `predictor=` to an object that forecasts."""

from pathlib import Path

import numpy as np

from predictors.learned import graph_path
from tests.builders.entries import tiny_entry, tiny_graph, tiny_spec
from zoo.catalog import WritableZoo
from zoo.entry import open_entry
from zoo.load import load_predictor
from zoo.storage import cache_storage


def mlp_entry(folder: Path) -> None:
    """Two layers, so one network: from layer 0 to layer 1."""
    files = {graph_path(0, 1): tiny_graph()}
    tiny_entry(folder, name="tiny/mlp", kind="mlp", options={"horizon": 1}, files=files)


def test_load__by_folder_and_by_name_forecast_alike(tmp_path: Path) -> None:
    mlp_entry(tmp_path / "e")
    WritableZoo(cache_storage()).add(open_entry(tmp_path / "e"))
    hidden_TD = np.array([[0.1, 0.9, 0.2, 0.3], [0.5, 0.1, 0.0, 0.7]], dtype=np.float32)
    # W is the unit matrix with four columns of zeros added.
    expected_TE = np.hstack([hidden_TD, np.zeros((2, 4), dtype=np.float32)])
    for reference in ("tiny/mlp", "tiny/mlp@latest", tmp_path / "e", str(tmp_path / "e")):
        predictor = load_predictor(reference, spec=tiny_spec())
        (forecast,) = predictor.gate_input(0, hidden_TD)
        assert forecast.layer == 1
        assert np.array_equal(forecast.scores_TE, expected_TE)
