"""Final figures of a run's predictors, under the names that every logger gives them."""

from collections.abc import Mapping
from typing import Any

GROUP = "held_out"


def summary_figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return `held_out/PREDICTOR/FIGURE` of each predictor, without those not measured.

    FetchRate, GoodPred and joint are those of the first machine; latency is the median time of one
    layer's events at batch 1.
    """
    figures: dict[str, float] = {}
    for name, result in results.items():
        latency = result["latency_us"]["1"]
        values = {
            "accuracy": result["mean_accuracy"],
            "worst_layer_accuracy": result["worst_layer_accuracy"],
            "fetch_rate": result["mean_fetch_rate"],
            "good_pred": result["mean_good_pred"],
            "joint": result["mean_joint"],
            "latency_us": None if latency is None else latency["layer_p50"],
            "bytes": result["bytes"],
        }
        figures |= {
            f"{GROUP}/{name}/{figure}": float(value)
            for figure, value in values.items()
            if value is not None
        }
    return figures
