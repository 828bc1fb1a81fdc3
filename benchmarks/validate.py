"""The simulator against live runs: the same steps served here, and replayed on `local`.

    python -m runtime inflate total_size=2GiB output=FOLDER
    python benchmarks/validate.py model=FOLDER output=benchmarks/results/validate.json

Routing is recorded once: it is the same in every run, bit for bit, and the tokens of each are
checked. For each budget and system a model is loaded and measured (`profiling.local`), another is
loaded and serves the prompts from an empty arena and is measured afterwards; the replay takes the
medians of all measurements of the cell. Repetitions go around all cells.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from predictors.base import Signal
from predictors.spec import ModelSpec
from runtime import load
from runtime.config import SystemConfig
from runtime.engine.forecasters import systems_forecaster
from runtime.hf.probes import Probes
from runtime.profiling.facts import hardware as machine_facts
from runtime.profiling.local import measure
from runtime.sim.hardware import Measured
from runtime.sim.replay import replay
from runtime.tools.doctor.recording import CapturedStep, Recorder
from runtime.tools.verify.reference import token_prompts

BUDGETS = ("25%", "50%", "75%")
REACTIVE: dict[str, Any] = {
    "prefetch": False,
    "chunked": False,
    "early_preemption": False,
    "reordered": False,
}
SYSTEMS = (
    SystemConfig(name="on-demand", **REACTIVE),
    SystemConfig(name="lfu", eviction="lfu", **REACTIVE),
    SystemConfig(name="promoe", predictor="mlp"),
)
PROMPTS = [
    "The heart pumps blood through the body, and the blood carries oxygen to",
    "def read_lines(path):\n    with open(path) as file:\n        ",
    "It was a dark and stormy night when the ship left the harbour for",
]
TPOT_WITHIN = 0.10
HITS_WITHIN = 0.01

Cell = tuple[str, str]
"""Budget and system."""


def median_of(profiles: Sequence[Any]) -> Any:
    """Profiles as one: the median of each number; all else is the same in all."""
    first = profiles[0]
    values: dict[str, Any] = {}
    for field in fields(first):
        column = [getattr(one, field.name) for one in profiles]
        value = column[0]
        if is_dataclass(value):
            values[field.name] = median_of(column)
        elif isinstance(value, float):
            values[field.name] = statistics.median(column)
        else:
            values[field.name] = value
    return type(first)(**values)


def continued(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of exactly `new_tokens` tokens."""
    found = []
    for prompt in prompts:
        inputs = torch.tensor([list(prompt)])
        tokens = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        found.append(tokens[0].tolist())
    return found


