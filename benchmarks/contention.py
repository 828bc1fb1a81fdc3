"""Time per token of two processes on the same cores, for each OpenMP wait policy.

Each process serves the reference model and generates, alone or next to another one like it.
OpenMP's threads spin while they wait for each other, unless OMP_WAIT_POLICY=passive lets them
sleep: a spinning thread occupies a core that the other process needs.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import ContentionConfig
from benchmarks.process import python_module, start_worker
from benchmarks.reports import (
    MachineFacts,
    command_line,
    describe_machine,
    print_line,
    write_report,
)

NEW_TOKENS = 24
ROUNDS = 3
"""Generations of a process after one to warm up; the median counts."""
VARIABLE = "OMP_WAIT_POLICY"
POLICIES = ("default", "passive")
PROCESSES = (1, 2)
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ContentionRow:
    policy: str
    processes: int
    token_seconds: float
    """Median over the repetitions."""
    every: list[float]


@dataclass(frozen=True, kw_only=True)
class ContentionReport:
    command: str
    machine: MachineFacts
    what: str
    conditions: list[ContentionRow]


def token_seconds(policy: str, processes: int) -> float:
    """Runs processes at the same time; returns the mean of their times per token."""
    # The default policy is the variable's absence.
    settings = [] if policy == "default" else [f"{VARIABLE}={policy}"]
    command = ["env", "-u", VARIABLE, *settings, *python_module("benchmarks.contention")]
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            start_worker(command, {}, Path(folder), name=f"process-{number}")
            for number in range(processes)
        ]
        reports = [worker.finish(TIMEOUT_SECONDS) for worker in workers]
    return statistics.mean(report["token_seconds"] for report in reports)


def run_contention(config: ContentionConfig) -> None:
    machine = describe_machine(os.cpu_count() or 1)
    conditions = [(policy, processes) for processes in PROCESSES for policy in POLICIES]
    measured: dict[tuple[str, int], list[float]] = {condition: [] for condition in conditions}
    for _ in range(config.repetitions):
        for policy, processes in conditions:
            seconds = token_seconds(policy, processes)
            measured[policy, processes].append(seconds)
            print_line(f"{policy}, {processes} at once: {1e3 * seconds:.1f} ms")
    report = ContentionReport(
        command=command_line("contention", config),
        machine=machine,
        what=f"reference model, budget 25%, {NEW_TOKENS} tokens; seconds per token",
        conditions=[
            ContentionRow(
                policy=policy,
                processes=processes,
                token_seconds=statistics.median(values),
                every=values,
            )
            for (policy, processes), values in measured.items()
        ],
    )
    write_report(config, report)


def generate(report: Path) -> None:
    """Measures in the child process."""
    import torch

    from benchmarks.greedy import generate_greedy
    from runtime import load

    model = load("qwen2-moe-tiny", budget="25%")
    tokens = torch.arange(1, 33)[None]

    def measure() -> float:
        start = time.perf_counter()
        generate_greedy(model, tokens, NEW_TOKENS)
        return (time.perf_counter() - start) / NEW_TOKENS

    measure()
    seconds = statistics.median(measure() for _ in range(ROUNDS))
    report.write_text(json.dumps({"token_seconds": seconds}))
    model.moecast.close()


if __name__ == "__main__":
    generate(Path(sys.argv[2]))
