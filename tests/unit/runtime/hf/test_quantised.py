"""Checkpoints that are not the parameters' own bytes."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
from transformers import AutoConfig
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from runtime.errors import CheckpointError, TransferError
from runtime.hf.loading import find_model_class, load_plain, load_stripped
from runtime.store.base import READERS, name_format
from runtime.store.conversion import ExpertConversion, measure_peak_bytes
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import FusedParameter, WeightPlan
from tests.builders.families.build import save_family
from tests.builders.memory import measure_allocated
from tests.builders.models import read_weights, set_fields, tiny_qwen2_moe
from tests.builders.packed import open_both, read_expert
from tests.builders.quantised import QUANTISED, quantise_fp8, quantised, rewrite
from tests.builders.served import serve, serving


@torch.no_grad()
def assert_same(model, plain):
    tokens = torch.randint(4, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", QUANTISED)
def test_store__a_slot_holds_what_the_library_dequantises(tmp_path, name, dtype):
    folder = quantised(tmp_path, name)
    plain = load_plain(folder, dtype=dtype)
    with serving(folder, budget="60%", dtype=str(dtype).removeprefix("torch.")) as model:
        store, plans = model.moecast.engine.store, load_stripped(folder, "auto").plans
        for layer, expert in product(range(len(plans)), (0, 7, 3)):
            weights = read_expert(store, layer, expert)
            for key, parameter in ((key, plan.parameter) for key, plan in plans[layer].items()):
                whole = plain.get_parameter(parameter.target).view(parameter.shape)[expert]
                assert weights[key].dtype == whole.dtype == dtype
                assert torch.equal(weights[key], whole)
                assert whole.float().abs().sum() > 0
        assert_same(model, plain)


@pytest.mark.parametrize(("name", "share"), [("qwen3_moe", 0.6), ("gpt_oss", 0.4)])
def test_load__quantised_experts_keep_their_bytes(tmp_path, name, share, caplog):
    """Tiny matrices have many scales and biases; of real ones the shares are .50 and .27."""
    folder = quantised(tmp_path, name)
    store, decoding = open_both(folder)
    for kept, decoded in zip(store.layouts, decoding.layouts, strict=True):
        assert kept.num_bytes < share * decoded.num_bytes
        assert decoded.views_are_weights
    assert store.scratch_bytes == 0, "nothing is converted on the way"
    assert name_format(store.layouts[0]) == {"qwen3_moe": "float8_e4m3fn", "gpt_oss": "uint8"}[name]
    assert name_format(decoding.layouts[0]) == "bfloat16"
    with caplog.at_level("INFO"), serve(folder, budget="100%").moecast as handle:
        slots = store.num_layers * store.num_experts
        assert handle.engine.arenas[0].num_bytes == slots * store.layouts[0].num_bytes
    assert "experts stay quantised in memory, as the checkpoint has them" in caplog.text


@pytest.mark.parametrize("name", QUANTISED)
def test_convert__scales_that_are_no_numbers_are_refused(tmp_path, name):
    """As float32, as float8_e8m0fnu, and as bytes, of which 255 stands for NaN."""

    def spoil(key, tensor):
        if "scale" in key and ".experts." in key:
            tensor = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 255)
        return {key: tensor}

    folder = rewrite(quantised(tmp_path, name), spoil)
    store = load_stripped(folder, "auto").open_store(decodes=True)
    with pytest.raises(TransferError, match="_scale.*: a scale is not finite; fetch it again"):
        read_expert(store, 1, 0)
    refused = pytest.raises(TransferError, match="a scale is not finite")
    with serving(folder, budget="60%") as model, refused:
        model(input_ids=torch.tensor([[5, 6, 7]]))


def test_store__layers_left_unquantised_are_read_too(tmp_path):
    """`modules_to_not_convert`: such layers have weights without scales."""
    folder = save_family(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    kept = read_weights(folder)
    quantise_fp8(folder)

    def restore(name, tensor):
        if not name.startswith("model.layers.1."):
            return {name: tensor}
        return {name: kept[name]} if name in kept else {}

    rewrite(folder, restore)
    with serving(folder, budget="50%") as model:
        banks = load_stripped(folder, "auto").plans
        assert {len(bank["down_proj"].sources) for bank in banks} == {1, 2}
        assert_same(model, load_plain(folder, dtype=torch.bfloat16))


def recipe_of(operations, *, shape, stored, num_experts=4):
    parameter = FusedParameter("layer.experts", "w", (num_experts, *shape), torch.float32)
    converter = WeightConverter(["w"], ["w"], operations) if operations else None
    extent = StoredTensor(None, 0, 4, torch.float32, stored, "w")
    return WeightPlan(parameter, {"w": [extent]}, converter)


def test_check__operations_across_experts_are_refused():
    recipe_of([Transpose(1, 2)], shape=(2, 3), stored=(4, 3, 2)).check()
    with pytest.raises(CheckpointError, match="no byte range of this checkpoint"):
        recipe_of([Transpose(0, 1)], shape=(4, 3), stored=(4, 4, 3)).check()
    with pytest.raises(CheckpointError, match="no byte range of this checkpoint"):
        recipe_of([], shape=(2, 3), stored=(5, 2, 3)).check()


def test_check__a_checkpoint_of_another_size_is_refused():
    with pytest.raises(CheckpointError, match=r"is \(2, 3\) by the configuration, \(2, 4\) in"):
        recipe_of([], shape=(2, 3), stored=(4, 2, 4)).check()
    parameter = FusedParameter("layer.experts", "w", (4, 4, 3), torch.float32)
    shapes = {"gate": (2, 3), "up": ()}
    sources = {it: [StoredTensor(None, 0, 4, torch.float32, shapes[it], it)] * 4 for it in shapes}
    joined = WeightConverter(list(sources), ["w"], [MergeModulelist(dim=0), Concatenate(dim=1)])
    with pytest.raises(CheckpointError, match=r"is \(4, 3\) by the .*, \(2, 3\) and \(\) in the"):
        WeightPlan(parameter, sources, joined).check()


MIXED = [
    ("experts.3.down_proj.weight", lambda t: t[:-1], r"3\.down_proj.* all experts of a layer"),
    ("down_proj.weight_scale_inv", lambda t: t.repeat(3, 1), "Fp8Dequantize.* cannot read"),
    # The library joins all experts of a layer before it dequantises them.
    ("1.mlp.experts.3.up_proj.weight", lambda t: t.bfloat16(), r"3\.up_proj.* torch\.bfloat16"),
]


@pytest.mark.parametrize(("end", "change", "message"), MIXED)
def test_load__experts_that_do_not_go_together_are_named(tmp_path, end, change, message):
    folder = quantised(tmp_path, "qwen3_moe")
    rewrite(folder, lambda name, t: {name: change(t) if name.endswith(end) else t})
    with pytest.raises(CheckpointError, match=message):
        serve(folder)


INCOMPLETE = [
    ("qwen3_moe", "weight_scale_inv", r"q_proj\.weight .*nothing without weight_sc"),
    ("qwen3_moe", "1.mlp.experts.3.up_proj.weight_scale_inv", r"3\.up_proj.*scale_inv"),
    ("qwen3_moe", "gate_proj.weight_scale_inv", r"0\.gate_proj\.weight .* nothing"),
    ("minimax_m2", "experts.7.w2.weight_scale_inv", r"experts\.7\.w2\.weight_scale_inv"),
    ("gpt_oss", "1.mlp.experts.gate_up_proj_scales", r"up_proj_blocks.*without gate_up_"),
    ("gpt_oss", "1.mlp.experts.down_proj_blocks", r"proj_scales.*without down_proj_blocks"),
]


@pytest.mark.parametrize(("kind", "gone", "text"), INCOMPLETE)
@pytest.mark.parametrize("load", [load_stripped, load_plain], ids=["served", "plain"])
def test_load__quantised_numbers_without_their_scales_are_refused(tmp_path, load, kind, gone, text):
    folder = quantised(tmp_path, kind)
    rewrite(folder, lambda name, tensor: {} if name.endswith(gone) else {name: tensor})
    with pytest.raises(CheckpointError, match=text):
        load(folder, dtype="auto")


def test_load__scales_that_the_configuration_does_not_know_are_refused(tmp_path):
    folder = quantised(tmp_path, "qwen3_moe")
    set_fields(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match="quantization_config"):
        load_stripped(folder, "auto")


def test_scratch__is_that_of_the_expert_that_takes_most(tmp_path):
    folder = tiny_qwen2_moe(tmp_path, dtype=torch.bfloat16)
    rewrite(folder, lambda name, t: {name: t.float() if ".experts.5.up_proj" in name else t})
    assert load_stripped(folder, "bfloat16").open_store().scratch_bytes == READERS * 16 * 32 * 4


def test_find_model_class__dequantises_quantised_checkpoints(tmp_path):
    """With a GPU Transformers would keep fp8 and mxfp4 for kernels that take whole banks."""
    for name in ("qwen3_moe", "gpt_oss"):
        _, config = find_model_class(AutoConfig.from_pretrained(quantised(tmp_path / name, name)))
        assert config.quantization_config["dequantize"] is True


# ---- memory


def slot_with_expert(store, expert=0):
    slot = torch.zeros(store.layouts[0].num_bytes, dtype=torch.uint8)
    store.read(0, expert, range(len(store.layouts[0].chunks)), slot)
    return slot


SAVES = dict.fromkeys(QUANTISED, quantised)
SAVES |= dict.fromkeys(["qwen3_vl_moe", "inkling"], partial(save_family, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "save"), SAVES.items(), ids=SAVES)
def test_scratch__is_what_the_allocator_says(tmp_path, name, save):
    """For all parameters of an expert one after another, as `pack` converts them."""
    store = load_stripped(save(tmp_path, name), "auto").open_store(decodes=True)
    assert store.scratch_bytes > 0
    slot_with_expert(store)
    most = measure_allocated(lambda: slot_with_expert(store, 1)) - store.layouts[0].num_bytes
    assert most <= store.scratch_bytes
    assert store.scratch_bytes <= 2 * most, "and not much more: it is taken from the budget"


@pytest.mark.parametrize("name", QUANTISED)
def test_decoded_bytes__are_what_the_allocator_says(tmp_path, name):
    """Decoding takes memory where the expert is computed, out of the same budget."""
    with serving(quantised(tmp_path, name), budget="100%") as model:
        store = model.moecast.engine.store
        layout, slot = store.layouts[0], slot_with_expert(store)
        layout.weights(slot)
        most = measure_allocated(lambda: layout.weights(slot))
        assert most <= layout.decoded_bytes <= 1.2 * most
        arenas = sum(arena.num_bytes for arena in model.moecast.engine.arenas)
        assert model.moecast.stats()["arena_bytes"] == arenas + layout.decoded_bytes


def test_peak_bytes__counts_what_lives_at_once():
    def computation():
        a = torch.zeros(1000, dtype=torch.uint8)  # 1,000
        b = a.to(torch.float32)  # + 4,000
        del a
        c = b.view(10, 100)
        del b
        return (c + 1).sum()  # 4,000 + 4,000

    assert 8000 <= measure_peak_bytes(computation) <= 8016


def test_read__one_thread_converts_at_a_time(tmp_path, monkeypatch):
    store = load_stripped(quantised(tmp_path, "qwen3_moe"), "auto").open_store(decodes=True)
    running, most = [], []

    convert = ExpertConversion.convert

    def watched(*args):
        running.append(1)
        most.append(len(running))
        converted = convert(*args)
        running.pop()
        return converted

    monkeypatch.setattr(ExpertConversion, "convert", watched)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: read_expert(store, 0, i % 8, chunks=[range(2)]), range(4 * 8)))
    assert most == [1] * (4 * 8 * 2)
