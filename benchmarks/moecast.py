"""Ablation of the system moecast: replays of the steps from promoe to full knowledge.

The last variants know the routing of a step when it begins, or all later routing for eviction, or
both. Others know the true routing of the next few tokens for eviction only, which shows how far
ahead it would have to see. All stand next to the bound (`runtime.sim.lower_bound`).
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.config import MoecastConfig
from benchmarks.papers.paper_context import load_hardware, load_shape
from benchmarks.reports import print_line, write_report
from collect.traces import Trace
from predictors.base import Ints, Signal
from predictors.metrics import mark_used
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.counters import sum_counters
from runtime.presets import load_system
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.sim.lower_bound import bound_time
from runtime.sim.replay import rare_collections, replay
from runtime.sim.step import ArrayStep, RecordedStep
from runtime.tools.intervals import Interval, bootstrap_ratio
from train.evaluate.forecasts import (
    EventKey,
    RecordedForecast,
    RecordedForecasts,
    held_out_steps,
    record_forecasts,
    routing_only,
)
from train.replay import budget_slots
from zoo.load import load_predictor

BUDGETS = ("10%", "25%", "50%", "75%")
MACHINE = "rtx4090-pcie4"
SHAPE = "qwen1.5-moe"
NEW_TOKENS = 256
WINDOWS = (1, 2, 4, 8)
"""Tokens ahead of which eviction knows the true routing."""
GAMMA = 0.7
"""Discount of a use one token later, as in the training of `reuse`."""


@dataclass(frozen=True)
class SystemVariant:
    """A system and its predictors."""

    name: str
    system: SystemConfig
    forecasts: str | None
    """RecordedForecasts that prefetching reads."""
    reuse: str | None
    """RecordedForecasts that eviction reads."""


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    hardware: str
    budget: str
    variant: str
    tpot_ms: float
    """Median, as that of a prefill."""
    ttft_ms: float
    tokens_per_second: float
    hit_rate: float | None
    bytes_per_token: float
    of_bound: float | None = None
    """Bound of the mean time of a decode step / the mean time."""
    tpot_mean_ms: float | None = None
    tpot_p95_ms: float | None = None
    tpot_interval_ms: Interval | None = None
    """95 % interval of the mean, over requests."""
    num_requests: int | None = None
    num_steps: int | None = None
    """Decode steps, of one token each."""


def variants() -> list[SystemVariant]:
    """Returns the variants from no knowledge to full knowledge."""
    moecast, promoe, oracle, on_demand = map(
        load_system, ("moecast", "promoe", "oracle", "on-demand")
    )
    belady = replace(moecast, eviction="belady", predictor=None, reuse_predictor=None)
    without = [
        SystemVariant(
            "idle links left alone", replace(moecast, idle_prefetch=False), "residual", "reuse"
        ),
        SystemVariant(
            "requests in chunks too", replace(moecast, whole_requests=False), "residual", "reuse"
        ),
        SystemVariant(
            "an arena for each layer", replace(moecast, per_layer=True), "residual", "reuse"
        ),
        SystemVariant("usage counts, not reuse", moecast, "residual", None),
        SystemVariant(
            "no forecasts", replace(moecast, prefetch=False, idle_prefetch=False), None, "reuse"
        ),
        *(
            SystemVariant(f"next {n} tokens known to eviction", moecast, "residual", f"next {n}")
            for n in WINDOWS
        ),
    ]
    return [
        SystemVariant("on-demand", on_demand, None, None),
        SystemVariant("promoe", promoe, "stride", None),
        SystemVariant("moecast", moecast, "residual", "reuse"),
        *without,
        SystemVariant("moecast, step's routing known", moecast, "truth", "reuse"),
        SystemVariant("Belady, forecasts", belady, "residual", None),
        SystemVariant("oracle: step's routing known", oracle, None, None),
        SystemVariant(
            "all routing known", replace(oracle, eviction_options={"known_steps": None}), None, None
        ),
    ]


def known_reuse(
    steps: Sequence[ArrayStep], reuse: RecordedForecasts, spec: ModelSpec, num_tokens: int
) -> RecordedForecasts:
    """Returns reuse scores from the true routing of the next `num_tokens` steps, then `reuse`."""
    used_SLE = np.zeros((len(steps), spec.num_layers, spec.num_experts), np.float32)
    for place, step in enumerate(steps):
        for layer in range(spec.num_layers):
            used_SLE[place, layer, np.unique(step.experts(layer))] = 1.0
    answers: list[dict[EventKey, list[RecordedForecast]]] = []
    for place in range(len(steps)):
        last = min(len(steps) - 1, place + num_tokens)
        discounts_N = (1 - GAMMA) * GAMMA ** np.arange(last - place)
        known_LE: NDArray = np.tensordot(discounts_N, used_SLE[place + 1 : last + 1], axes=1)
        answers.append(
            {
                (Signal.ROUTED, layer): [
                    RecordedForecast(
                        layer,
                        (
                            known_LE[layer]
                            + GAMMA**num_tokens
                            * reuse.steps[last][Signal.ROUTED, layer][0].scores_TE[0]
                        ).astype(np.float32)[None],
                    )
                ]
                for layer in range(spec.num_layers)
            }
        )
    return replace(reuse, steps=answers)


def perfect_forecasts(steps: Iterable[RecordedStep], spec: ModelSpec) -> RecordedForecasts:
    """Returns forecasts that equal the routing of all later layers.

    They are given at the beginning of a step and at the gate of each layer.
    """
    recorded: list[dict[EventKey, list[RecordedForecast]]] = []
    for step in steps:
        exact = [
            exact_forecast(step.experts(layer), layer, spec) for layer in range(spec.num_layers)
        ]
        answers: dict[EventKey, list[RecordedForecast]] = {(Signal.TOKENS, -1): exact}
        for layer in range(spec.num_layers - 1):
            answers[Signal.GATE_INPUT, layer] = exact[layer + 1 :]
        recorded.append(answers)
    return RecordedForecasts("truth", frozenset({Signal.TOKENS, Signal.GATE_INPUT}), recorded)


def exact_forecast(experts_TK: Ints, layer: int, spec: ModelSpec) -> RecordedForecast:
    """Returns the routing of one layer as a forecast."""
    return RecordedForecast(layer, mark_used(experts_TK, spec.num_experts))


def record_all(trace: Trace, entries: Path) -> tuple[list[ArrayStep], dict[str, RecordedForecasts]]:
    """Returns the held-out steps, and every predictor's forecasts for them."""
    steps = held_out_steps(trace, batch=1, new_tokens=NEW_TOKENS)
    light = [routing_only(step, trace.spec.num_layers) for step in steps]
    options: dict[str, Mapping[str, Any]] = {"residual": load_system("moecast").predictor_options}
    recorded = {
        kind: record_forecasts(
            load_predictor(str(entries / kind), spec=trace.spec, options=options.get(kind)), steps
        )
        for kind in ("stride", "residual", "reuse")
    }
    recorded["truth"] = perfect_forecasts(light, trace.spec)
    for num_tokens in WINDOWS:
        recorded[f"next {num_tokens}"] = known_reuse(
            light, recorded["reuse"], trace.spec, num_tokens
        )
    return light, recorded


