"""What a served model computes on a device, whatever lies where.

It is bitwise what plain Transformers computes there with all weights on the device.
"""

from functools import cache

import pytest
import torch

from runtime.config import Exact, Quantise, SystemConfig
from runtime.hf.grouped import set_reference
from runtime.hf.loading import load_plain
from runtime.store.ggml.library import find_products
from runtime.store.ggml.matrix import QuantisedExpert
from tests.builders.gguf_files import gguf_file
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import pack_model
from tests.builders.quantised import QUANTISED, quantised
from tests.builders.served import serve, serving
from tests.builders.sim_device.backend import simulated

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
SHAPE = {"num_layers": 3, "num_experts": 12}
SYSTEMS = [
    "brainstorm", "deepspeed", "fmoe", "klotski", "lfu", "mixtral-offloading", "moecast",
    "moe-infinity-request", "moe-infinity-sequence", "on-demand", "promoe", "static", "token",
]  # fmt: skip


def computed(model, device):
    """Logits of two prompts, and of the steps after them."""
    tokens = TOKENS.to(device)
    steps = model.generate(tokens, output_logits=True, return_dict_in_generate=True, **GREEDY)
    return [value.cpu() for value in (model(tokens).logits, *steps.logits, steps.sequences)]


@cache
def expected_of(folder, device):
    """The same of plain Transformers, with all weights on the device."""
    return computed(plain_eager(folder).to(device), device)


def check(model, expected, device):
    with model.moecast as handle:
        found = computed(model, device)
        assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 6
        return handle.stats()


BUDGETS = [("12%", "12%"), ("30%", "100%"), ("60%", "20%"), ("100%", None)]
SERVED = [(name, "25%", "60%") for name in SYSTEMS] + [("moecast", *pair) for pair in BUDGETS]


@pytest.mark.parametrize(("system", "budget", "host_budget"), SERVED)
def test_system__changes_no_bit(folder, device, system, budget, host_budget):
    expected = expected_of(folder, device)
    options = {"system": system, "budget": budget, "host_budget": host_budget}
    stats = check(serve(folder, device=device, exact=Exact.EAGER, **options), expected, device)
    assert stats["misses"] > 0 or budget == "100%"


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def grouped(request, tmp_path_factory):
    """A model's folder, and what its grouped experts compute with all weights on the device."""
    folder = tiny_qwen2_moe(tmp_path_factory.mktemp("grouped"), **SHAPE, dtype=request.param)
    with simulated(), torch.no_grad():
        plain = plain_eager(folder).to("sim")
        assert set_reference(plain, Exact.AUTO) is Exact.GROUPED
        return folder, computed(plain, "sim")


@pytest.mark.parametrize("system", ["promoe", "on-demand", "moecast"])
@pytest.mark.usefixtures("sim")
def test_grouped__changes_no_bit(grouped, system):
    folder, expected = grouped
    for budget in ("12%", "100%"):
        options = {"budget": budget, "host_budget": "60%", "exact": Exact.GROUPED}
        model = serve(folder, device="sim", system=system, predictor="skip", **options)
        check(model, expected, "sim")


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.AUTO])
def test_devices__several_change_no_bit(folder, device, exact):
    """Where there is one GPU only, two arenas on it."""
    expected = expected_of(folder, device)
    last = torch.device(device.type, torch.accelerator.device_count() - 1)
    options = {"budget": "30%", "host_budget": "70%", "exact": exact}
    check(serve(folder, devices=[device, last], **options), expected, device)


@pytest.mark.usefixtures("sim")
def test_devices__experts_come_to_modules_with_a_loop_of_their_own(folder):
    with serving(folder, devices=["sim:0", "sim:1"], budget="50%", exact=Exact.EAGER) as model:
        engine, served = model.moecast.engine, model.moecast.experts[0]
        assert {arena.device.index for arena in engine.arenas if arena.device.index} == {1}
        for expert in range(12):
            found = {weight.device for weight in served.pin(expert).values()}
            assert found == {torch.device("sim:0")}


