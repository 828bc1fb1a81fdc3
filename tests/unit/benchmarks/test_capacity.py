"""The arithmetic of docs/capacity.md, by hand."""

import itertools

import pytest

from benchmarks.capacity import recordings
from benchmarks.capacity.replays import BUDGETS, SYSTEMS, ReplayRequest, measure_replays
from benchmarks.capacity.run import plan_traces
from configs.program import run_program
from runtime.compiled import is_compiled
from tests.builders.entries import tiny_spec


def recorded(tokens: int, cpu_seconds: float) -> recordings.RecordedRun:
    counts = {"prompts": 1, "parts": 1, "tokens": tokens, "num_bytes": 50 * tokens}
    return recordings.RecordedRun(**counts, cpu_seconds=cpu_seconds)


def test_recording__leaves_out_the_start_and_takes_the_median() -> None:
    pairs = [(recorded(100, 7.0), recorded(1100, seconds)) for seconds in (9.0, 10.0, 17.0)]
    cost = recordings.compare_runs(pairs, planned_bytes_per_token=48)
    assert (cost.core_seconds_per_token, cost.bytes_per_token) == ([0.002, 0.003, 0.01], 50.0)


def test_traces__have_disk_files_and_cores() -> None:
    sizes = {"bytes_per_token": 50.0, "planned_bytes_per_token": 50}
    cost = recordings.RecordingCost(**sizes, core_seconds_per_token=[0.001])
    every, routing, *_ = plan_traces(tiny_spec(), cost)
    assert every.num_bytes == 5e10
    assert every.files == 2 * 187  # parts of 256 MiB: each its columns, and its requests
    assert every.core_hours == pytest.approx(10**6 / 3600)
    assert routing.core_hours is None
    assert routing.num_bytes < every.num_bytes


def test_training__speed_counts_every_epoch() -> None:
    def part(steps: int, seconds: float) -> dict:
        run = {"kinds": ["mlp", "reuse"], "networks": 7, "batch_size": 256}
        return {**run, "steps": steps, "seconds": seconds}

    document = {"origin": {"machine": "two cores"}, "training": part(100, 64.0)}
    document["keeping"] = {"training": {"reuse": part(100, 6.4)}}
    both, reuse = recordings.read_training(document)
    assert (both.token_visits, both.seconds) == (25_600, 64.0)
    assert (reuse.token_visits, reuse.seconds) == (25_600, 6.4)
    assert both.what == "mlp, reuse (7 networks together)"


def test_replays__are_measured_compiled_and_not(tmp_path, monkeypatch) -> None:
    def run_here(command: list[str], **_: object) -> None:
        assert run_program("collect", command[command.index("collect") + 1 :]) == 0

    monkeypatch.setattr(recordings, "run_program", run_here)
    recordings.record_prompts(4, tmp_path)
    asked = {"trace": str(tmp_path / "trace"), "model": "qwen2-moe-tiny", "new_tokens": 4}
    costs = measure_replays(ReplayRequest(**asked, repetitions=2), tmp_path / "replays", cores=1)
    measured = {(cost.system, cost.budget, cost.is_compiled) for cost in costs}
    assert measured == set(itertools.product(SYSTEMS, BUDGETS, {is_compiled(), False}))
    for cost in costs:
        assert cost.decode_steps >= 4
        assert len(cost.step_seconds) == 2
        assert min(cost.step_seconds) > 0
