"""What a forecast costs: time of one layer's event, one thread, and size, for models of any width.

    python benchmarks/latency.py output=benchmarks/results/latency.json

Random weights in the shapes that `python -m train` gives its networks. An event is what the runtime
calls at a layer: Python, onnxruntime and all. `hot`: one layer's event again and again, as the
papers time it; `in turn`: the events of eight layers one after another, whose weights drive each
other from the processor's caches, as they do while a model is served. To be run alone, takes 2 to 4
minutes. `rounds=N` makes it shorter.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from predictors.base import Predictor
from predictors.learned import Mlp
from predictors.reuse.forecaster import Reuse
from predictors.spec import ModelSpec
from train.export import network_graph
from train.pipeline import HORIZONS
from train.quantise import quantised
from train.residual import ResidualFamily
from train.reuse import WIDTH as REUSE_WIDTH
from train.reuse import ReuseFamily

BATCHES = (1, 8, 64)
LAYERS = 8
"""That are really made; sizes are extrapolated from the networks in their midst."""
ROUNDS = {1: 200, 8: 80, 64: 20}
"""Passes over the layers; the first tenth is not counted."""
WIDTHS = (512, 256)
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's, as far as forecasts are concerned."""

    like: str
    hidden: int
    experts: int
    top_k: int
    layers: int


SHAPES = (
    Shape(like="qwen2-moe-tiny", hidden=256, experts=60, top_k=4, layers=12),
    Shape(like="Qwen3-30B-A3B, half of its experts", hidden=2048, experts=64, top_k=8, layers=48),
    Shape(like="Qwen2-57B-A14B", hidden=3584, experts=64, top_k=8, layers=28),
)
Event = Callable[[int], object]


def spec_of(shape: Shape) -> ModelSpec:
    return ModelSpec(
        model_id=shape.like,
        revision="-",
        config_hash="-",
        num_layers=LAYERS,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        dtype="float32",
    )


def predictors(shape: Shape) -> Iterator[tuple[str, int, Predictor]]:
    """Name, hidden units and the predictor itself."""
    spec = spec_of(shape)
    random = np.random.default_rng(SEED)
    torch.manual_seed(SEED)

    def weights(*size: int) -> np.ndarray:
        return random.standard_normal(size, np.float32) / np.float32(np.sqrt(size[0]))

    for width in WIDTHS:
        graphs = {
            layer: network_graph(
                weights(shape.hidden, width),
                weights(width),
                weights(width, shape.experts),
                weights(shape.experts),
                name="mlp",
            )
            for layer in range(LAYERS - Mlp.horizon)
        }
        yield "mlp", width, Mlp(spec, graphs)
    routers_LED = random.standard_normal((LAYERS, shape.experts, shape.hidden), np.float32)
    for width in WIDTHS:
        family = ResidualFamily(spec, routers_LED, None, horizons=HORIZONS, width=width)
        yield "residual", width, family.export(spec)["residual"]
    biases_LE = np.zeros((LAYERS, shape.experts), np.float32)
    keeper = ReuseFamily(spec, routers_LED, biases_LE)
    yield "reuse", REUSE_WIDTH, keeper.export(spec)["reuse"]


def event_of(predictor: Predictor, shape: Shape, batch: int) -> tuple[list[int], Event]:
    """The layers that have a whole network, and what the runtime calls at one of them."""
    random = np.random.default_rng(SEED)
    hidden_TD = random.standard_normal((batch, shape.hidden), np.float32)
    experts_TK = np.stack([random.permutation(shape.experts)[: shape.top_k] for _ in range(batch)])
    # Requests of their own, as they decode together.
    predictor.begin_step(np.zeros(batch, np.int64), np.arange(batch))
    predictor.layer_input(0, hidden_TD)
    if isinstance(predictor, Reuse):
        predictor.gate_input(0, hidden_TD)
        return list(range(LAYERS)), lambda layer: predictor.routed(layer, experts_TK, None)
    return list(range(LAYERS - HORIZONS)), lambda layer: predictor.gate_input(layer, hidden_TD)


def timed(predictor: Predictor, shape: Shape, batch: int, rounds: int) -> dict[str, float]:
    """Microseconds."""
    layers, event = event_of(predictor, shape, batch)
    orders = {"hot": [layers[1]] * len(layers), "in_turn": layers}
    found: dict[str, float] = {}
    for name, order in orders.items():
        taken = []
        for _ in range(rounds):
            for layer in order:
                started = time.perf_counter_ns()
                event(layer)
                taken.append((time.perf_counter_ns() - started) / 1000)
        counted = taken[len(taken) // 10 :]
        for percent in (50, 99):
            found[f"{name}_p{percent}"] = round(float(np.percentile(counted, percent)), 1)
    return found


def whole_size(predictor: Predictor, shape: Shape) -> int:
    """Bytes of a model with all its layers: each more is as large as one in the midst."""
    files = predictor.files()
    middle = [len(data) for path, data in files.items() if f"_{LAYERS // 2 - 1:02d}" in path]
    if isinstance(predictor, Reuse):
        tensors = sum(len(data) for path, data in files.items() if not path.endswith(".onnx"))
        middle.append(tensors // LAYERS)
    elif isinstance(predictor, Mlp):
        middle = middle[:1]
    return sum(map(len, files.values())) + (shape.layers - LAYERS) * sum(middle)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(arguments: dict[str, str]) -> None:
    torch.set_num_threads(1)
    share = float(arguments.get("rounds", "1"))
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for name, width, plain in predictors(shape):
            for weights, predictor in (("fp32", plain), ("int8", quantised(plain))):
                row: dict[str, Any] = {
                    "predictor": name,
                    "weights": weights,
                    "width": width,
                    **vars(shape),
                    "bytes": whole_size(predictor, shape),
                    "event_us": {
                        str(batch): timed(
                            predictor, shape, batch, max(10, round(share * ROUNDS[batch]))
                        )
                        for batch in BATCHES
                    },
                }
                rows.append(row)
                one = row["event_us"]["1"]
                sys.stdout.write(
                    f"{name} {shape.hidden}->{width}->{shape.experts} {weights}: batch 1 hot "
                    f"{one['hot_p50']} us, in turn {one['in_turn_p50']} us, "
                    f"{row['bytes'] / 1e6:.1f} MB\n"
                )
                sys.stdout.flush()
    machine = {"processor": processor(), "python": platform.python_version()}
    report = {"machine": machine, "threads": 1, "rows": rows}
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
