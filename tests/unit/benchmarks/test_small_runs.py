"""Small benchmarks run whole, on tiny models: their rows, their ratios and their tables."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import config as configs
from benchmarks import dequantise, drafts, lockstep, payoff, prefill
from benchmarks.gpu import run_gpu
from benchmarks.reports import command_line, read_document
from benchmarks.routing import run_routing
from benchmarks.tables import forecasting, formats, systems
from predictors.errors import MoecastError
from runtime.accelerator import find_accelerator
from runtime.errors import CheckpointError
from tests.builders.serving import speaking_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(speaking_model(tmp_path / "model"))


def test_drafts__are_measured_beside_their_bound(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two one two one two one"}) + "\n")
    sizes = {"prompts": 1, "new_tokens": 10, "repetitions": 1, "threads": torch.get_num_threads()}
    config = configs.DraftsConfig(
        kinds={"counting": prompts}, model=model, budget="50%", system="on-demand",
        output=tmp_path / "drafts.json", **sizes,
    )  # fmt: skip
    drafts.run_drafts(config)
    report = read_document(config.output)
    (row,) = report["rows"]
    assert (row["kind"], row["prompts"], row["same_tokens"]) == ("counting", 1, 1)
    right = {row["drafted"]: row for row in report["right"]}
    assert tuple(right) == (0, *drafts.RIGHT_DRAFTS)
    assert all(row["step_seconds"] > 0 and row["speed"] > 0 for row in right.values())

    text = "\n".join(forecasting.drafts_table(report, report))
    assert "| counting | " in text
    assert text.count("\n| 8 tokens, always right | ") == 1


def test_command__names_paths_by_their_last_part() -> None:
    entries = {"reuse": "/home/someone/entries/reuse", "regret": "qwen2-moe-tiny/reuse"}
    traces = {"docs": Path("/home/someone/traces/docs")}
    assert command_line("lookahead", configs.LookaheadConfig(traces=traces, entries=entries)) == (
        "python -m benchmarks lookahead traces={docs: docs} "
        "entries={reuse: reuse,regret: qwen2-moe-tiny/reuse}"
    )


def test_prefill__is_measured_beside_its_bounds(model, tmp_path, monkeypatch):
    sizes = {"prompts": 2, "prompt_tokens": 40, "threads": torch.get_num_threads()}
    places = {"model": model, "output": tmp_path / "prefill.json"}
    config = configs.PrefillConfig(budget="50%", system=["on-demand", "promoe"], **places, **sizes)
    # Its reads take seconds in every turn.
    monkeypatch.setattr("benchmarks.prefill.measure_bandwidth", lambda *_, **__: 1e9)
    prefill.run_prefill(config)
    report = read_document(config.output)
    assert [row["system"] for row in report["rows"]] == config.system
    assert report["disk_bytes_per_second"] == 1e9
    assert all(row["seconds"] > 0 and row["moved_mib"] > 0 for row in report["rows"])

    assert "| `promoe` | " in "\n".join(systems.prefill_table(report))


def test_prefill__takes_ratios_prompt_by_prompt() -> None:
    """The machine ran at a third of its speed in the second turn, which changes no ratio."""
    parts = {"seconds": 1.2, "compute_seconds": 0.5, "link_seconds": 1.0}
    turns = [{name: slower * part for name, part in parts.items()} for slower in (1, 3)]
    times = [prefill.PrefillTimes(**turn) for turn in turns]
    assert prefill.make_row("promoe", times, [1 << 20, 3 << 20]).over_bound == pytest.approx(1.2)


def test_payoff__fails_where_moecast_is_slower(model, tmp_path, monkeypatch):
    monkeypatch.setattr(payoff, "LIMIT", 0.0)
    sizes = {"repetitions": 1, "requests": 2, "new_tokens": 4, "output": tmp_path / "payoff.json"}
    config = configs.PayoffConfig(model=model, format=["float32"], budget=["75%"], **sizes)
    with pytest.raises(MoecastError, match="times as long: float32 at 75% "):
        payoff.run_payoff(config)
    (row,) = json.loads((tmp_path / "payoff.json").read_text())["rows"]
    assert row["tokens_equal"]
    assert row["ratio"] == pytest.approx(row["moecast_seconds"] / row["on_demand_seconds"])
    assert row["ratio_interval"] is None


def test_payoff__takes_its_interval_over_requests() -> None:
    row = {"format": "int8", "budget": "25%", "tokens_equal": True}
    row |= {"on_demand_seconds": 1.0, "moecast_seconds": 1.05, "ratio": 1.05}
    assert not payoff.PayoffRow(**row, ratio_interval=(1.01, 1.09)).is_slower


def test_lockstep__ratios_are_taken_within_each_round() -> None:
    """The machine ran at a third of its speed in the second round, which changes no ratio."""
    fast = {("eager", 1): 10.0, ("shared", 1): 8.0, ("shared", 8): 32.0}
    rounds = [{setting: 3 * rate for setting, rate in fast.items()}, fast]
    row = lockstep.make_row(rounds, "shared", 8, reference="eager")
    assert (row.over_one, row.over_reference) == (pytest.approx(4.0), pytest.approx(3.2))
    assert row.tokens_per_second == pytest.approx(64.0)


def test_lockstep__writes_a_row_for_each_setting_and_number(model, tmp_path, monkeypatch):
    """A report that cannot be written would be noticed after all measurements only."""
    monkeypatch.setattr(lockstep, "MODEL", model)
    output = tmp_path / "lockstep.json"
    settings = {"repetitions": 1, "steps": 1, "threads": torch.get_num_threads()}
    lockstep.run_lockstep(configs.LockstepConfig(output=output, clients=[2], **settings))
    rows = json.loads(output.read_text())["rows"]
    measured = [(row["exact"], row["clients"]) for row in rows]
    assert measured == [("eager", 1), ("eager", 2), ("shared", 1), ("shared", 2)]
    assert all(row["tokens_per_second"] > 0 for row in rows)


LOG = Path(__file__).parents[2] / "builders" / "routing_log" / "qwen3-30b-a3b.jsonl.gz"


def test_routing__starts_every_system_alike(tmp_path, capsys) -> None:
    output = tmp_path / "routing.json"
    config = configs.RoutingConfig(
        log=LOG, output=output, run_dir=tmp_path / "run", num_experts=128, origin="a test",
        budget=["25%"], workers=1, system=["moe-infinity-sequence", "moecast"],
    )  # fmt: skip
    run_routing(config)
    report = json.loads(output.read_text())
    assert (report["num_layers"], report["num_experts"], report["top_k"]) == (48, 128, 6)
    assert (report["num_requests"], report["log_origin"]) == (1, "a test")
    hits = {(row["start"], row["system"]): row["hit_rate"] for row in report["rows"]}
    served = ("on-demand", "moe-infinity-sequence", "moecast")
    assert set(hits) == {(start, one) for start in ("filled", "empty") for one in served}
    for one in served:
        assert hits["filled", one] > hits["empty", one]
    assert "every system starts with an empty cache" in capsys.readouterr().err


def test_dequantise__is_timed_beside_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    experts = {"mxfp4": (dequantise.make_mxfp4, ((64, 64),))}
    experts["fp8"] = (dequantise.make_fp8, ((128, 256),))
    monkeypatch.setattr(dequantise, "EXPERTS", experts)
    output, threads = tmp_path / "dequantise.json", torch.get_num_threads()
    config = configs.DequantiseConfig(repetitions=2, threads=threads, output=output)
    dequantise.run_dequantise(config)
    report = read_document(output)
    rows = report.rows
    assert [row["format"] for row in rows] == ["mxfp4", "fp8"]
    assert all(row["ours_seconds"] > 0 and row["speed"] > 0 for row in rows)

    assert "| mxfp4 | " in "\n".join(formats.dequantise_table(report))


@pytest.mark.skipif(find_accelerator() is not None, reason="there is an accelerator")
def test_gpu__says_that_there_is_none(tmp_path):
    output = tmp_path / "gpu.json"
    with pytest.raises(MoecastError, match="no CUDA or XPU device; device=cpu"):
        run_gpu(configs.GpuConfig(output=output, work=tmp_path / "work"))
    with pytest.raises(CheckpointError, match="sees no XPU device, but cpu"):
        run_gpu(configs.GpuConfig(output=output, work=tmp_path / "work", device="xpu"))
    assert not output.exists()