def test_tiers__many_steps_in_a_tiny_arena_change_no_bit(folder, device):
    """On a real device a thousand steps, on a simulated one fewer."""
    options = {**GREEDY, "max_new_tokens": 1000 if device.type != "sim" else 12}
    tokens, plain = TOKENS.to(device), plain_eager(folder).to(device)
    model = serve(folder, device=device, budget="12%", host_budget="50%", exact=Exact.EAGER)
    with model.moecast as handle:
        assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
        assert handle.stats()["misses"] > options["max_new_tokens"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: no copies to time")
def test_copies__run_beside_the_computation(tmp_path):
    """A time, which only a real device has."""
    folder = tiny_qwen2_moe(tmp_path / "model", num_experts=16, hidden_size=512)
    model, tokens = serve(folder, device="cuda", budget="25%", host_budget="100%"), TOKENS.cuda()
    with model.moecast, torch.no_grad():
        model(tokens)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(20):
                model(tokens)
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in profile.events()]
    copies = [span for span in spans if "Memcpy HtoD" in span[2]]
    kernels = [span for span in spans if "Memcpy" not in span[2] and "Memset" not in span[2]]
    assert copies
    assert any(a[0] < b[1] and b[0] < a[1] for a in copies for b in kernels)


def test_device__other_than_the_first_changes_no_bit(folder, sim):
    expected = computed(plain_eager(folder).to("sim:1"), "sim:1")
    check(serve(folder, device="sim:1", budget="30%", exact=Exact.EAGER), expected, "sim:1")
    assert sim.memories[0].peak_bytes == 0


@pytest.mark.parametrize("name", QUANTISED)
def test_store__quantised_checkpoints_change_no_bit(tmp_path, device, name):
    folder = quantised(tmp_path, name)
    expected = computed(load_plain(folder, dtype=torch.bfloat16).to(device), device)
    options = {"budget": "60%", "host_budget": "80%", "exact": Exact.EAGER, "dtype": "bfloat16"}
    check(serve(folder, device=device, **options), expected, device)


def check_budgets(folder, device, budgets, **options):
    """Budgets change no bit of what is computed with all experts there."""
    options |= {"device": device, "exact": Exact.EAGER}
    with serving(folder, budget="100%", **options) as resident:
        expected = computed(resident, device)
    check(serve(folder, **budgets, **options), expected, device)


@pytest.mark.parametrize("quantise", [Quantise(name) for name in ("none", "int4", "hqq")])
def test_store__packed_ones_have_the_bits_of_all_experts_there(tmp_path, device, quantise):
    folder = tiny_qwen2_moe(tmp_path / "model", **SHAPE, hidden_size=64, expert_width=96)
    store = pack_model(folder, tmp_path / "store", quantise=quantise)
    check_budgets(folder, device, {"budget": "30%", "host_budget": "60%"}, store=store)


@pytest.mark.parametrize("name", ["qwen3moe-Q4_0", "qwen3moe-BF16", "qwen3moe-wide-Q5_K_M"])
def test_store__gguf_files_have_the_bits_of_all_experts_there(device, name):
    # Decoding takes more memory than a tiny model's experts.
    size = {"qwen3moe-Q4_0": "28KiB", "qwen3moe-wide-Q5_K_M": "2100KiB"}.get(name)
    check_budgets(gguf_file(name), device, {"budget": size or "40%", "host_budget": size or "60%"})


def test_hybrid__computes_on_both_sides(folder, sim):
    """Both sides are the CPU's kernels here: no bit changes."""
    expected = expected_of(folder, torch.device("sim", 0))
    options = {"budget": "25%", "host_budget": "100%", "exact": Exact.EAGER}
    check(serve(folder, device="sim", system=SystemConfig(hybrid=True), **options), expected, "sim")


@pytest.mark.skipif(find_products() is None, reason="NO GGML LIBRARY")
def test_hybrid__in_host_memory_quantised_experts_are_multiplied_as_they_lie(sim, monkeypatch):
    """Elsewhere they are decoded: the results differ by the rounding of activations."""
    options = {"device": "sim", "exact": Exact.EAGER}
    file, tokens = gguf_file("qwen3moe-Q4_0"), TOKENS.to("sim")
    with serving(file, budget="100%", **options) as resident:
        expected = resident(tokens).logits.to("cpu")
    system = SystemConfig(hybrid=True, prefetch=False)
    with serving(file, budget="28KiB", host_budget="100%", system=system, **options) as model:
        compute, found = model.moecast.engine._host_compute, []
        take = compute.weights
        monkeypatch.setattr(compute, "weights", lambda *of: found.append(take(*of)) or found[-1])
        for _ in range(4):
            logits = model(tokens).logits.to("cpu")
        assert found
        assert all(isinstance(weights, QuantisedExpert) for weights in found)
    assert (logits - expected).norm() < 0.1 * expected.norm()
