"""The gap between LRU and Belady eviction that closes with what is known of coming tokens.

Held-out requests are replayed in one arena for all layers, nothing is prefetched. Policies that
know the true routing of the next tokens, and count beyond them, show what a forecaster would have
to know; learned predictors are compared with them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.config import LookaheadConfig
from benchmarks.reports import print_line, write_report
from collect.traces import Trace
from predictors.base import Predictor
from runtime.policy.counters import sum_counters
from runtime.presets import load_system
from train.eviction_eval import (
    SYSTEM,
    RoutedStream,
    gap_closed,
    record_stream,
    token_by_token,
)
from train.replay import first_tokens
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
    predictors: Sequence[tuple[str, RoutedStream]],
) -> list[LookaheadRow]:
    """Returns the rows of every policy on one stream.

    Args:
        predictors: Label and recorded answers of each learned predictor.
    """
    system = replace(load_system(SYSTEM), per_layer=False)
    rows = []
    for budget in BUDGETS:
        found = {
            policy: stream.replay(replace(system, eviction=policy), budget) for policy in COUNTING
        }
        for label, recorded in predictors:
            (kind,) = recorded.forecasts
            found[label] = recorded.replay(replace(system, eviction=kind), budget)
        belady = replace(system, eviction="belady")
        for known in KNOWN:
            informed = replace(belady, eviction_options={"known_steps": known + 1})
            found[f"next {known} known"] = stream.replay(informed, budget)
        found["belady"] = stream.replay(belady, budget)
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
            block = measure(prompts, name, stream, recorded)
            for policy in dict.fromkeys(row.policy for row in block):
                rates = [f"{row.hit_rate:.3f}" for row in block if row.policy == policy]
                print_line(f"{prompts:14} {name:12} {policy:20} {'  '.join(rates)}")
            rows += block
    seconds = round(time.perf_counter() - started, 1)
    write_report(config, traces=digests, seconds=seconds, rows=rows)
