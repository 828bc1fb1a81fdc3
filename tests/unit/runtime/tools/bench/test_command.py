"""The whole of `moecast bench` on a tiny random model, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from configs.program import run_program
from runtime.commands import bench
from runtime.commands.bench import NothingRan, TokensDiffer, check, run
from runtime.commands.pack import choose_coding
from runtime.config import ModelConfig, Quantise, StoreConfig, SystemConfig
from runtime.hf.forced_routing import MEANINGLESS
from runtime.presets import load_system
from runtime.store.packed.store import open_store
from runtime.tools.bench.bound import simulate_conditions
from runtime.tools.bench.config import BenchConfig
from runtime.tools.bench.tasks import BenchRequest, RequestsTask
from runtime.tools.verify import reference
from tests.builders.outcomes import outcome
from tests.builders.packed import packed

ORACLE = load_system("oracle")
COUNTING = SystemConfig(name="counting", predictor="dependency")
SKIPPING = SystemConfig(name="skipping", predictor="skip")
TRAINED = SystemConfig(name="trained", predictor="mlp")


def test_bench__continues_after_a_failed_variant_and_forces_routing(tiny, tmp_path, capsys):
    # The same two experts for every token of a layer: after the warm-up, nothing is missing.
    lines = [{"layer": layer, "experts": [layer, 5]} for layer in range(2)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    model, systems = ModelConfig(name="tiny", id=str(tiny)), [COUNTING, SKIPPING, TRAINED, ORACLE]
    options = {"budget": ["50%"], "max_new_tokens": 3, "warm_up_tokens": 2, "verify": True}
    options |= {"routing": log, "run_dir": tmp_path / "run"}
    config = BenchConfig(model=model, system=systems, **options)
    (tmp_path / "run").mkdir()
    results = json.loads(json.dumps(run(config), allow_nan=False))
    assert results["tokens_equal"] is results["equal_to_plain_transformers"] is True
    base, counting, skipping, trained, oracle, bound = results["rows"]
    names = [row["system"] for row in results["rows"]]
    assert names == ["on-demand", "counting", "skipping", "trained", "oracle", "bound"]
    for row in (skipping, trained):
        assert "looks at states, which a forced routing does not depend on" in row["failed"]
    assert (base["predictor"], counting["predictor"]) == (None, "dependency")
    assert (base["tpot_speed_up"], base["simulated"], oracle["simulated"]) == (1.0, False, True)
    for row in (base, counting):
        # 3 repetitions of one request: a prefill and 2 decode steps of 2 layers with top-2.
        assert (len(row["steps"]), row["num_requests"], row["arena_bytes"]) == (6, 3, 8 * 6144)
        assert row["tpot_interval_seconds"][0] < row["tpot_mean_seconds"]
        assert row["tpot_mean_seconds"] < row["tpot_interval_seconds"][1]
        assert row["tpot_p99_seconds"] >= row["tpot_p95_seconds"] >= row["tpot_seconds"] > 0
        known = row["weights_bytes"] + row["arena_bytes"]
        assert row["memory_beside_bytes"] == row["peak_memory_bytes"] - known
        assert 0 <= row["decode_stall_share"] < 1
    assert base["decode_predictor_share"] == 0.0 < counting["decode_predictor_share"] < 1
    assert oracle["decode_hit_rate"] == base["decode_hit_rate"] == 1.0
    assert (base["bytes_wasted"], results["note"]) == (0, MEANINGLESS)
    shown = capsys.readouterr()
    assert MEANINGLESS in shown.err
    assert MEANINGLESS in " ".join(shown.out.split())
    assert len(oracle["steps"]) == 2
    for time in ("tpot_mean_seconds", "ttft_mean_seconds"):
        assert 0 < bound[time] <= oracle[time] * (1 + 1e-9)
    page = (tmp_path / "run" / "report.html").read_text()
    for text in ("counting", "or has no zoo entry for tiny", MEANINGLESS):
        assert text in page
    assert (tmp_path / "run" / "tpot-distribution-50pct-batch-1.csv").is_file()


BAD_INPUT = [
    ("repetitions=2", "repetitions=2: must be at least 3"),
    ("batch_size=0", "batch_size=0: must be at least 1"),
    ("max_new_tokens=1", "max_new_tokens=1: must be at least 2"),
    ("budget=[]", "budget: must name at least one"),
    ("model.id=nowhere", "model 'nowhere' is not on this machine"),
]


@pytest.mark.parametrize(("argument", "said"), BAD_INPUT)
def test_bench__bad_input_is_one_line_and_exit_code_2(argument, said, capsys, tmp_path):
    assert run_program("runtime", ["bench", "system=lfu", argument, f"run_dir={tmp_path}"]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_bench__systems_that_know_the_future_are_left_out_on_an_accelerator(
    tiny, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(bench, "run_rounds", lambda *_, **__: [outcome("on-demand")])
    monkeypatch.setattr(bench, "simulate", None)
    results = run(BenchConfig(model=ModelConfig(name="tiny", id=str(tiny)), system=[ORACLE]))
    assert [row["system"] for row in results["rows"]] == ["on-demand"]
    assert results["measured"] is None
    assert "on a CPU, and runs compute on cuda" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("quantise", [Quantise.INT8, Quantise.HQQ])
def test_simulate_conditions__is_of_the_store_that_runs_read(tiny, tmp_path, quantise):
    store = packed(tiny, tmp_path / "store", coding=choose_coding(quantise, 16))
    given = {"model": ModelConfig(name="tiny", id=str(tiny)), "store": StoreConfig(path=store)}
    config = BenchConfig(system=[ORACLE], budget=["50%"], **given)
    request = BenchRequest(prompts=((5, 6, 7),), new_tokens=2, is_measured=True)
    found = simulate_conditions(RequestsTask(config=config, requests={1: [request]}))
    assert [row["failed"] for row in found["rows"]] == [None, None]
    opened = open_store(store, None)
    opened.close()
    assert found["hardware"]["chunk_bytes"] == (sum(opened.layouts[0].chunk_bytes),)
    assert found["hardware"]["chunk_bytes"] != (6144,)  # those of the checkpoint


def test_bench__refuses_plain_transformers_that_do_not_fit(tiny, monkeypatch):
    monkeypatch.setattr(reference, "available_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(bench, "run_rounds", None)
    model = ModelConfig(name="tiny", id=str(tiny))
    with pytest.raises(bench.MoecastError, match="plain Transformers needs.*verify=true"):
        run(BenchConfig(model=model, system=[SKIPPING], verify=True))


def test_check__another_token_is_an_error_that_names_the_place():
    same, other = [[[1, 2, 3]], [[4, 5, 6]]], [[[1, 2, 3]], [[4, 9, 6]]]
    arms = [outcome("on-demand", tokens=same), outcome("moecast", tokens=same, number=2)]
    check(arms, {})
    check(arms, {1: same})
    arms[1].runs[1] = replace(arms[1].runs[1], tokens=other)
    where = "request 1, row 0, new token 1: moecast, budget 50%, batch 1, run 2 gave 9, on-demand"
    with pytest.raises(TokensDiffer, match=where):
        check(arms, {})
    with pytest.raises(TokensDiffer, match=r"gave 2, plain Transformers gave 7"):
        check(arms[:1], {1: [[[1, 7, 3]], [[4, 5, 6]]]})
    # Rows of other batch sizes are other computations.
    check([arms[0], outcome("lfu", tokens=other, batch=2)], {})


def test_check__nothing_that_ran_is_an_error():
    failed = outcome("promoe", number=0)
    failed.failed = "no zoo entry"
    with pytest.raises(NothingRan, match="no zoo entry"):
        check([failed], {})
