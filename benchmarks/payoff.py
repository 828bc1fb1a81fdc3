"""`python -m benchmarks payoff`: does forecasting ever cost more than it gains?

moecast is to be at most 3 % slower than `on-demand`, whatever the format and the budget. Both are
loaded in one process and take turns request by request, so that a machine whose speed changes is as
fast for one as for the other. Each repetition loads them anew, with empty arenas, so that the trial
of the rule that decides (`runtime/policy/forecast_payoff.py`) and its mistakes are included.
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.config import PayoffConfig
from benchmarks.formats import FORMATS, pack_once
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError
from runtime.config import ModelConfig, StoreConfig
from runtime.engine.loading import LoadOptions, load_model
from runtime.engine.memory import freeze_objects
from runtime.policy.budget import Budget
from runtime.presets import load_system
from runtime.store.model_source import resolve
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.serve import PrefillMark, generate_tokens, wait_for_links
from runtime.tools.bench.tasks import BenchRequest, make_requests
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
    """95 %, over the requests of all repetitions in pairs; None for fewer than 5."""
    tokens_equal: bool

    @property
    def is_slower(self) -> bool:
        """Whether moecast is beyond the limit, as far as the requests can tell."""
        return (self.ratio_interval or (self.ratio,))[0] > LIMIT


@dataclass(frozen=True)
class Turn:
    """One request under both systems, in their order."""

    step_seconds: tuple[float, ...]
    """Mean times of a decode step."""
    tokens_equal: bool


def serve_in_turns(bench: BenchConfig, budget: str, requests: Sequence[BenchRequest]) -> list[Turn]:
    """Loads both systems and gives each request to one, then to the other."""
    turns = []
    with ExitStack() as stack:
        models = []
        for system in bench.system:
            options = LoadOptions(
                model=bench.model, system=system, budget=Budget.parse(budget), store=bench.store
            )
            models.append(load_model(options))
            stack.enter_context(models[-1].moecast)
        freeze_objects()
        for number, request in enumerate(requests):
            seconds, tokens = {}, {}
            # In both orders, because the second finds other caches of the processor.
            for i in ((0, 1), (1, 0))[number % 2]:
                engine = models[i].moecast.engine
                first = len(engine.stats.decode_seconds)
                tokens[i] = generate_tokens(models[i], request, PrefillMark(engine))
                seconds[i] = statistics.fmean(engine.stats.decode_seconds[first:])
                wait_for_links(engine)
            turns.append(Turn((seconds[0], seconds[1]), tokens[0] == tokens[1]))
    return turns


def compare(name: str, budget: str, turns: Sequence[Turn]) -> PayoffRow:
    on_demand, moecast = zip(*(turn.step_seconds for turn in turns), strict=True)
    return PayoffRow(
        format=name,
        budget=budget,
        on_demand_seconds=statistics.fmean(on_demand),
        moecast_seconds=statistics.fmean(moecast),
        ratio=sum(moecast) / sum(on_demand),
        ratio_interval=bootstrap_ratio(moecast, on_demand),
        tokens_equal=all(turn.tokens_equal for turn in turns),
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
            )
            requests, _ = make_requests(bench, resolve(model))
            for budget in config.budget:
                turns = [
                    turn
                    for _ in range(config.repetitions)
                    for turn in serve_in_turns(bench, budget, requests[1])
                ]
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
