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

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.ground import machine, shape_named, systems
from benchmarks.serving.trace import read
from collect.traces import Trace
from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.budget import slots_of
from runtime.config import SystemConfig
from runtime.policy.routing import ROUTINGS, expected_mass
from runtime.sim.hardware import described
from runtime.sim.replicas import Limits, Request, SimulatedReplica, route
from runtime.sim.step import RecordedStep, first_request
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
        times = [one.seconds for one in itertools.islice(read(file), number)]
    else:
        lines = file.read_text().splitlines()[:number]
        times = [json.loads(line)["timestamp"] / 1e3 for line in lines]
    first = min(times)
    return sorted(one - first for one in times)


def recorded(traces: Sequence[Trace]) -> list[list[RecordedStep]]:
    """Requests with generated tokens, as many of each trace: each its prompt's step, then one a
    token. Of the first trace, whose text predictors were trained on, the held-out ones.
    """
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
    pool: Sequence[Sequence[RecordedStep]],
    times: Sequence[float],
    masses: Sequence[Any],
    *,
    seed: int,
) -> list[Request]:
    """A recorded request for each arrival."""
    chosen = np.random.default_rng(seed).integers(len(pool), size=len(times))
    return [
        Request(arrival, pool[i], masses[i])
        for arrival, i in zip(times, chosen.tolist(), strict=True)
    ]


def masses_of(pool: Sequence[Sequence[RecordedStep]], predictor: Predictor) -> list[Any]:
    """What each request's prompt is forecast to need."""
    spec = predictor.spec
    shape = {"num_layers": spec.num_layers, "num_experts": spec.num_experts}
    return [
        expected_mass(predictor.begin_step(one[0].tokens_T, one[0].requests_T), **shape)
        for one in pool
    ]


@dataclass(frozen=True)
class Load:
    """What is asked of the replicas."""

    pool: list[list[RecordedStep]]
    """Recorded requests."""
    masses: list[Any]
    """Of each, what its prompt is forecast to need."""
    times: list[float]
    """Arrivals, in seconds from the first."""


def maker(system: SystemConfig, spec: ModelSpec, budget: float) -> Callable[[], SimulatedReplica]:
    """Replicas with memory for a share of the experts."""
    num_experts = spec.num_layers * spec.num_experts
    slots = slots_of(
        int(budget * num_experts),
        slot_bytes=1,
        scratch_bytes=0,
        top_k=spec.top_k,
        num_experts=num_experts,
    )
    hardware = described(machine(HARDWARE), shape_named(SHAPE))
    return lambda: SimulatedReplica(
        spec=spec, system=system, hardware=hardware, slots=slots, limits=LIMITS
    )


def routed_by_each(
    load: Load, make: Callable[[], SimulatedReplica]
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Busy share, routing, and what came of it: the same requests for every routing."""
    at_once = drawn(load.pool, [0.0] * len(load.times), load.masses, seed=0)
    unlimited = route(at_once, ROUTINGS["round-robin"](), make, num_replicas=NUM_REPLICAS)
    capacity = len(load.times) / max(one.ended or 0.0 for one in unlimited.requests)
    for busy in BUSY:
        stretch = len(load.times) / capacity / busy / max(load.times[-1], 1e-9)
        arrivals = [one * stretch for one in load.times]
        for name, routing in ROUTINGS.items():
            requests = drawn(load.pool, arrivals, load.masses, seed=0)
            outcome = route(requests, routing(), make, num_replicas=NUM_REPLICAS)
            yield busy, name, outcome.as_dict()


def main(arguments: dict[str, str]) -> None:
    started = time.monotonic()
    traces = [Trace.open(Path(one)) for one in arguments["traces"].split(",")]
    spec = traces[0].spec
    pool = recorded(traces)
    masses = masses_of(pool, load_predictor(f"{spec.model_id}/token", spec=spec))
    number = int(arguments.get("requests", str(NUM_REQUESTS)))
    known = systems()
    names = arguments.get("systems", ",".join(SYSTEMS)).split(",")
    files = [Path(one) for one in arguments["arrivals"].split(",")]
    rows: list[dict[str, Any]] = []
    for file, name, budget in itertools.product(files, names, BUDGETS):
        load = Load(pool, masses, arrival_times(file, number))
        cell = {"arrivals": file.stem, "system": name, "budget": budget}
        for busy, routing, found in routed_by_each(load, maker(known[name], spec, budget)):
            rows.append(cell | {"busy": busy, "routing": routing} | found)
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