def recorded(
    folder: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> tuple[list[CapturedStep], list[list[int]], ModelSpec]:
    """Every step of the run, with what predictors are shown, the tokens, and the model's shape."""
    model = load(folder, system=SYSTEMS[0], budget="100%")
    recorder = Recorder()
    with Probes(model, {Signal.GATE_INPUT, Signal.ROUTED}, recorder):
        tokens = continued(model, prompts, new_tokens)
    model.moecast.close()
    return recorder.steps, tokens, model.moecast.spec


def live(
    folder: str,
    cell: Cell,
    system: SystemConfig,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    expected: list[list[int]],
) -> tuple[dict[str, Any], list[Measured], int]:
    """A run from an empty arena; the machine before and after; slots."""
    budget = cell[0]
    model = load(folder, system=system, budget=budget)
    profiles = [measure(model)]
    model.moecast.close()
    model = load(folder, system=system, budget=budget)
    start = time.perf_counter()
    tokens = continued(model, prompts, new_tokens)
    seconds = time.perf_counter() - start
    assert tokens == expected, cell
    engine = model.moecast.engine
    report, times = model.moecast.stats(), engine.stats
    figures = {
        "decode_seconds": list(times.decode_seconds),
        "prefill_seconds": list(times.prefill_seconds),
        "hit_rate": report["hit_rate"],
        "bytes_moved": report["bytes_moved"],
        "stall_seconds": report["stall_seconds"],
        "seconds": seconds,
    }
    profiles.append(measure(model))
    model.moecast.close()
    return figures, profiles, report["arena_slots"]


def compared(
    cell: Cell,
    system: SystemConfig,
    runs: Sequence[dict[str, Any]],
    profile: Measured,
    slots: int,
    steps: Sequence[CapturedStep],
    spec: ModelSpec,
) -> dict[str, Any]:
    """One row: live and simulated side by side."""
    predictor = systems_forecaster(system, spec, name=spec.model_id)
    stats = replay(steps, predictor, spec=spec, system=system, hardware=profile, budget_slots=slots)
    tpot = statistics.median([t for run in runs for t in run["decode_seconds"]])
    prefills = [t for run in runs for t in run["prefill_seconds"]]
    hits = statistics.median(run["hit_rate"] for run in runs)
    simulated = stats.as_dict()
    found = stats.total.hit_rate
    assert found is not None
    ratio = simulated["tpot_seconds"] / tpot
    return {
        "budget": cell[0],
        "system": cell[1],
        "slots": slots,
        "live": {
            "tpot_seconds": tpot,
            "tpot_seconds_of_each_run": [statistics.median(run["decode_seconds"]) for run in runs],
            "ttft_seconds": statistics.median(prefills),
            "hit_rate": hits,
            "bytes_moved": statistics.median(run["bytes_moved"] for run in runs),
            "stall_seconds": statistics.median(run["stall_seconds"] for run in runs),
        },
        "simulated": {
            "tpot_seconds": simulated["tpot_seconds"],
            "ttft_seconds": simulated["ttft_seconds"],
            "hit_rate": found,
            "bytes_moved": stats.total.bytes_moved,
            "stall_seconds": simulated["stall_seconds"],
        },
        "tpot_ratio": ratio,
        "hit_rate_difference": found - hits,
        "tpot_within": abs(ratio - 1) <= TPOT_WITHIN,
        "hits_within": abs(found - hits) <= HITS_WITHIN,
        "profile": profile.as_dict(),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Live and simulated side by side."""
    made = Table("budget", "system", "TPOT live", "simulated", "ratio", "hits live", "simulated")
    for row in rows:
        one, other = row["live"], row["simulated"]
        made.add_row(
            row["budget"],
            row["system"],
            f"{1e3 * one['tpot_seconds']:.2f} ms",
            f"{1e3 * other['tpot_seconds']:.2f} ms",
            f"{row['tpot_ratio']:.3f}" + ("" if row["tpot_within"] else " !"),
            f"{100 * one['hit_rate']:.2f} %",
            f"{100 * other['hit_rate']:.2f} %" + ("" if row["hits_within"] else " !"),
        )
    return made


def main(arguments: dict[str, str]) -> None:
    console = Console()
    folder, repetitions = arguments["model"], int(arguments.get("repetitions", "2"))
    new_tokens = int(arguments.get("new_tokens", "32"))
    prompts, _ = token_prompts(Path(folder), PROMPTS, seed=0)
    steps, expected, spec = recorded(folder, prompts, new_tokens)
    budgets = arguments.get("budgets", ",".join(BUDGETS)).split(",")
    named = {system.name: system for system in SYSTEMS}
    wanted = arguments.get("systems", ",".join(named)).split(",")
    cells: list[Cell] = [(budget, name) for budget in budgets for name in wanted]
    runs: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    profiles: dict[Cell, list[Measured]] = {cell: [] for cell in cells}
    slots: dict[Cell, int] = {}
    for _ in range(repetitions):
        for cell in cells:
            system = named[cell[1]]
            run, found, slots[cell] = live(folder, cell, system, prompts, new_tokens, expected)
            runs[cell].append(run)
            profiles[cell] += found
            console.print(f"{cell}: {run['seconds']:.1f} s", highlight=False)
    rows = [
        compared(
            cell, named[cell[1]], runs[cell], median_of(profiles[cell]), slots[cell], steps, spec
        )
        for cell in cells
    ]
    console.print(table(rows))
    report = {
        "machine": machine_facts(Path(folder)),
        "threads": torch.get_num_threads(),
        "repetitions": repetitions,
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "expert_bytes": sum(next(iter(profiles.values()))[0].chunk_bytes),
        "tpot_within": sum(row["tpot_within"] for row in rows),
        "hits_within": sum(row["hits_within"] for row in rows),
        "cells": len(rows),
        "rows": rows,
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
