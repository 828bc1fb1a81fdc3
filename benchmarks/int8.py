"""What eight-bit weights cost in accuracy: learned predictors as trained and quantised, held out.

    python benchmarks/int8.py entries=runs/all/entries
        trace=runs/traces/qwen2-moe-tiny/NAME output=benchmarks/results/int8.json

The entries are those of `python -m train predictor=all run_dir=runs/all`, the trace the one that
they were trained on. `kinds=residual,mlp` for some of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.registry import LEARNED
from train.accuracy import accuracy_table, fresh, score
from train.horizons import by_horizon
from train.quantise import quantised
from train.scoring import worst
from zoo.load import load_predictor


def figures(predictor: Predictor, trace: Trace) -> dict[str, Any]:
    """Accuracy of the last forecast before the router, and by horizon where there are several."""
    table = accuracy_table(score(fresh(predictor), trace))
    several = getattr(predictor, "horizons", 1) > 1
    horizons = by_horizon(fresh(predictor), trace) if several else {}
    return {
        "bytes": sum(map(len, predictor.files().values())),
        "mean_accuracy": table["mean_accuracy"],
        "worst_layer_accuracy": worst(table["accuracy"]),
        "calibration_error": max(one for one in table["calibration_error"] if one is not None),
        "by_horizon": {
            name: {key: one[key] for key in ("mean_accuracy", "worst_layer_accuracy")}
            for name, one in horizons.items()
        },
    }


def main(arguments: dict[str, str]) -> None:
    trace = Trace.open(Path(arguments["trace"]))
    rows = []
    for kind in arguments.get("kinds", ",".join(LEARNED)).split(","):
        plain = load_predictor(str(Path(arguments["entries"], kind)), spec=trace.spec)
        for weights, predictor in (("fp32", plain), ("int8", quantised(plain))):
            rows.append({"predictor": kind, "weights": weights, **figures(predictor, trace)})
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    report = {"trace": trace.digest, "dataset": trace.manifest.plan.dataset, "rows": rows}
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
