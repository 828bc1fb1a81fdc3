"""`moecast evaluate` on a tiny trace: the whole command, and what it refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from collect.traces import Trace
from collect.traces.layout import ROUTING_SIGNALS
from configs.compose import compose_typed
from predictors.errors import MoecastError
from runtime.config import ShapeConfig, SystemConfig
from runtime.presets import load_system
from tests.builders.traces import make_trace
from train.config import EvaluateConfig
from train.evaluate.commands import evaluate
from train.evaluate.variants import with_popular_experts

ASKED = [
    *("system=lfu,oracle,token,promoe", "hardware=rtx4090-pcie4", "budget=40%,80%"),
    *("batch_size=1,2", "replay_tokens=12", "workers=1"),
]


@cache
def composed() -> EvaluateConfig:
    """Composing takes longer than replaying: once for all tests."""
    return compose_typed(EvaluateConfig, ASKED)[0]


def run(folder: Path, trace: Trace, *, systems: Sequence[str], **changes) -> dict:
    """The command's results, as they stand in results.json, with these systems alone."""
    config = composed()
    wanted = [one for one in config.system if one.name in systems]
    given = {"trace": trace.path, "run_dir": folder, "system": wanted, **changes}
    return json.loads(json.dumps(evaluate(replace(config, **given)), allow_nan=False))


def figures(results: dict) -> dict:
    """All that a replay decides."""
    return {key: results[key] for key in ("rows", "winners")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="module")
def results(folder, trace) -> dict:
    return run(folder, trace, systems=["oracle", "lfu", "token", "promoe"])


def test_evaluate__replays_every_system_in_every_condition(results) -> None:
    cells = [list(cell) for _, cell in groupby(results["rows"], itemgetter("budget", "batch"))]
    assert len(cells) == 2 * 2
    for here in cells:
        assert [one["system"] for one in here] == ["on-demand", "lfu", "token", "oracle"]
        assert here[0]["speedup_decode"] == 1.0
        for one in here:
            assert 0 < one["of_bound"] <= 1 + 1e-9
            assert one["of_bound"] == pytest.approx(one["bound_tpot_ms"] / one["tpot_mean_ms"])
            assert one["tpot_ms"] <= one["tpot_p95_ms"]
        # 40 % and 80 % of 32 experts of 17,301,504 bytes.
        slots = {"40%": 12, "80%": 25}[here[0]["budget"]]
        assert {one["peak_bytes"] for one in here} == {slots * 17_301_504}
        assert {one["new_tokens"] for one in here} == {12}
        assert all(0 <= one["stall_share"] <= 1 for one in here)


def test_evaluate__known_tokens_bring_the_oracle_to_the_bound(results) -> None:
    assert len(results["known"]) == 2 * 5
    for _, here in groupby(results["known"], itemgetter("budget")):
        shares = {one["system"]: one["of_bound"] for one in here}
        assert list(shares) == ["1", "2", "4", "8", "all"]
        assert shares["1"] < shares["all"] <= 1 + 1e-9
        assert shares["all"] > 0.8
    assert {standing["first"] for standing in results["winners"]} <= {"lfu", "token", "on-demand"}


def test_evaluate__names_what_cannot_be_replayed_and_why(results) -> None:
    assert "no zoo entry synthetic/stride" in results["missing"]["promoe"]
    assert "promoe" not in results["systems"]


def test_evaluate__moecast_and_counted_systems_need_only_routing(tmp_path) -> None:
    trace = make_trace(tmp_path / "trace", signals=ROUTING_SIGNALS)
    systems = [load_system(name) for name in ("moecast", "moe-infinity-request", "fmoe", "token")]
    changes = {"system": systems, "figures": False, "batch_size": [1]}
    results = run(tmp_path / "run", trace, systems=[], **changes)
    assert set(results["systems"]) == {"on-demand", "moecast", "moe-infinity-request", "token"}
    assert "hidden states" in results["missing"].pop("fmoe")
    assert {name: reason.rpartition("; ")[2] for name, reason in results["missing"].items()} == {
        "residual of moecast": "it forecasts with correlation instead",
        "reuse of moecast": "eviction uses its own counts instead",
    }


@pytest.mark.usefixtures("results")
def test_evaluate__report_holds_its_figures_and_loads_nothing(folder) -> None:
    latencies = ["tpot-against-budget", "ttft-against-budget", "tpot-distribution"]
    others = ["throughput-against-batch-size", "share-of-the-bound-against-known-tokens"]
    for name in [*latencies, *others]:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert len((folder / f"{name}.csv").read_text().splitlines()) > 2
    page = (folder / "report.html").read_text()
    assert "First system of each condition" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_evaluate__keeps_finished_replays(folder, results, trace) -> None:
    cells = sorted((folder / "replays").iterdir())
    before = {path: path.stat().st_mtime_ns for path in cells}
    lost = next(path for path in cells if json.loads(path.read_text())["part"] == "table")
    lost.unlink()
    again = run(folder, trace, systems=["oracle", "lfu", "token"], figures=False)
    after = {path: path.stat().st_mtime_ns for path in (folder / "replays").iterdir()}
    assert {path for path in after if after[path] != before[path]} == {lost}
    assert figures(again) == figures(results)


def test_evaluate__processes_give_the_same_figures(results, trace, tmp_path) -> None:
    again = run(tmp_path, trace, systems=["oracle", "lfu", "token"], figures=False, workers=2)
    assert figures(again) == figures(results)


def test_evaluate__replays_again_when_a_setting_changes(trace, tmp_path) -> None:
    small = {"systems": ["token"], "figures": False, "batch_size": [1]}
    more = {"replay_tokens": 3}, {"budget": ["80%", "60%"]}
    for num_cells, changed in zip((4, 8, 10), ({}, *more), strict=True):
        run(tmp_path, trace, **small, **changed)
        assert len(list((tmp_path / "replays").iterdir())) == num_cells


WRONG_USE = [
    ({"budget": ["25%", "1%"]}, "too small: one step needs 2 experts.*the least budget is"),
    ({"batch_size": [1, 0]}, "batch_size=0: must be at least 1"),
    ({"batch_size": [64]}, "batch_size=64: the trace .* has too few held-out requests"),
    ({"workers": 0}, "workers=0: must be at least 1"),
    ({"baseline": load_system("promoe")}, "baseline=promoe prefetches.*baseline=on-demand"),
    ({"shape": ShapeConfig()}, "shape=trace needs the traced model"),
    ({"predictor": "crystal"}, "unknown zoo entry 'crystal'"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_USE)
def test_evaluate__wrong_use_names_the_cause(trace, tmp_path, changes, words) -> None:
    with pytest.raises(MoecastError, match=words):
        run(tmp_path, trace, systems=["token"], **changes)


def test_static__keeps_the_experts_most_used_in_training(trace) -> None:
    counts = [[0] * 8 for _ in range(4)]
    for step in trace.steps("train"):
        for layer in range(4):
            for e in step.experts(layer).ravel().tolist():
                counts[layer][e] += 1
    static = SystemConfig(eviction="static", eviction_options={"buffers": 3})
    assert with_popular_experts(static, trace).eviction_options == {"buffers": 3, "counts": counts}
    first = SystemConfig(eviction="first-layers")
    assert with_popular_experts(first, trace) is first


def test_batches__are_unique_and_ascending() -> None:
    assert replace(composed(), batch_size=[8, 1, 8]).batches == [1, 8]
