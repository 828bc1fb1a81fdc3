"""The control plane's time is divided by section, and every contender is measured."""

from collections.abc import Iterator

import pytest

from benchmarks import reports
from benchmarks.control_plane import run, sections
from benchmarks.control_plane.config import ControlPlaneConfig
from benchmarks.control_plane.measure import PLAIN
from benchmarks.control_plane.model import SHAPES, RandomShape
from benchmarks.control_plane.sections import MODEL, SECTIONS, StepProfiler
from benchmarks.tables import systems


# Of files that are never compiled: compiled functions have no code objects.
def test_sections__name_files_that_exist() -> None:
    for starts in SECTIONS.values():
        for start in starts:
            assert (sections.ROOT / start).exists(), f"{start}: adapt SECTIONS"


def helper(number: int) -> int:
    return number


def inner() -> int:
    return helper(1)


def generate() -> Iterator[int]:
    yield helper(1)
    yield 2


def outer() -> int:
    return helper(2) + inner() + sum(generate())


def test_profiler__gives_time_to_the_innermost_section(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(sections.time, "perf_counter", lambda: next(ticks))
    sections_of = {outer: "engine", inner: "eviction", generate: "planning"}
    named = {function.__code__: section for function, section in sections_of.items()}
    profiler = StepProfiler(named)
    with profiler:
        outer()
    taken = profiler.take_seconds(0.0)
    # A second passes from one event to the next, and every event is one of the running section.
    # inner: helper's call and return, its own return. generate: helper's two, and that it yields
    # twice and returns.
    assert (taken["eviction"], taken["planning"]) == (3, 5)
    # outer: calls of helper, inner, sum, three of generate; returns of helper, sum, its own.
    assert (taken["engine"], taken["probes"]) == (9, 0)
    assert set(profiler.take_seconds(0.0).values()) == {0.0}, "they are taken once"
    with profiler:
        outer()
    # What reporting an event takes is subtracted.
    assert profiler.take_seconds(0.75)["engine"] == pytest.approx(0.25 * 9)


@pytest.mark.timeout(180)
def test_run__measures_every_system_and_survives_a_budget_that_fails(tmp_path, monkeypatch):
    tiny = RandomShape(num_layers=4, num_experts=8, top_k=2, hidden_size=32, expert_width=8)
    monkeypatch.setitem(SHAPES, "12x8", tiny)
    sizes = {"repetitions": 3, "steps": 2, "threads": 1}
    output = tmp_path / "control_plane.json"
    config = ControlPlaneConfig(shape=["12x8"], budget=["1KiB", "100%"], output=output, **sizes)
    run.run_control_plane(config)
    report = reports.read_document(config.output)
    failed, resident = report.cells
    assert "one step needs 2 experts" in (failed.failed or "")
    assert failed.rows == []
    assert [row.system for row in resident.rows] == [PLAIN, "on-demand", "promoe", "moecast"]
    plain, *served = resident.rows
    assert plain.over_plain == 1
    # Ten calls a step of four layers, which choose kernels and threads as those of the others do,
    # and some in each layer for the rotation and the KV cache, which are the process's.
    assert plain.calls < 10
    own = {name for name, seconds in plain.section_seconds.items() if seconds}
    assert own - {"probes"} == {MODEL, "experts function"}  # which look at the number of tokens
    for row in served:
        assert row.same_tokens
        assert row.hit_rate == 1
        assert row.calls > 10
        # Less the time of measuring them, which is a guess.
        assert {"probes", "experts function"} <= set(row.section_seconds)
    lines = systems.control_plane_table(report)
    assert any(line.startswith("4x8 at 1KiB was not measured: budget of") for line in lines)
    assert sum(line.startswith("| 4x8, 100% | ") for line in lines) == 1
    served[0]["same_tokens"] = False
    reports.write_report(config, machine=report.machine, cells=[resident])
    lines = systems.control_plane_table(reports.read_document(config.output))
    assert "4x8 at 100%: on-demand gave other tokens." in lines
