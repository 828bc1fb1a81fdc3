"""Where moecast's own system stands between promoe and the bound, and what the rest of the way is.

    python -m benchmarks.moecast trace=runs/traces/qwen2-moe-tiny/NAME entries=runs/all/entries
        output=benchmarks/results/moecast.json

The bound knows a step's routing when it begins, and all later routing for eviction. Its two parts
of knowledge are taken away one by one; then eviction is given the true routing of the next few
tokens only, which says how far ahead one would have to see. `entries` holds residual, reuse and
stride, as `python -m train predictor=all` writes them.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from collect.traces import Trace
from configs.compose import compose_typed
from predictors.base import Signal
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.counters import sum_counters
from runtime.sim.hardware import Hardware, described
from runtime.sim.replay import replay
from train.evaluate.forecasts import (
    EventKey,
    RecordedForecast,
    RecordedForecasts,
    perfect_forecasts,
    record_forecasts,
)
from train.evaluate.steps import Routed, held_out_steps, routed
from train.replay import budget_slots
from zoo import load_predictor

BUDGETS = ("10%", "25%", "50%", "75%")
MACHINES = ("rtx4090-pcie4", "desktop-nvme4")
NEW_TOKENS = 256
WINDOWS = (1, 2, 4, 8)
"""Tokens ahead of which eviction is told the true routing."""
GAMMA = 0.7
"""As `reuse` is trained: a use one token later counts so much less."""

Arm = tuple[str, SystemConfig, str | None, str | None]
"""Name, system, and the recorded of forecasts and values."""


def arms(*, parts: bool) -> list[Arm]:
    """From nothing known to everything.

    `parts`: also moecast less each of its parts, and with some tokens known.
    """
    ours, theirs, knows, none = (
        compose_typed("generate", [f"system={name}"])[0].system
        for name in ("moecast", "promoe", "oracle", "on-demand")
    )
    # Parts are compared without the steps in which the switch tries the other setting.
    ours = replace(ours, adaptive=False)
    belady = {"eviction": "belady", "predictor": None, "reuse_predictor": None}
    less: list[Arm] = [
        ("idle links left alone", replace(ours, idle_prefetch=False), "residual", "reuse"),
        ("an arena for each layer", replace(ours, per_layer=True), "residual", "reuse"),
        ("usage counts, not reuse", ours, "residual", None),
        ("no forecasts", replace(ours, prefetch=False, idle_prefetch=False), None, "reuse"),
        *((f"next {n} tokens known to eviction", ours, "residual", f"next {n}") for n in WINDOWS),
    ]
    return [
        ("on-demand", none, None, None),
        ("promoe", theirs, "stride", None),
        ("moecast", replace(ours, adaptive=True), "residual", "reuse"),
        ("no switch", ours, "residual", "reuse"),
        *(less if parts else ()),
        ("step's routing known", ours, "truth", "reuse"),
        ("Belady, forecasts", replace(ours, **belady), "residual", None),
        ("bound", knows, None, None),
    ]


def values(
    steps: Sequence[Routed], reuse: RecordedForecasts, spec: ModelSpec, num_tokens: int
) -> RecordedForecasts:
    """What eviction keeps by: the true routing of the next `num_tokens` steps, then `reuse`."""
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
    return RecordedForecasts("reuse", frozenset({Signal.ROUTED}), answers)


def record_all(trace: Trace, entries: Path) -> tuple[list[Routed], dict[str, RecordedForecasts]]:
    """The steps, and every predictor's answers to them."""
    steps = held_out_steps(trace, batch=1, new_tokens=NEW_TOKENS)
    light = [routed(step, trace.spec.num_layers) for step in steps]
    options: dict[str, Mapping[str, Any]] = {"residual": {"refresh_last": False}}
    recorded = {
        kind: record_forecasts(
            load_predictor(entries / kind, spec=trace.spec, options=options.get(kind)), steps
        )
        for kind in ("stride", "residual", "reuse")
    }
    recorded["truth"] = perfect_forecasts(light, trace.spec)
    for num_tokens in WINDOWS:
        recorded[f"next {num_tokens}"] = values(light, recorded["reuse"], trace.spec, num_tokens)
    return light, recorded


def row(
    arm: Arm,
    steps: Sequence[Routed],
    recorded: Mapping[str, RecordedForecasts],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    budget: str,
) -> dict[str, Any]:
    name, system, forecasts, reuse_predictor = arm
    stats = replay(
        steps,
        None if forecasts is None else recorded[forecasts].predictor(spec),
        spec=spec,
        system=system,
        hardware=hardware,
        budget_slots=budget_slots(budget, spec, hardware),
        reuse_predictor=None
        if reuse_predictor is None
        else recorded[reuse_predictor].predictor(spec),
    )
    figures, decode = stats.as_dict(), sum_counters(stats.decode)
    return {
        "hardware": hardware.name,
        "budget": budget,
        "arm": name,
        "tpot_ms": 1e3 * figures["tpot_seconds"],
        "ttft_ms": 1e3 * figures["ttft_seconds"],
        "tokens_per_second": len(stats.tpot_seconds) / sum(stats.tpot_seconds),
        "hit_rate": decode.hit_rate,
        "bytes_per_token": decode.bytes_moved / len(stats.tpot_seconds),
    }


def with_shares(rows: list[dict[str, Any]]) -> None:
    """Adds each row's speed over promoe's and over the bound's, of decoding, by medians."""
    by_arm = {one["arm"]: one for one in rows}
    for one in rows:
        one["speed_over_promoe"] = by_arm["promoe"]["tpot_ms"] / one["tpot_ms"]
        one["share_of_bound"] = by_arm["bound"]["tpot_ms"] / one["tpot_ms"]


def main(arguments: dict[str, str]) -> None:
    trace = Trace.open(Path(arguments["trace"]))
    steps, recorded = record_all(trace, Path(arguments["entries"]))
    rows: list[dict[str, Any]] = []
    machines, started, console = [], time.perf_counter(), Console()
    for name in MACHINES:
        config, _ = compose_typed("train", [f"hardware={name}"])
        machines.append({"hardware": vars(config.hardware), "shape": vars(config.shape)})
        hardware = described(config.hardware, config.shape)
        for budget in BUDGETS:
            block = [
                row(arm, steps, recorded, spec=trace.spec, hardware=hardware, budget=budget)
                for arm in arms(parts=name == MACHINES[0])
            ]
            with_shares(block)
            rows += block
            for one in block:
                console.print(
                    f"{name} {budget:>4} {one['arm']:34} {one['tpot_ms']:8.2f} ms "
                    f"{one['ttft_ms']:8.1f} ms  hits {one['hit_rate']:.3f}  "
                    f"{one['speed_over_promoe']:.2f}x promoe, {one['share_of_bound']:.0%} of bound",
                    highlight=False,
                    soft_wrap=True,
                )
    report = {
        "trace": trace.digest,
        "dataset": trace.manifest.plan.dataset,
        "new_tokens": NEW_TOKENS,
        "machines": machines,
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
