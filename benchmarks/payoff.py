"""`python -m benchmarks payoff`: does forecasting ever cost more than it gains?

moecast is to be at most 3 % slower than `on-demand`, whatever the format and the budget. Both serve
the same prompts in turns, each run in its own process from an empty arena, so that the trial of the
rule that decides (`runtime/policy/forecast_payoff.py`) and its mistakes are included.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.config import PayoffConfig
from benchmarks.formats import FORMATS, pack_once
from benchmarks.reports import describe_machine, print_line, write_report
from benchmarks.served import serve_once
from predictors.errors import MoecastError
from runtime.config import ModelConfig, StoreConfig
from runtime.presets import load_system
from runtime.store.model_source import resolve
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.tasks import ServedRun, ServeTask, make_requests
from runtime.tools.comparison import Case, Condition, Variant
from runtime.tools.intervals import Interval, bootstrap_ratio

SYSTEMS = ("on-demand", "moecast")
LIMIT = 1.03


@dataclass(frozen=True, kw_only=True)
class PayoffRow:
    """One format and budget; times are mean seconds of a decode step."""

    format: str
    budget: str
    on_demand_seconds: float
    moecast_seconds: float
    ratio: float
    """moecast's time over that of on-demand."""
    ratio_interval: Interval | None
    """95 %, over the requests of all repetitions; None for fewer than 5."""
    tokens_equal: bool

    @property
    def is_slower(self) -> bool:
        """Whether moecast is beyond the limit, as far as the requests can tell."""
        return (self.ratio_interval or (self.ratio,))[0] > LIMIT


def compare(name: str, budget: str, turns: Sequence[Sequence[ServedRun]]) -> PayoffRow:
    """Compares the runs of each turn, which are in the order of the systems."""
    first = turns[0][0]
    per_request = [
        np.concatenate(
            [np.reshape(turn[i].tpot_seconds, (len(first.ttft_seconds), -1)) for turn in turns]
        ).mean(axis=1)
        for i in range(len(SYSTEMS))
    ]
    on_demand, moecast = (float(means.mean()) for means in per_request)
    return PayoffRow(
        format=name,
        budget=budget,
        on_demand_seconds=on_demand,
        moecast_seconds=moecast,
        ratio=moecast / on_demand,
        ratio_interval=bootstrap_ratio(per_request[1].tolist(), per_request[0].tolist()),
        tokens_equal=all(run.tokens == first.tokens for turn in turns for run in turn),
    )


def run_payoff(config: PayoffConfig) -> None:
    """Raises MoecastError if moecast is slower than it may be, once the report is written."""
    unknown = set(config.format) - FORMATS.keys()
    if unknown:
        raise MoecastError(f"format={min(unknown)}: choose from {', '.join(FORMATS)}")
    machine, rows = describe_machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in config.format:
            how = FORMATS[name]
            model = replace(ModelConfig(id=config.model), dtype=how.dtype)
            store, _ = pack_once(model, how, Path(folder, name))
            bench = BenchConfig(
                model=replace(model, dense_format=how.dense),
                store=StoreConfig(path=store),
                system=[load_system(system) for system in SYSTEMS],
                requests=config.requests,
                max_new_tokens=config.new_tokens,
                warm_up_tokens=0,
                device="cpu",
            )
            requests, _ = make_requests(bench, resolve(model))
            for budget in config.budget:
                condition = Condition(budget, 1)
                cases = [Case(Variant(label=s.name, system=s), condition) for s in bench.system]
                tasks = [ServeTask(config=bench, case=c, requests=requests[1]) for c in cases]
                turns = []
                for turn in range(config.repetitions):
                    runs = {
                        i: serve_once(
                            tasks[i], [store], Path(folder, f"{name}-{budget}-{turn}-{i}")
                        )
                        for i in ((0, 1), (1, 0))[turn % 2]
                    }
                    turns.append([runs[0], runs[1]])
                row = compare(name, budget, turns)
                rows.append(row)
                print_line(
                    f"{name}, {budget}: on-demand {1e3 * row.on_demand_seconds:.2f} ms a token, "
                    f"moecast {1e3 * row.moecast_seconds:.2f}, ratio {row.ratio:.3f}"
                )
    write_report(config, machine=machine, rows=rows)
    slower = [f"{row.format} at {row.budget} ({row.ratio:.3f})" for row in rows if row.is_slower]
    if slower:
        raise MoecastError(f"moecast takes more than {LIMIT} times as long: {', '.join(slower)}")
