"""The parts of the server's benchmarks that can be checked without a server."""

import json
import os
from dataclasses import replace

import pytest

from benchmarks.reports import describe_machine, write_part
from benchmarks.serving import rows
from benchmarks.serving.arrivals import SystemRuns
from benchmarks.serving.attack import AttackLog
from benchmarks.serving.config import AttackConfig, ClientsConfig
from benchmarks.serving.replay import TimedCompletion
from benchmarks.serving.trace import choose_window, read_arrivals, scale_arrivals, scale_lengths
from benchmarks.tables import serving
from predictors.errors import MoecastError

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.6805900,30,1
"""


def test_trace__is_read_in_order_of_time_from_the_first(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    found = read_arrivals(path)
    sizes = [(one.prompt_tokens, one.new_tokens) for one in found]
    assert sizes == [(374, 44), (396, 109), (30, 1)]
    assert [one.seconds for one in found] == pytest.approx([0.0, 4.314579, 5.0])


def test_window__is_of_requests_in_a_row() -> None:
    every = [rows.Arrival(float(i), i, i) for i in range(50)]
    found = choose_window(every, 8, seed=1)
    start = found[0].prompt_tokens
    assert found == every[start : start + 8]
    assert choose_window(every, 8, seed=1) == found
    with pytest.raises(MoecastError, match="the trace has 50"):
        choose_window(every, 51, seed=1)


def test_scaled__keeps_the_pattern_and_has_the_rate() -> None:
    every = [rows.Arrival(s, n, n) for s, n in ((100, 10), (101, 30), (104, 20))]
    found = scale_arrivals(every, rate=0.5, prompt_tokens=40, new_tokens=4)
    assert [one.seconds for one in found] == pytest.approx([0, 1, 4])  # two more in four seconds
    assert [one.prompt_tokens for one in found] == [20, 60, 40]
    assert [one.new_tokens for one in found] == [2, 6, 4]
    # At least one token, and bounded.
    assert scale_lengths([0, 1, 1, 1, 997], mean=10) == [1, 1, 1, 1, 40]


def test_part__of_one_benchmark_leaves_the_others(tmp_path) -> None:
    output, machine = tmp_path / "serving.json", describe_machine(1)
    write_part(ClientsConfig(output=output), "clients", figure=1)
    write_part(AttackConfig(output=output, honest=5), "attack", figure=2, machine=machine)
    part = write_part(ClientsConfig(output=output), "clients", figure=3)
    parts = json.loads(output.read_text())
    assert parts["clients"] == part
    assert {name: part["figure"] for name, part in parts.items()} == {"attack": 2, "clients": 3}
    assert parts["attack"]["origin"]["command"] == "python -m benchmarks attack honest=5"
    assert parts["attack"]["machine"]["cores"] == os.cpu_count()


def test_system_runs__pool_their_repetitions() -> None:
    def answers(*seconds: float) -> list[TimedCompletion]:
        times = [{"ttft_seconds": s / 2, "e2e_seconds": s, "tpot_seconds": None} for s in seconds]
        return [TimedCompletion(**each, text="a") for each in times]

    counted = {"hits": 1.0, "joins": 0.0, "misses": 1.0, "bytes": 8.0, "stall_seconds": 0.5}
    runs = SystemRuns()
    runs.add(answers(1, 3), counted)
    runs.add(answers(4, 8), counted | {"hits": 5.0})
    runs.answers[0] = replace(runs.answers[0], tpot_seconds=0.25)
    summary = runs.summarize()
    assert summary.mean_of_each_repetition == [2, 6]
    end_to_end = summary.e2e_seconds
    assert (end_to_end.mean, end_to_end.p50, end_to_end.p90) == (4, 3.5, pytest.approx(6.8))
    assert (end_to_end.p99, end_to_end.all) == (pytest.approx(7.88), [1, 3, 4, 8])
    assert (summary.tpot_seconds.all, summary.counted.hit_rate) == ([0.25], 0.75)
    assert summary.counted.bytes == 16
    assert runs.texts == ("a",) * 4


def test_attack__is_reached_only_if_every_honest_request_is_answered() -> None:
    sizes = {"rss_bytes": 200 << 20, "anonymous_bytes": 200 << 20}
    same = rows.FootprintSample(**sizes, seconds=0.0, descriptors=5, threads=2)
    counts = {"asked": 9, "answered": 9, "wrong": 0, "refused": {"429": 2}, "failed": {}}
    honest = rows.HonestCounts(**counts, seconds_worst=3.0)
    peaks = {"peak_anonymous_bytes": 2**28, "peak_bytes": 2**28}
    memory = rows.LimitReport(**peaks, limit_bytes=465 << 20, was_killed=False)
    report = rows.AttackReport(
        minutes=60.0, honest=honest, hostile={"bombs": {"400": 1200}}, unexpected=0, memory=memory,
        health=rows.HealthReport(probes=10, failed=0, seconds_p99=0.1, seconds_worst=0.2),
        before=same, after=same, left={"running": 0.0}, threads_leaked=0, descriptors_leaked=0,
        ended=rows.ServerExit(seconds=1.0, exit_code=0, children_left=0), samples=[same] * 3,
    )  # fmt: skip
    assert report.is_reached
    _, _, measured = serving.attack_row(report)
    assert "9 of 9 answered, 0 wrong, 0 failed" in measured
    assert "2 times 429" in measured
    assert "200, 200, 200 MiB" in measured
    for wrong in (replace(honest, answered=8), replace(honest, wrong=1)):
        assert not replace(report, honest=wrong).is_reached
    assert not replace(report, unexpected=1).is_reached
    assert not replace(report, memory=replace(memory, was_killed=True)).is_reached
    assert not replace(report, left={"running": 1.0}).is_reached


def test_attack__tells_expected_answers_from_others() -> None:
    log = AttackLog()
    log.note("bombs", ["400", "429", "503"])
    log.note("idle", ["held", "closed"])
    assert log.unexpected == 0
    log.note("bombs", ["200", "500"])
    log.note("keys", ["200"])
    assert log.unexpected == 3
