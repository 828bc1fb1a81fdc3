"""The gap between LRU and Belady eviction that closes with what is known of coming tokens.

Held-out requests are replayed in one arena for all layers, nothing is prefetched. Policies that
know the true routing of the next tokens, and count beyond them, show what a forecaster would have
to know; learned predictors are compared with them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.config import LookaheadConfig
from benchmarks.reports import print_line, write_report
from collect.traces import Trace
from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.policy.counters import sum_counters
from runtime.sim.replay import replay
from train.eviction_eval import (
    ANY,
    RoutedStream,
    eviction_system,
    gap_closed,
    record_stream,
    replay_policy,
    token_by_token,
)
from train.replay import budget_slots, first_tokens
from zoo.load import load_predictor

BUDGETS = ("10%", "25%", "50%", "75%")
KNOWN = (1, 2, 4, 8, 16)
"""Tokens whose routing is known, after the one that is computed."""
COUNTING = ("lru", "regret")
EVERY_TOKEN, GENERATED = "every token", "generated"


@dataclass(frozen=True, kw_only=True)
class LookaheadRow:
    """Hit rate of one policy on one kind of prompts."""

    prompts: str
    stream: str
    """Every token alone, those of prompts too; or generated tokens, after their prompt's step."""
    policy: str
    budget: str
    hit_rate: float
    gap_closed: float | None


def measure(
    prompts: str,
    name: str,
    stream: RoutedStream,
    spec: ModelSpec,
    predictors: Sequence[tuple[str, RoutedStream]],
) -> list[LookaheadRow]:
    """Returns the rows of every policy on one stream.

    Args:
        predictors: Label and recorded answers of each learned predictor.
    """
    system = replace(eviction_system(), per_layer=False)
    rows = []
    for budget in BUDGETS:
        slots = budget_slots(budget, spec, ANY)
        simulate = partial(replay_policy, spec=spec, system=system, hardware=ANY, slots=slots)
        found = {policy: simulate(policy, stream) for policy in COUNTING}
        for label, recorded in predictors:
            (kind,) = recorded.forecasts
            found[label] = simulate(kind, recorded)
        for known in KNOWN:
            options = {"known_steps": known + 1}
            informed = replace(system, eviction="belady", eviction_options=options)
            found[f"next {known} known"] = replay(
                stream.steps, None, spec=spec, system=informed, hardware=ANY, budget_slots=slots
            )
        found["belady"] = simulate("belady", stream)
        rates = {
            policy: sum_counters(stats.decode).hit_rate or 0.0 for policy, stats in found.items()
        }
        rows += [
            LookaheadRow(
                prompts=prompts,
                stream=name,
                policy=policy,
                budget=budget,
                hit_rate=rate,
                gap_closed=gap_closed(rates["lru"], rate, rates["belady"]),
            )
            for policy, rate in rates.items()
        ]
    return rows


def run_lookahead(config: LookaheadConfig) -> None:
    """Measures every trace, and prints and writes the rows."""
    started = time.perf_counter()
    rows: list[LookaheadRow] = []
    digests: dict[str, str] = {}
    for prompts, folder in config.traces.items():
        trace = Trace.open(folder)
        digests[prompts] = trace.digest
        predictors: dict[str, Predictor] = {
            label: load_predictor(str(entry), spec=trace.spec)
            for label, entry in config.entries.items()
        }
        for name, cut in ((EVERY_TOKEN, token_by_token), (GENERATED, first_tokens)):
            steps = list(cut(trace.steps("held_out"), config.tokens))
            stream = record_stream(steps, (), trace.spec)
            recorded = [
                (label, record_stream(steps, [predictor], trace.spec))
                for label, predictor in predictors.items()
            ]
            block = measure(prompts, name, stream, trace.spec, recorded)
            for policy in dict.fromkeys(row.policy for row in block):
                rates = [f"{row.hit_rate:.3f}" for row in block if row.policy == policy]
                print_line(f"{prompts:14} {name:12} {policy:20} {'  '.join(rates)}")
            rows += block
    seconds = round(time.perf_counter() - started, 1)
    write_report(config, traces=digests, seconds=seconds, rows=rows)
