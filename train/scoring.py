"""All figures of one predictor: accuracy, FetchRate, GoodPred, latency and size.

Shape suffixes: B requests that decode together.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor, Signal
from predictors.metrics import ENTRY, Phase
from runtime.sim.hardware import Hardware
from runtime.sim.step import RecordedStep
from train.accuracy import accuracy_table, measure_horizons, score_layers
from train.config import ScoringConfig
from train.evaluate.forecasts import record_forecasts
from train.replay import first_tokens, is_decode, measure_fetching


@dataclass(frozen=True, kw_only=True)
class EvalContext:
    """The trace, system and machines on which all predictors are scored."""

    trace: Trace
    """Its held-out requests are scored, as those of the other traces are."""
    shifted: Trace | None
    """Prompts of another distribution; None: not scored."""
    others: Mapping[str, Trace] = field(default_factory=dict)
    """Prompts of other kinds."""
    hardware: Sequence[Hardware]
    """Tables by layer show the figures of the first one."""
    config: ScoringConfig

    @property
    def setting(self) -> str:
        """Description for tables and model cards."""
        machines = " and ".join(machine.name for machine in self.hardware)
        return (
            f"system {self.config.system.name}, hardware {machines}, budget {self.config.budget}, "
            f"replay of {self.num_replayed:,} generated held-out tokens"
        )

    @property
    def num_replayed(self) -> int:
        """Generated tokens of the replay; the trace may have fewer than `replay_tokens`."""
        return sum(len(step.tokens_T) for step in self.steps() if is_decode(step))

    def steps(self) -> Iterator[RecordedStep]:
        """Return the steps of the replay."""
        return first_tokens(self.trace.steps("held_out"), self.config.replay_tokens)

    def replay(self, predictor: Predictor, hardware: Hardware) -> dict[str, Any]:
        """Replay them with a predictor's forecasts; return what `measure_fetching` does."""
        system, budget = self.config.system, self.config.budget
        return measure_fetching(
            self.steps(), predictor, system=system, hardware=hardware, budget=budget
        )


def score_predictor(predictor: Predictor, context: EvalContext) -> dict[str, Any]:
    """Return all figures of a predictor, as results.json holds them.

    Each part begins with an untouched copy: what the predictor learns while it serves one part does
    not help it in the next.
    """
    table = accuracy_table(score_layers(predictor.for_all_tokens(), context.trace))
    machines = {
        machine.name: context.replay(predictor.renewed(), machine) for machine in context.hardware
    }
    first = machines[context.hardware[0].name]
    return {
        **table,
        **first,
        "hardware": {
            name: {key: value for key, value in own.items() if not isinstance(value, list | dict)}
            for name, own in machines.items()
        },
        "shifted": None if context.shifted is None else score_shifted(predictor, context.shifted),
        "latency_us": measure_latency(predictor, context.trace),
        "bytes": sum(map(len, predictor.files().values())),
        "horizon": getattr(predictor, "horizon", None),
        "by_horizon": score_horizons(predictor, context)
        if getattr(predictor, "horizons", 1) > 1
        else None,
        "other_kinds": {
            kind: score_shifted(predictor, other) for kind, other in context.others.items()
        },
    }


def score_horizons(predictor: Predictor, context: EvalContext) -> dict[str, Any]:
    """Return accuracy and, on the first machine, FetchRate of each horizon by itself."""
    scores = measure_horizons(predictor.for_all_tokens(), context.trace)
    recorded = record_forecasts(predictor.renewed(), context.steps())
    for name, row in scores.items():
        if name != ENTRY:
            alone = recorded.at_distance(name).predictor(context.trace.spec)
            fetched = context.replay(alone, context.hardware[0])
            for key in ("mean_replay_accuracy", "mean_fetch_rate", "mean_good_pred"):
                row[key] = fetched[key]
    return scores


def score_shifted(predictor: Predictor, shifted: Trace) -> dict[str, Any]:
    """Return accuracy on the held-out requests of another distribution.

    A predictor that learns while it serves learns from them.
    """
    table = accuracy_table(score_layers(predictor.for_all_tokens(), shifted))
    keys = ("accuracy", "mean_accuracy", "worst_layer_accuracy", "tokens")
    return {
        **{key: table[key] for key in keys},
        "dataset": shifted.manifest.plan.dataset,
        "trace_digest": shifted.digest,
    }


BATCHES = (1, 8, 64)
TIMED_STEPS, WARM_STEPS = 40, 3
"""Steps of a measurement; sessions and caches are warm after the first of them."""


def decode_steps(trace: Trace, batch: int) -> Iterator[TraceStep]:
    """Yield `TIMED_STEPS` steps in which `batch` requests decode, as a server runs them."""
    rows = trace.rows("held_out")
    rows = rows[trace.phases[rows] == Phase.DECODE]
    starts = np.flatnonzero(np.diff(trace.requests[rows], prepend=-1))
    lengths = np.diff(starts, append=len(rows))
    if not len(starts):
        return
    # Round and round where there are fewer requests or tokens than that.
    which_B = np.arange(batch) % len(starts)
    for step in range(TIMED_STEPS):
        turn = step + np.arange(batch) // len(starts)
        yield TraceStep(trace, rows[starts[which_B] + turn % lengths[which_B]])


def measure_latency(predictor: Predictor, trace: Trace) -> dict[str, Any]:
    """Measures the time of a predictor's events for each batch size, in microseconds.

    Returns median and 99th percentile of one layer's events, and of a step's beginning and end;
    null if the trace has no generated tokens.
    """
    return {
        str(batch): _time_steps(predictor.renewed(), [*decode_steps(trace, batch)])
        for batch in BATCHES
    }


def _time_steps(predictor: Predictor, steps: list[TraceStep]) -> dict[str, float] | None:
    layers: list[float] = []
    ends: list[float] = []
    for place, step in enumerate(steps):
        # Separate requests, so that no id is that of two tokens of a step.
        begin = partial(predictor.begin_step, step.tokens_T, np.arange(step.num_tokens))
        events = [layer_events(predictor, step, at) for at in range(predictor.spec.num_layers)]
        edge = time_calls([begin])
        taken = [time_calls(calls) for calls in events]
        edge += time_calls([predictor.end_step])
        if place >= WARM_STEPS:
            layers += taken
            ends.append(edge)
    if not layers:
        return None
    return {
        f"{part}_p{percent}": round(float(np.percentile(seconds, percent)) * 1e6, 1)
        for part, seconds in (("layer", layers), ("begin_and_end", ends))
        for percent in (50, 99)
    }


def layer_events(predictor: Predictor, step: TraceStep, layer: int) -> list[Callable[[], object]]:
    """Return the calls of a layer that the predictor listens to, their arrays in memory."""
    signals = predictor.signals
    calls: list[Callable[[], object]] = []
    if Signal.LAYER_INPUT in signals:
        calls.append(partial(predictor.layer_input, layer, step.layer_input(layer)))
    if Signal.GATE_INPUT in signals:
        calls.append(partial(predictor.gate_input, layer, step.gate_input(layer)))
    if Signal.ROUTED in signals:
        logits_TE = step.logits(layer) if Signal.LOGITS in signals else None
        calls.append(partial(predictor.routed, layer, step.experts(layer), logits_TE))
    return calls


def time_calls(calls: list[Callable[[], object]]) -> float:
    """Return the seconds that the calls take one after another."""
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started
