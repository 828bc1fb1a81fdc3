"""Measures the pieces of `docs/capacity.md` and computes its figures from them.

Takes five minutes of two cores: recordings of some prompts, a training, and replays.
"""

import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.capacity.recordings import (
    LongTracePlan,
    RecordedRun,
    RecordingCost,
    compare_runs,
    record_prompts,
    train_predictors,
)
from benchmarks.capacity.replays import ReplayRequest, measure_replays
from benchmarks.config import CapacityConfig
from benchmarks.papers.paper_context import describe_model
from benchmarks.reports import describe_machine, print_line, write_report
from collect.traces import Trace
from collect.traces.layout import ALL_SIGNALS, ROUTING_SIGNALS, row_bytes
from predictors.spec import ModelSpec
from predictors.units import MIB
from runtime.presets import load_shape

PART_BYTES = 256 * MIB
"""`data.shard_mib`, at its default."""
FILES_PER_PART = 2
"""The columns, and the requests that they are from."""
MODEL = "qwen2-moe-tiny"
REAL_SIZE = "qwen3-30b-a3b"
EPOCHS = 1
"""A trace of this size is read once; the reference model's predictors read theirs five times."""

REPLAYED_STEPS = 1_000_000
REPLAY_CORES = 2
PAIRS = 3
"""Pairs of recordings, a short and a long one; the median of their differences is reported."""
PROMPTS = (3, 24)
"""Prompts of the two recordings of a pair."""
REPLAY_PROMPTS = 120
"""Prompts of the recording that is replayed; a part of them is held out."""
REPLAY_TOKENS = 200
"""Generated held-out tokens in a replay."""
REPLAYS = 11
"""Replays of each system in each process; the median of their times is reported."""
TRACE_TOKENS = 10**9
"""Tokens of the planned trace."""


def record_pairs(folder: Path) -> tuple[list[tuple[RecordedRun, RecordedRun]], ModelSpec]:
    """Records a short and a long trace several times; returns the costs and the traced model."""
    pairs = []
    for repetition in range(PAIRS):
        runs = []
        for prompts in PROMPTS:
            run = record_prompts(prompts, folder / f"{repetition}-{prompts}")
            print_line(f"{run.tokens} tokens: {run.cpu_seconds:.1f} s of processor time")
            runs.append(run)
        pairs.append((runs[0], runs[1]))
    trace = Trace.open(folder / f"0-{PROMPTS[-1]}" / "trace", verify=False)
    return pairs, trace.spec


def plan_traces(spec: ModelSpec, cost: RecordingCost) -> list[LongTracePlan]:
    """Plans traces of the reference model, and of a real one, whose recording was not measured."""
    seconds = statistics.median(cost.core_seconds_per_token)
    real = describe_model(load_shape(REAL_SIZE), dtype="bfloat16")
    plans = [
        ("all signals", MODEL, cost.bytes_per_token, seconds),
        ("routing only", MODEL, row_bytes(spec, ROUTING_SIGNALS), None),
        ("all signals", REAL_SIZE, row_bytes(real, ALL_SIGNALS), None),
        ("routing only", REAL_SIZE, row_bytes(real, ROUTING_SIGNALS), None),
    ]
    return [
        LongTracePlan(
            name=f"{model}, {signals}",
            tokens=TRACE_TOKENS,
            num_bytes=TRACE_TOKENS * bytes_per_token,
            files=FILES_PER_PART * math.ceil(TRACE_TOKENS * bytes_per_token / PART_BYTES),
            core_hours=None if seconds is None else TRACE_TOKENS * seconds / 3600,
        )
        for signals, model, bytes_per_token, seconds in plans
    ]


def run_capacity(config: CapacityConfig) -> None:
    machine = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder:
        pairs, spec = record_pairs(Path(folder))
        replayed = record_prompts(REPLAY_PROMPTS, Path(folder, "replayed"))
        trace = f"{folder}/replayed/trace"
        print_line(f"training on {replayed.tokens} tokens")
        training = train_predictors(MODEL, trace, Path(folder, "trained"))
        print_line(f"replaying held-out requests of {replayed.tokens} tokens")
        request = ReplayRequest(
            trace=trace, model=MODEL, new_tokens=REPLAY_TOKENS, repetitions=REPLAYS
        )
        replays = measure_replays(request, Path(folder, "replays"), cores=REPLAY_CORES)
    cost = compare_runs(pairs, planned_bytes_per_token=row_bytes(spec, ALL_SIGNALS))
    write_report(
        config,
        machine=machine,
        recordings=pairs,
        recording=cost,
        part_bytes=PART_BYTES,
        traces=plan_traces(spec, cost),
        epochs=EPOCHS,
        training=training,
        replays=replays,
        replayed_steps=REPLAYED_STEPS,
        replay_cores=REPLAY_CORES,
    )
