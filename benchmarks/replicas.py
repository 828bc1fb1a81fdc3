"""Eight replicas behind a router: cache-aware routing beside round robin, on published arrivals.

    python -m benchmarks.replicas arrivals=FILE,FILE traces=FOLDER,FOLDER
        output=benchmarks/results/replicas.json

`arrivals` are files with a time for each request: AzureLLMInferenceTrace_conv.csv and
AzureLLMInferenceTrace_code.csv (github.com/Azure/AzurePublicDataset) or mooncake's
conversation_trace.jsonl (github.com/kvcache-ai/Mooncake); nothing is downloaded. Their times are
stretched so that the replicas are busy for a stated share of the time; the requests are those of
`traces` (`python -m collect`, of several data sets: pydocs, pysource), drawn at random. What a
prompt's experts will be is forecast by the zoo's `token` entry. Minutes on one core.
"""

import csv
import itertools
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.ground import machine, shape_named, systems
from collect.traces import Trace
from predictors.base import Predictor
from runtime.budget import slots_of
from runtime.policy.routing import ROUTINGS, expected_mass
from runtime.sim.hardware import described
from runtime.sim.replicas import Limits, Request, SimulatedReplica, route
from runtime.sim.step import Step, first_request
from train.evaluate.steps import routed
from zoo import load_predictor

NUM_REPLICAS = 8
NUM_REQUESTS = 200
"""The first of each file."""
LIMITS = Limits(max_running=4, max_waiting=64)
BUDGETS = (0.25, 0.5)
BUSY = (0.3,)
"""Share of the requests a second that the replicas would serve if all were there at once."""
SYSTEMS = ("on-demand", "lfu")
HARDWARE, SHAPE = "rtx4090-pcie4", "qwen1.5-moe"


def arrival_times(file: Path, number: int) -> list[float]:
    """Seconds from the first request; requests of one moment keep their order."""
    if file.suffix == ".csv":
        with file.open() as lines:
            rows = csv.DictReader(lines)
            stamps = [row["TIMESTAMP"][:26] for row, _ in zip(rows, range(number), strict=False)]
        times = [datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    else:
        lines = file.read_text().splitlines()[:number]
        times = [json.loads(line)["timestamp"] / 1e3 for line in lines]
    first = min(times)
    return sorted(one - first for one in times)


def recorded(traces: Sequence[Trace]) -> list[list[Step]]:
    """Requests with generated tokens, as many of each trace: each its prompt's step, then one a
    token. Of the first trace, whose text predictors were trained on, the held-out ones."""
    by_trace = []
    for trace in traces:
        splits = ("held_out",) if trace is traces[0] else ("held_out", "train")
        steps = itertools.chain.from_iterable(map(trace.steps, splits))
        groups = [list(group) for _, group in itertools.groupby(steps, first_request)]
        layers = trace.spec.num_layers
        by_trace.append([[routed(step, layers) for step in one] for one in groups if len(one) > 1])
    fewest = min(map(len, by_trace))
    return [one for group in by_trace for one in group[:fewest]]


def drawn(
    pool: Sequence[Sequence[Step]], times: Sequence[float], masses: Sequence[Any], *, seed: int
) -> list[Request]:
    """A recorded request for each arrival."""
    chosen = np.random.default_rng(seed).integers(len(pool), size=len(times))
    return [
        Request(arrival, pool[i], masses[i])
        for arrival, i in zip(times, chosen.tolist(), strict=True)
    ]


def masses_of(pool: Sequence[Sequence[Step]], predictor: Predictor) -> list[Any]:
    """What each request's prompt is forecast to need."""
    spec = predictor.spec
    shape = {"num_layers": spec.num_layers, "num_experts": spec.num_experts}
    return [
        expected_mass(predictor.begin_step(one[0].tokens_T, one[0].requests_T), **shape)
        for one in pool
    ]


def main(arguments: dict[str, str]) -> None:
    started = time.monotonic()
    traces = [Trace.open(Path(one)) for one in arguments["traces"].split(",")]
    spec = traces[0].spec
    pool = recorded(traces)
    masses = masses_of(pool, load_predictor(f"{spec.model_id}/token", spec=spec))
    hardware = described(machine(HARDWARE), shape_named(SHAPE))
    number = int(arguments.get("requests", str(NUM_REQUESTS)))
    known = systems()
    rows: list[dict[str, Any]] = []
    for file in map(Path, arguments["arrivals"].split(",")):
        times = arrival_times(file, number)
        for name in arguments.get("systems", ",".join(SYSTEMS)).split(","):
            for budget in BUDGETS:
                slots = slots_of(
                    int(budget * spec.num_layers * spec.num_experts),
                    slot_bytes=1,
                    scratch_bytes=0,
                    top_k=spec.top_k,
                    num_experts=spec.num_layers * spec.num_experts,
                )

                def make(name: str = name, slots: int = slots) -> SimulatedReplica:
                    return SimulatedReplica(
                        spec=spec,
                        system=known[name],
                        hardware=hardware,
                        slots=slots,
                        limits=LIMITS,
                    )

                at_once = drawn(pool, [0.0] * len(times), masses, seed=0)
                unlimited = route(at_once, ROUTINGS["round-robin"](), make,
                                  num_replicas=NUM_REPLICAS)  # fmt: skip
                capacity = len(times) / max(one.ended or 0.0 for one in unlimited.requests)
                for busy in BUSY:
                    stretch = len(times) / capacity / busy / max(times[-1], 1e-9)
                    arrivals = [one * stretch for one in times]
                    for routing in ROUTINGS:
                        requests = drawn(pool, arrivals, masses, seed=0)
                        outcome = route(
                            requests, ROUTINGS[routing](), make, num_replicas=NUM_REPLICAS
                        )
                        rows.append(
                            {
                                "arrivals": file.stem,
                                "system": name,
                                "budget": budget,
                                "busy": busy,
                                "routing": routing,
                                **outcome.as_dict(),
                            }
                        )
                        sys.stderr.write(f"{time.monotonic() - started:5.0f} s  {rows[-1]}\n")
    report = {
        "traces": [trace.digest for trace in traces],
        "datasets": [trace.manifest.plan.dataset for trace in traces],
        "hardware": HARDWARE,
        "shape": SHAPE,
        "replicas": NUM_REPLICAS,
        "limits": vars(LIMITS),
        "requests": number,
        "recorded_requests": len(pool),
        "seconds": round(time.monotonic() - started),
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
