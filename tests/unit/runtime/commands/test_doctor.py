"""`doctor`: files, bandwidths, recorded routing, and what it makes of them."""

import json
import os
import threading
import time
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from runtime.commands.doctor import estimate_hybrid, run
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.engine.forecasters import SystemPredictors
from runtime.errors import CheckpointError, PlanError, TransferError
from runtime.hf.layers import attach_experts, build_skip_predictor
from runtime.hf.loading import count_weight_bytes, load_stripped
from runtime.policy.budget import SlotRequirements
from runtime.profiling import bandwidth, facts
from runtime.profiling.bandwidth import FileBlocks, measure_disk_bandwidth, time_reads
from runtime.sim.step import ArrayStep
from runtime.store.base import OnDemandReader
from runtime.store.files import FileReader
from runtime.tools.doctor import check_files, record_routing, sweep_budgets
from runtime.transfer import thread_ring as arrivals
from tests.builders.families.build import save_family
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import assert_same
from tests.builders.simulated import toy_machine
from tests.builders.tokenizers import byte_fallback_tokenizer
from tests.unit.runtime.commands.test_config_plan import doctor_of


def test_doctor__report_of_a_model(tiny):
    config = doctor_of(tiny, budget=["1%", "50%", "100%"], seconds=2)
    report = json.loads(json.dumps(run(config), allow_nan=False))
    assert report["versions"]["torch"] == version("torch")
    # 16 neurons of 3 x 32 values of 4 bytes; 2 layers of 8.
    sizes = report["model"]
    assert (sizes["expert_bytes"], sizes["experts_bytes"]) == (6144, 16 * 6144)
    weights = {p.data_ptr(): p.nbytes for p in plain_eager(tiny).parameters()}
    assert sizes["non_expert_bytes"] >= sum(weights.values()) - 16 * 6144
    small, half, whole = report["outlook"]
    assert "the least budget is 12288 bytes" in small["error"]
    assert (half["slots"], whole["slots"]) == (8, 16)
    assert half["process_bytes"] == 8 * 6144 + sizes["non_expert_bytes"] + PROCESS_BYTES
    for name in ("on-demand", "moecast"):
        assert half["systems"][name]["hit_rate"] <= whole["systems"][name]["hit_rate"] <= 1
        assert 0 <= whole["systems"][name]["stall_share"] < 1
        assert half["systems"][name]["tpot_seconds"] >= whole["systems"][name]["tpot_seconds"] > 0
    # Everything fits on any machine that runs this.
    assert report["suggested_budget_bytes"] == 16 * 6144
    assert "3 prompts of random tokens" in report["outlook_rests_on"]


def test_doctor__names_no_command_that_a_model_cannot_run(tiny, tmp_path, capsys):
    nothing = save_family(tmp_path / "other", "openai_privacy_filter")
    for folder, is_named in ((tiny, True), (nothing, False)):
        run(doctor_of(folder, budget=["100%"], seconds=0.1))
        assert ("next: moecast generate" in capsys.readouterr().out) == is_named


