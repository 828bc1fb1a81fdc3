"""Decoding and recording next to another program on the same cores, for each OpenMP wait policy.

OpenMP's threads spin while they wait for each other, unless OMP_WAIT_POLICY=passive lets them
sleep: a spinning thread occupies a core that the other program needs. GNU's runtime, which
PyTorch's wheels for Linux use, can also spin briefly and then sleep (GOMP_SPINCOUNT).

The measured process serves and records the reference model, alone or next to a process that
generates with the same model and the same policy until it is killed. Conditions run in turns, and
ratios are taken within a turn, so that a machine that others use changes them little.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.config import ContentionConfig
from benchmarks.process import WorkerProcess, python_module, start_worker
from benchmarks.reports import (
    MachineFacts,
    command_line,
    default_threads,
    describe_machine,
    print_line,
    write_report,
)
from runtime.openmp import WAIT_POLICY

NEW_TOKENS = 16
ROUNDS = 3
"""Generations of a process after one to warm up; the median counts."""
RECORDED_PROMPTS = 12
ACTIVE = "active"
POLICIES: dict[str, dict[str, str]] = {
    ACTIVE: {},
    "brief": {"GOMP_SPINCOUNT": "1000"},
    "passive": {WAIT_POLICY: "passive"},
}
"""Variables of each policy; the others are unset. Without any, OpenMP's threads spin."""
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class ContentionTimes:
    """One process's measurements."""

    token_seconds: float
    """Time per output token."""
    recorded_tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class ContentionRow:
    is_alone: bool
    every: dict[str, list[ContentionTimes]]
    """Times by policy, in the order of the repetitions."""
    token_seconds: dict[str, float]
    """Medians over the repetitions, by policy."""
    recorded_tokens_per_second: dict[str, float]
    decoding_speedup: dict[str, float]
    """Times that decoding is faster than with `active`: medians of the repetitions' ratios, as are
    those of recording."""
    recording_speedup: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ContentionReport:
    command: str
    machine: MachineFacts
    what: str
    conditions: list[ContentionRow]


def run_contention(config: ContentionConfig) -> None:
    machine = describe_machine(default_threads())
    measured: dict[bool, dict[str, list[ContentionTimes]]] = {
        alone: {policy: [] for policy in POLICIES} for alone in (True, False)
    }
    for _ in range(config.repetitions):
        for alone, by_policy in measured.items():
            for policy, times in by_policy.items():
                times.append(measure(policy, alone=alone))
                print_line(f"{policy}, {'alone' if alone else 'next to another'}: {times[-1]}")
    report = ContentionReport(
        command=command_line("contention", config),
        machine=machine,
        what=f"reference model: {NEW_TOKENS} tokens with budget 25%, and {RECORDED_PROMPTS} "
        f"prompts recorded; active: no variable is set, brief: GOMP_SPINCOUNT=1000, passive: "
        f"{WAIT_POLICY}=passive, as moecast sets it",
        conditions=[summarise(alone, by_policy) for alone, by_policy in measured.items()],
    )
    write_report(config, report)


def summarise(is_alone: bool, every: dict[str, list[ContentionTimes]]) -> ContentionRow:
    def median_ratio(name: str, policy: str, *, inverse: bool) -> float:
        pairs = [
            (getattr(active, name), getattr(own, name))
            for active, own in zip(every[ACTIVE], every[policy], strict=True)
        ]
        return statistics.median(own / active if inverse else active / own for active, own in pairs)

    return ContentionRow(
        is_alone=is_alone,
        every=every,
        token_seconds={
            policy: statistics.median(run.token_seconds for run in times)
            for policy, times in every.items()
        },
        recorded_tokens_per_second={
            policy: statistics.median(run.recorded_tokens_per_second for run in times)
            for policy, times in every.items()
        },
        decoding_speedup={
            policy: median_ratio("token_seconds", policy, inverse=False) for policy in POLICIES
        },
        recording_speedup={
            policy: median_ratio("recorded_tokens_per_second", policy, inverse=True)
            for policy in POLICIES
        },
    )


def measure(policy: str, *, alone: bool) -> ContentionTimes:
    """Runs a process, next to a competitor unless it is alone; both have the policy."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if alone:
            return ContentionTimes(**start(policy, folder).finish(TIMEOUT_SECONDS))
        with compete(policy, folder):
            return ContentionTimes(**start(policy, folder).finish(TIMEOUT_SECONDS))


def start(policy: str, folder: Path, *, competes: bool = False) -> WorkerProcess:
    names = {name for variables in POLICIES.values() for name in variables}
    command = [
        "env",
        *(word for name in sorted(names) for word in ("-u", name)),
        *(f"{name}={value}" for name, value in POLICIES[policy].items()),
        *python_module("benchmarks.contention"),
    ]
    name = "competitor" if competes else "measured"
    return start_worker(command, {"competes": competes}, folder, name=name)


@contextmanager
def compete(policy: str, folder: Path) -> Iterator[None]:
    """Runs a process that generates without end while the caller measures."""
    competitor = start(policy, folder, competes=True)
    try:
        while not competitor.report.exists() and competitor.process.poll() is None:
            time.sleep(0.05)
        # Raises if it ended instead.
        if competitor.process.poll() is not None:
            competitor.read_report()
        yield
    finally:
        competitor.kill()


def measure_here(folder: Path) -> ContentionTimes:
    return ContentionTimes(
        token_seconds=time_decoding(lambda: None),
        recorded_tokens_per_second=time_recording(folder),
    )


def time_decoding(on_warm: Callable[[], object], *, rounds: int = ROUNDS) -> float:
    """Returns the median time per output token in seconds; calls `on_warm` after a first round."""
    import torch

    from benchmarks.greedy import generate_greedy
    from runtime import load
    from runtime.config import SystemConfig

    tokens = torch.arange(1, 33)[None]
    model = load("qwen2-moe-tiny", budget="25%", system=SystemConfig())
    with model.moecast:
        generate_greedy(model, tokens, NEW_TOKENS)
        on_warm()
        seconds: list[float] = []
        while len(seconds) < rounds:
            started = time.perf_counter()
            generate_greedy(model, tokens, NEW_TOKENS)
            seconds.append((time.perf_counter() - started) / NEW_TOKENS)
    return statistics.median(seconds)


def time_recording(folder: Path) -> float:
    """Returns the recorded tokens per second, without the loading of the model."""
    from collect.config import DataConfig
    from collect.recording import RecordingJob, recording_settings
    from collect.traces.layout import ALL_SIGNALS
    from runtime.config import ModelConfig

    data = DataConfig(num_prompts=RECORDED_PROMPTS, max_prompt_tokens=128, max_new_tokens=8)
    job = RecordingJob(
        ModelConfig(dtype="float32"),
        data,
        str(folder / "trace"),
        ALL_SIGNALS,
        recording_settings(data),
        "100%",
    )
    recorder = job.load()
    with recorder.model.moecast:
        started = time.perf_counter()
        arrays, _ = recorder.record(0)
        return len(arrays["request"]) / (time.perf_counter() - started)


def main(request: Path, report: Path) -> None:
    if json.loads(request.read_text())["competes"]:
        time_decoding(lambda: report.write_text("{}"), rounds=sys.maxsize)
    else:
        report.write_text(json.dumps(asdict(measure_here(report.parent))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
