"""Processor time of the simulator: systems replayed on a trace, compiled and as Python files.

A process of its own for each, as a process has either: `python -m benchmarks.capacity.replays
REQUEST.json REPORT.json`.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.process import python_module, start_worker
from collect.traces import Trace
from runtime.compiled import VARIABLE, is_compiled
from runtime.presets import load_hardware, load_model_preset, load_shape, load_system
from runtime.sim.hardware import describe_hardware
from runtime.sim.replay import rare_collections
from runtime.tools.comparison import Condition
from train.evaluate.forecasts import held_out_steps, routing_only
from train.evaluate.jobs import record_all, replay_case
from train.evaluate.variants import TABLE, PredictorSources, ReplayCase, make_variant

SYSTEMS = ("on-demand", "promoe", "moecast")
BUDGETS = ("10%", "50%")
HARDWARE, SHAPE = "rtx4090-pcie4", "qwen1.5-moe"
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    trace: str
    model: str
    """The traced model, whose zoo entries forecast."""
    new_tokens: int
    """Generated held-out tokens to replay."""
    repetitions: int


@dataclass(frozen=True, kw_only=True)
class ReplayCost:
    """Processor time of replays of one system, prefills included and recording forecasts not."""

    system: str
    budget: str
    is_compiled: bool
    """False: the policy core and the simulator are the Python files."""
    decode_steps: int
    prefills: int
    step_seconds: list[float]
    """Processor time per decode step, of each repetition in each process."""


def measure_replays(request: ReplayRequest, folder: Path, *, cores: int) -> list[ReplayCost]:
    """Measures all systems and budgets, compiled where that is installed, and as Python files.

    As many processes as cores do the same at a time, as they share the machine's memory.

    Raises:
        ProcessFailed: a replay failed.
    """
    environments: dict[str, dict[str, str]] = {"python": {VARIABLE: "0"}}
    if is_compiled():
        environments = {"compiled": {}} | environments
    costs: list[ReplayCost] = []
    for name, environment in environments.items():
        workers = [
            start_worker(
                python_module("benchmarks.capacity.replays"),
                request,
                folder,
                name=f"{name}-{number}",
                environment=environment,
            )
            for number in range(cores)
        ]
        reports = [worker.finish(TIMEOUT_SECONDS)["costs"] for worker in workers]
        for same in zip(*reports, strict=True):
            times = [seconds for cost in same for seconds in cost["step_seconds"]]
            costs.append(ReplayCost(**{**same[0], "step_seconds": times}))
    return costs


def time_replays(request: ReplayRequest) -> Iterator[ReplayCost]:
    """Replays in this process, once more than is measured: the first ranks the forecasts."""
    trace = Trace.open(Path(request.trace), verify=False)
    model = load_model_preset(request.model)
    sources = PredictorSources(trace, model=model, entries=None, seed=0)
    hardware = describe_hardware(load_hardware(HARDWARE), load_shape(SHAPE))
    for name in SYSTEMS:
        variant = make_variant(load_system(name), sources, None)
        steps = held_out_steps(trace, batch=1, new_tokens=request.new_tokens)
        recorded = record_all(variant, steps, sources.found, trace.spec)
        routed = [routing_only(step, trace.spec.num_layers) for step in steps]
        for budget in BUDGETS:
            case = ReplayCase(variant, Condition(budget, 1), hardware, TABLE)
            times = []
            for _ in range(1 + request.repetitions):
                started = time.process_time()
                stats = replay_case(case, routed, recorded, trace.spec)
                times.append((time.process_time() - started) / len(stats.tpot_seconds))
            yield ReplayCost(
                system=name,
                budget=budget,
                is_compiled=is_compiled(),
                decode_steps=len(stats.tpot_seconds),
                prefills=len(stats.ttft_seconds),
                step_seconds=times[1:],
            )


def main(request_path: Path, report_path: Path) -> None:
    request = ReplayRequest(**json.loads(request_path.read_text()))
    with rare_collections():
        costs = [asdict(cost) for cost in time_replays(request)]
    report_path.write_text(json.dumps({"costs": costs}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