def test_doctor__counts_a_draft_model(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", vocab_size=300)
    byte_fallback_tokenizer().save_pretrained(folder)
    config = doctor_of(folder, budget=["50%"], seconds=1)
    alone, drafted = run(config), run(replace(config, draft=str(folder)))
    assert "draft" not in alone["suggestion_rests_on"]
    # Keys and values of 2 layers and 2 heads, 8 wide, in float32.
    assert "1.0 MiB for the draft model" in drafted["suggestion_rests_on"]
    weights = drafted["outlook"][0]["process_bytes"] - alone["outlook"][0]["process_bytes"]
    assert weights == count_weight_bytes(plain_eager(folder))
    with pytest.raises(PlanError, match="draft=x: it is counted with a model whose weights are"):
        run(replace(config, draft="x", config_only=True))


def hardware(**times):
    """Everything else takes no time."""
    names = ("predictor_seconds", "transfer_per_byte", "layer_fixed", "expert_per_token")
    return toy_machine(chunk_bytes=(8,), **dict.fromkeys(names, 0.0) | times)


def test_hybrid__is_estimated_from_copies_and_products():
    """Of four experts, copies of 3 ms and products of 1 ms: one copied, three computed."""
    measured = hardware(expert_fixed=0.0004, expert_per_token=0.0006)
    model = {"top_k": 4, "expert_bytes": 3_000_000}
    (found,) = estimate_hybrid([1e9], model, measured)
    expected = {"experts_on_host": 3, "layer_seconds": 0.003, "layer_seconds_without": 0.012}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert estimate_hybrid([], model, measured) == []


@pytest.fixture
def on_demand(tiny):
    """A model, its layers and the store that their experts are read from."""
    stripped = load_stripped(tiny, "auto")
    with closing(stripped.open_store()) as store:
        attach_experts(stripped.layers, OnDemandReader(store))
        yield stripped.model, stripped.layers, store


def test_record__is_the_routing_of_generation(tiny, on_demand):
    model, layers, _ = on_demand
    steps = record_routing(model, [[5, 6, 7]], seconds=60)
    assert [len(step.tokens_T) for step in steps] == [3, *[1] * 47]
    plain, tokens = plain_eager(tiny), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits = plain(tokens, output_router_logits=True).router_logits
    for layer in (0, 1):
        expected = logits[layer].topk(2).indices.sort().values.numpy()
        assert np.array_equal(np.sort(steps[0].experts(layer)), expected)
        hidden_TD, weight = steps[0].gate_input(layer), layers[layer].router.weight
        assert hidden_TD.shape == (3, 32)
        assert np.allclose(steps[0].logits(layer), hidden_TD @ weight.detach().numpy().T, atol=1e-5)


def test_on_demand_reader__keeps_what_fits_and_reads_the_rest_again(on_demand, monkeypatch):
    *_, store = on_demand
    reads, read = [], store.read
    monkeypatch.setattr(store, "read", lambda *args: (reads.append(args[:2]), read(*args)))
    source = OnDemandReader(store, keep_bytes=2 * 6144)
    first = {e: {n: w.clone() for n, w in source.pin(0, e).items()} for e in (3, 4, 5, 6)}
    for expert in (5, 3, 6, 4):
        assert_same(source.pin(0, expert), first[expert])
    assert reads == [(0, 3), (0, 4), (0, 5), (0, 6), (0, 5), (0, 6)]


def test_on_demand_reader__never_keeps_what_could_not_be_read(on_demand, monkeypatch):
    *_, store = on_demand
    source = OnDemandReader(store, keep_bytes=6144)
    with monkeypatch.context() as patched:
        patched.setattr(store, "read", Mock(side_effect=TransferError("no disk")))
        with pytest.raises(TransferError):
            source.pin(0, 3)
    assert_same(source.pin(0, 3), OnDemandReader(store).pin(0, 3))


def test_record__stops_when_its_time_is_up(on_demand):
    assert 1 <= len(record_routing(on_demand[0], [[5, 6, 7], [8, 9]], seconds=1e-9)) <= 2


def test_outlook__figures_of_a_hand_made_case():
    # One layer computes 1 s, an expert 1 s, a transfer 10 s; experts 0, 1, 0, 1... of one token.
    steps = [ArrayStep(np.array([1]), np.array([0]), {0: np.array([[i % 2]])}) for i in range(6)]
    options = {
        "spec": SimpleNamespace(num_layers=1, num_experts=4, top_k=1, hidden_size=2),
        "hardware": hardware(transfer_fixed=10.0, layer_fixed=1.0, expert_fixed=1.0),
        "predictors": SystemPredictors(),
        "needs": SlotRequirements(experts={8: 4}, top_k=1),
        "resident_bytes": 100,
    }
    one, two = sweep_budgets(steps, budgets=["8", "16"], **options)
    assert one["slots"] == 1
    # Every step waits for its expert; with two slots, only the first two do.
    names = ("tpot_seconds", "ttft_seconds", "hit_rate", "stall_share")
    for found, figures in ((one, (12.0, None, 0.0, 60 / 72)), (two, (2.0, None, 4 / 6, 20 / 32))):
        assert found["systems"]["on-demand"] == dict(zip(names, figures, strict=True))
    assert two["process_bytes"] == 16 + 100 + PROCESS_BYTES


def test_skip_predictor__needs_one_matrix_for_each_layer(tmp_path):
    spec = SimpleNamespace(num_layers=2, num_experts=4, hidden_size=3)
    routers = [SimpleNamespace(weight=torch.full((4, 3), float(i))) for i in range(2)]
    layers = [SimpleNamespace(router=router, num_experts=4) for router in routers]
    assert build_skip_predictor(layers, {"spec": spec}).files()
    without = SimpleNamespace(router=SimpleNamespace(), num_experts=4)
    assert build_skip_predictor([layers[0], without], {"spec": spec}) is None


def test_files__truncated_missing_and_altered_are_reported(tiny, tmp_path):
    *others, last = sorted(tiny.glob("*.safetensors"))
    found = check_files(tiny, digests=True)
    assert found["files"] == len(others) + 1 > 1
    assert found["digests"] == f"0 of {len(others) + 1} files equal their known sha256"
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        check_files(tiny, digests=False)
    # As in the Hub's cache: a link to a blob that is named by its sha256.
    blob = last.rename(tmp_path / ("0" * 64))
    with pytest.raises(CheckpointError, match=rf"{last.name} of .* missing"):
        check_files(tiny, digests=False)
    blob.write_bytes(whole)
    last.symlink_to(blob)
    check_files(tiny, digests=False)
    with pytest.raises(CheckpointError, match=r"was altered: sha256 is .*, expected 0{64}"):
        check_files(tiny, digests=True)


def test_bandwidth__sizes_beyond_the_file_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "CELL_SECONDS", 0.01)
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    rows = measure_disk_bandwidth([file], seed=0)
    assert [row["read_bytes"] for row in rows] == [4 << 10, 64 << 10, 1 << 20, 8 << 20]
    rates = [[row[way] for way in ("direct", "cold", "cached")] for row in rows]
    assert min(rate for rates_of_size in rates[:3] for rate in rates_of_size) > 0
    assert rates[3] == [None] * 3


def test_timed_reads__are_several_at_once_and_stop_when_the_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "CELL_SECONDS", 0.0)
    monkeypatch.setattr(arrivals, "rings", None)
    both, places = threading.Barrier(2), []

    def read(_self, _file, offset, _target, what):
        assert what == "a measurement"
        places.append(offset)
        if len(places) <= 2:
            both.wait(60)
        time.sleep(0.05)

    monkeypatch.setattr(FileReader, "read", read)
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    # The first waits until another has begun: one at a time would never end.
    rate, done = time_reads(FileBlocks(file, 4096), first=3, most=16)
    assert rate > 0
    assert 1 <= done <= len(set(places)) == len(places) < 16


def test_processor__is_what_the_system_calls_it(tmp_path):
    cpuinfo, name = tmp_path / "cpuinfo", "processor\t: 0\nmodel name\t: A Fine Processor\n"
    assert facts.read_processor_name(cpuinfo)
    for flags, suffix in (("", ""), ("flags\t\t: fpu avx512f avx2\n", " with AVX-512")):
        cpuinfo.write_text(name + flags)
        assert facts.read_processor_name(cpuinfo) == f"A Fine Processor{suffix}"