def replay_variant(
    variant: SystemVariant,
    steps: Sequence[ArrayStep],
    recorded: Mapping[str, RecordedForecasts],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    budget: str,
) -> AblationRow:
    stats = replay(
        steps,
        None if variant.forecasts is None else recorded[variant.forecasts].predictor(spec),
        spec=spec,
        system=variant.system,
        hardware=hardware,
        budget_slots=budget_slots(budget, spec, hardware),
        reuse_predictor=None if variant.reuse is None else recorded[variant.reuse].predictor(spec),
    )
    bound = bound_time(
        steps, spec=spec, hardware=hardware, num_slots=budget_slots(budget, spec, hardware)
    )
    bound.assert_holds(stats)
    figures, decode = stats.as_dict(), sum_counters(stats.decode)
    decoding, runs = sum(stats.tpot_seconds), stats.decode_runs
    return AblationRow(
        hardware=hardware.name,
        budget=budget,
        variant=variant.name,
        tpot_ms=1e3 * figures["tpot_seconds"],
        ttft_ms=1e3 * figures["ttft_seconds"],
        tokens_per_second=len(stats.tpot_seconds) / decoding,
        of_bound=bound.decode_seconds / decoding,
        tpot_mean_ms=1e3 * decoding / len(stats.tpot_seconds),
        tpot_p95_ms=1e3 * figures["tpot_seconds_p95"],
        tpot_interval_ms=bootstrap_ratio([1e3 * sum(run) for run in runs], [*map(len, runs)]),
        num_requests=len(stats.ttft_seconds),
        num_steps=len(stats.tpot_seconds),
        hit_rate=decode.hit_rate,
        bytes_per_token=decode.bytes_moved / len(stats.tpot_seconds),
    )


@rare_collections()
def run_moecast(config: MoecastConfig) -> None:
    started = time.perf_counter()
    trace = Trace.open(config.trace)
    steps, recorded = record_all(trace, config.entries)
    rows: list[AblationRow] = []
    machine, shape = load_hardware(MACHINE), load_shape(SHAPE)
    hardware = describe_hardware(machine, shape)
    for budget, variant in itertools.product(BUDGETS, variants()):
        row = replay_variant(
            variant, steps, recorded, spec=trace.spec, hardware=hardware, budget=budget
        )
        rows.append(row)
        print_line(
            f"{budget:>4} {row.variant:34} {row.tpot_ms:8.2f} ms {row.ttft_ms:8.1f} ms  "
            f"hits {row.hit_rate or 0:.3f}  {row.of_bound or 0:.0%} of bound"
        )
    write_report(
        config,
        trace=trace.digest,
        dataset=trace.manifest.plan.dataset,
        new_tokens=NEW_TOKENS,
        machines=[{"hardware": asdict(machine), "shape": asdict(shape)}],
        seconds=round(time.perf_counter() - started, 1),
        rows=rows,
    )
