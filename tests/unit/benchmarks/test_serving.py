"""The parts of the server's benchmarks that can be checked without a server."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving.arrivals import Arm
from benchmarks.serving.distributions import cumulative, page_of
from benchmarks.serving.replay import Answer
from benchmarks.serving.results import here, keep
from benchmarks.serving.soak import minutes_of, slope
from benchmarks.serving.trace import Arrival, lengths, read, scaled, window
from benchmarks.tables import serving
from predictors.errors import MoecastError

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.6805900,30,1
"""


def test_trace__is_read_in_order_of_time_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    found = read(path)
    assert [(one.prompt_tokens, one.new_tokens) for one in found] == [
        (374, 44),
        (396, 109),
        (30, 1),
    ]
    assert [one.seconds for one in found] == pytest.approx([0.0, 4.314579, 5.0])


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", TRACE.replace("396", "many")])
def test_trace__that_is_none_names_the_file_and_where_to_get_one(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    if not content:
        path.unlink()
    with pytest.raises(MoecastError, match=r"trace\.csv.*AzurePublicDataset"):
        read(path)


def test_window__is_of_requests_in_a_row() -> None:
    every = [Arrival(float(i), i, i) for i in range(50)]
    found = window(every, 8, seed=1)
    start = found[0].prompt_tokens
    assert found == every[start : start + 8]
    assert window(every, 8, seed=1) == found
    with pytest.raises(MoecastError, match="the trace has 50"):
        window(every, 51, seed=1)


def test_scaled__keeps_the_pattern_and_has_the_rate() -> None:
    every = [Arrival(s, n, n) for s, n in ((100, 10), (101, 30), (104, 20))]
    found = scaled(every, rate=0.5, prompt_tokens=40, new_tokens=4)
    assert [one.seconds for one in found] == pytest.approx([0, 1, 4])  # two more in four seconds
    assert [one.prompt_tokens for one in found] == [20, 60, 40]
    assert [one.new_tokens for one in found] == [2, 6, 4]


def test_lengths__are_at_least_one_and_cut_where_they_are_far_above_the_mean() -> None:
    found = lengths([0, 1, 1, 1, 997], mean=10)
    assert found == [1, 1, 1, 1, 40]


def test_slope__is_of_the_second_half_by_the_hour() -> None:
    rising = [{"seconds": 36.0 * i, "rss_bytes": 10**6 + 100 * max(0, i - 50)} for i in range(101)]
    found = slope(rising, "rss_bytes")
    assert found["bytes_per_hour"] == pytest.approx(10_000, rel=0.05)
    assert found["percent_per_hour"] == pytest.approx(1.0, rel=0.05)
    assert slope(rising[:3], "rss_bytes")["bytes_per_hour"] is None


def test_minutes__are_medians() -> None:
    samples = [
        {"seconds": float(s), "rss_bytes": r, "anonymous_bytes": r, "descriptors": 5, "threads": 2}
        for s, r in ((0, 1), (30, 9), (59, 2), (60, 7))
    ]
    assert [(one["minute"], one["rss_bytes"]) for one in minutes_of(samples)] == [(0, 2), (1, 7)]


def test_results__of_one_benchmark_leave_the_others(tmp_path: Path) -> None:
    output = tmp_path / "serving.json"
    keep("storm", {"a": 1}, {"output": str(output)}, here())
    keep("queue", {"b": 2}, {"output": str(output), "requests": "5"}, here())
    keep("storm", {"a": 3}, {"output": str(output)}, here())
    found = json.loads(output.read_text())
    assert {name: (one.get("a"), one.get("b")) for name, one in found.items()} == {
        "queue": (None, 2),
        "storm": (3, None),
    }
    assert found["queue"]["command"] == "python -m benchmarks.serving.queue requests=5"
    assert found["queue"]["machine"]["cores"] == os.cpu_count()


def test_page__has_a_curve_for_each_system(tmp_path: Path) -> None:
    def system(*times: float) -> dict:
        one = {"p50": 1.0, "p99": 2.0, "all": list(times)}
        counted = {"hit_rate": 0.5, "bytes": 2**30}
        return {
            "e2e_seconds": one,
            "ttft_seconds": one,
            "tpot_seconds": one,
            "counted": counted,
        }

    results = {
        "requests": 2,
        "trace": "t.csv",
        "rate": 0.5,
        "repetitions": 1,
        "model": "m",
        "budget": "25%",
        "systems": {"on-demand": system(3, 1), "moecast": system(2, 1)},
    }
    page_of(results).write(tmp_path)
    csv = (tmp_path / "cdf-end-to-end.csv").read_text().splitlines()
    assert csv[1:] == ["on-demand,1,0.5", "on-demand,3,1.0", "moecast,1,0.5", "moecast,2,1.0"]
    assert (tmp_path / "cdf-first-token.png").stat().st_size > 1000
    assert cumulative([5.0]) == [(5.0, 1.0)]


def test_arm__puts_its_repetitions_together() -> None:
    def answers(*seconds: float) -> list[Answer]:
        return [
            Answer(ttft_seconds=one / 2, e2e_seconds=one, tpot_seconds=None, new_tokens=1, text="a")
            for one in seconds
        ]

    arm = Arm()
    arm.add(answers(1, 3), {"hits": 1.0, "joins": 0.0, "misses": 1.0, "bytes": 8.0})
    arm.add(answers(4, 8), {"hits": 5.0, "joins": 0.0, "misses": 1.0, "bytes": 8.0})
    arm.answers[0] = replace(arm.answers[0], tpot_seconds=0.25)
    found = arm.summary()
    assert found["mean_of_each_repetition"] == [2, 6]
    assert found["e2e_seconds"] == {
        "mean": 4, "p50": 3.5, "p90": pytest.approx(6.8), "p99": pytest.approx(7.88),
        "all": [1, 3, 4, 8],
    }  # fmt: skip
    assert found["tpot_seconds"]["all"] == [0.25]
    assert found["counted"]["hit_rate"] == 0.75
    assert found["counted"]["bytes"] == 16
    assert arm.said == ("a",) * 4


def test_tables__say_what_was_reached_and_leave_out_what_was_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    footprint = {"rss_bytes": 100 * 2**20}
    found = {
        "fuzz": {"cases": 1234, "statuses": {"200": 1, "500": 2, "503": 1}, "wrong": [{}] * 3},
        "disconnects": {
            "requests": 1000,
            "left": {"running": 0.0, "pinned": 2.0},
            "before": footprint,
            "after": {"rss_bytes": 103 * 2**20},
            "threads_leaked": 0,
            "descriptors_leaked": 1,
        },
        "clients": {
            "clients": {
                "openai": {"version": "3.5", "works": True},
                "litellm": {"works": None, "why": "no environment"},
            }
        },
    }
    monkeypatch.setattr(serving, "result", lambda _: found)
    lines = [line for line in serving.withstood() if line.startswith("|")][2:]
    assert len(lines) == 3
    assert "1,234 requests" in lines[0]
    assert "3 of 500 or above, 3 wrong" in lines[0]
    assert "2 left; threads +0, descriptors +1, memory +3 MiB" in lines[1]
    assert "openai works, litellm not run" in lines[2]
    assert serving.arrivals() == []
    monkeypatch.setattr(serving, "result", lambda _: None)
    assert serving.withstood() == serving.arrivals() == []
