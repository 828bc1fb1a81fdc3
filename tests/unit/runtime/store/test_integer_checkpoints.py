"""GPTQ, AWQ and compressed-tensors checkpoints: the integers that a file has are those computed."""

import json
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.errors import CheckpointError, TransferError
from runtime.hf.loading import load_plain, load_stripped
from runtime.store.base import name_format
from runtime.store.ggml.library import find_products
from runtime.store.integer_scheme import IntegerScheme, find_scheme
from runtime.store.packed.coding import RAW
from tests.builders import integers
from tests.builders.memory import measure_allocated
from tests.builders.models import read_weights, set_fields
from tests.builders.packed import assert_same, open_both, pack_model, read_expert
from tests.builders.quantised import rewrite
from tests.builders.served import serve_logits, serving

FEW, MANY = (
    torch.randint(4, 90, (2, number), generator=torch.Generator().manual_seed(1))
    for number in (9, 32)
)
"""Tokens of two prompts; of many, some choose any expert."""


def dequantised_weights(original: Path, packed: Path, name: str) -> dict[str, Tensor]:
    """By the library for its own format; by rounding the original weights anew for the others."""
    weights = read_weights(original)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    if name.startswith("compressed-tensors"):
        return decompress_with_library(packed, config)
    how = {"bits": config["bits"], "group": config["group_size"], "scale_dtype": torch.float16}
    found = {}
    for key, weight in weights.items():
        if key.endswith("_proj.weight"):
            q, *groups = integers.round_weight(weight, symmetric=config.get("sym", False), **how)
            scales, zeros = (t.repeat_interleave(how["group"], 1) for t in groups)
            found[key] = (q - zeros) * scales
    return found


def decompress_with_library(packed: Path, config: dict) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in read_weights(packed).items():
        module, _, part = key.rpartition(".")
        modules[module][part] = tensor
    whole = {name: parts for name, parts in modules.items() if "weight_packed" in parts}
    return {f"{n}.weight": compressor.decompress(it, scheme)["weight"] for n, it in whole.items()}


@pytest.fixture(scope="module", params=integers.FORMATS)
def checkpoint(request, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder, and the weights that it stands for."""
    if request.param.startswith("compressed-tensors"):
        pytest.importorskip("compressed_tensors")
    folder = tmp_path_factory.mktemp("checkpoint")
    original = integers.save_wide(folder / "original")
    packed = integers.save_integers(folder / "packed", request.param)
    return packed, dequantised_weights(original, packed, request.param)


def assert_near(found: Tensor, weight: Tensor) -> None:
    """A minimum is rounded to float16, the weight to bfloat16; a step of int4 is 30 times this."""
    assert (found - weight).abs().max() <= 1.5 * 2**-8 * weight.abs().amax()


def test_load__weights_are_those_of_the_library(checkpoint):
    """Attention bit by bit; experts up to the rounding of minima to float16."""
    folder, expected = checkpoint
    stripped = load_stripped(folder, "auto")
    for name, weight in stripped.model.named_parameters():
        if name in expected:
            assert torch.equal(weight, expected[name].to(weight.dtype))
    store, decoding = stripped.open_store(), stripped.open_store(decodes=True)
    for expert in (0, 5):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (expected[f"{prefix}.{it}_proj.weight"] for it in ("gate", "up", "down"))
        wanted = {"gate_up_proj": torch.cat([gate, up]), "down_proj": down}
        exact, found = read_expert(decoding, 1, expert), read_expert(store, 1, expert)
        for name, weight in wanted.items():
            assert torch.equal(exact[name], weight.to(exact[name].dtype))
            assert_near(found[name].float(), weight.float())


def test_load__integers_stay_integers_in_memory(checkpoint, request):
    """Kernels multiply what they can take; the rest is decoded, and has few bytes too."""
    store, decoding = open_both(checkpoint[0])
    *_, kind = integers.FORMATS[request.node.callspec.params["checkpoint"]]
    layout, parts = store.layouts[0], store.layouts[0].parts
    if kind is None:
        assert {part.coding for part in parts} == {RAW}
        return
    assert {part.coding.kind for part in parts} == {kind}
    assert (name_format(layout), layout.views_are_weights) == (kind, find_products() is not None)
    rooms = [sum(p.num_bytes for p in parts), decoding.layouts[0].num_bytes]
    assert rooms[0] < (0.6 if kind == "Q8_0" else 0.35) * rooms[1]


@torch.no_grad()
def logits_of(model, tokens: Tensor = FEW) -> Tensor:
    return model(tokens).logits


def test_model__is_the_librarys_up_to_roundings_at_every_budget(checkpoint):
    """The same bits whatever is cached, and close to Transformers with dequantised weights."""
    folder, expected = checkpoint
    plain_folder = integers.save_wide(folder.parent / "plain")
    rewrite(plain_folder, lambda name, t: {name: expected.get(name, t).to(t.dtype)})
    wanted, answers = logits_of(load_plain(plain_folder, dtype=torch.bfloat16)), []
    for budget in ("40%", "100%"):
        with serving(folder, budget=budget, dtype="bfloat16") as model:
            answers.append(logits_of(model))
            assert torch.equal(answers[-1], answers[0])
            assert torch.equal(answers[-1], logits_of(model))
    # Eight bits of mantissa in scales and activations; random logits have a deviation near 1. The
    # median: roundings differ between CPUs, and where they decide a near tie of two experts, the
    # logits of that token and of some after it are quite different ones.
    assert (answers[0].float() - wanted.float()).abs().median() <= 0.02 * wanted.float().std()


def change_tensor(folder: Path, name: str, change) -> None:
    rewrite(folder, lambda key, t: {key: t} if name not in key else change(key, t))


DAMAGED = [
    ("experts.3.up_proj.scales", lambda *_: {}, r"experts\.3\.up_proj\.scales is missing"),
    ("layers.1.self_attn.q_proj.qweight", lambda *_: {}, r"1.*q_proj\.qweight is missing"),
    ("q_proj.scales", lambda k, t: {k: t[:, 1:]}, r"q_proj\.scales.* does not fit"),
    ("q_proj.qweight", lambda k, t: {k: t.long()}, r"q_proj\.qweight.* not a matrix of int32"),
    ("3.up_proj.qweight", lambda k, t: {k: t[:, 8:]}, r"s\.3\.up_proj\.scales.* does not fit"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGED)
def test_load__damaged_tensors_are_named(tmp_path, name, change, message):
    folder = integers.quantise_gptq(integers.save_wide(tmp_path))
    change_tensor(folder, name, change)
    with pytest.raises(CheckpointError, match=message):
        load_stripped(folder, "auto")


def test_read__zero_points_that_the_configuration_denies_are_refused(tmp_path):
    folder = integers.quantise_gptq(integers.save_wide(tmp_path), bits=8, group=64)
    change_tensor(folder, "experts.0.down_proj.qzeros", lambda k, t: {k: t + 1})
    with pytest.raises(TransferError, match=r"experts\.0\.down_proj\.weight.*zero points"):
        read_expert(load_stripped(folder, "auto").open_store(), 0, 0)


SENSELESS = {
    "nan": ("scales", lambda it: it * float("nan"), "a scale is not finite"),
    "inf": ("scales", lambda it: it * float("inf"), "a scale is not finite"),
    # Act-order that the configuration does not mention.
    "order": ("g_idx", lambda it: it.flip(0), "its g_idx"),
}


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("part", "change", "message"), SENSELESS.values(), ids=SENSELESS)
def test_read__scales_and_orders_of_no_sense_are_refused(tmp_path, group, part, change, message):
    folder = integers.quantise_gptq(integers.save_wide(tmp_path / "model"), group=group)
    change_tensor(folder, f"1.mlp.experts.5.up_proj.{part}", lambda k, t: {k: change(t)})
    store = load_stripped(folder, "auto").open_store()
    read_expert(store, 1, 4)
    with pytest.raises(TransferError, match=rf"experts\.5\.up_proj\.weight: {message}"):
        read_expert(store, 1, 5)
    change_tensor(folder, f"0.self_attn.q_proj.{part}", lambda k, t: {k: change(t)})
    with pytest.raises(TransferError, match=rf"q_proj\.weight: {message}"):
        load_stripped(folder, "auto")


@pytest.mark.parametrize("gone", ["weight_scale", "weight_packed", ""])
def test_load_plain__names_what_packed_weights_lack(tmp_path, gone):
    """The library makes up a scale, and does not say which expert is missing."""
    pytest.importorskip("compressed_tensors")
    folder = integers.quantise_compressed_tensors(integers.save_wide(tmp_path))
    change_tensor(folder, f"layers.1.mlp.experts.3.up_proj.{gone}", lambda *_: {})
    with pytest.raises(CheckpointError, match=rf"1\.mlp\.experts\.3\.up_proj\.{gone}"):
        load_plain(folder, dtype=torch.bfloat16)


def test_load_plain__says_that_transformers_cannot(tmp_path):
    with pytest.raises(CheckpointError, match="does not read AWQ checkpoints"):
        load_plain(integers.quantise_awq(integers.save_wide(tmp_path)), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["gptq", "awq", "gptq int8"])
def test_scratch__is_what_the_allocator_says(tmp_path, name):
    """Repacking takes memory out of the budget, of two threads at once."""
    store = load_stripped(integers.save_integers(tmp_path / "model", name), "auto").open_store()
    read_expert(store, 0, 0)
    slot = torch.zeros(store.layouts[0].num_bytes, dtype=torch.uint8)
    chunks = range(len(store.layouts[0].chunks))
    most = measure_allocated(lambda: store.read(0, 1, chunks, slot))
    # At this size two thirds of it are blocks for transposition, which not every format needs.
    assert 2 * most <= store.scratch_bytes <= 5 * most


def leave_plain(folder: Path, expert: int, part: str = "") -> Path:
    """Put an expert's own weights of layer 1 in place of its integers, as quantisers may."""
    weights = read_weights(integers.save_wide(folder.parent / "own"))

    def change(key: str, _: Tensor) -> dict[str, Tensor]:
        name = f"{key.rpartition('.')[0]}.weight"
        return {name: weights[name]}

    change_tensor(folder, f"model.layers.1.mlp.experts.{expert}.{part}", change)
    return folder


@pytest.mark.parametrize(("name", "expert"), [("gptq", 0), ("gptq int8", 5), ("awq", 5)])
def test_store__one_expert_that_is_plain_is_served_among_quantised_ones(tmp_path, name, expert):
    folder = leave_plain(integers.save_integers(tmp_path / "model", name), expert)
    store, decoding = open_both(folder)
    kind = integers.FORMATS[name][2]
    formats = [kind, "bfloat16", kind]
    assert [name_format(layout) for layout in store.layouts] == formats
    for number in range(8):
        assert_same(read_expert(store, 1, number), read_expert(decoding, 1, number))
    packed, answers = pack_model(folder, tmp_path / "store"), []
    bytes_of_all = 8 * sum(layout.num_bytes for layout in store.layouts)
    for options in ({}, {"budget": "100%"}, {"store": packed}, {"host_budget": "70%"}):
        with serving(folder, **{"budget": "40%", **options}) as model:
            answers.append(logits_of(model, MANY))
            served = model.moecast.engine.store.layouts  # packed, they keep the integers
            assert [name_format(layout) for layout in served] == formats
            if "budget" in options:  # only the one layer's experts take more
                assert model.moecast.engine.arenas[0].num_bytes == bytes_of_all
                assert model.moecast.stats()["evictions"] == 0
    assert all(torch.equal(answers[0], answer) for answer in answers[1:])


@pytest.mark.parametrize("part", ["gate_proj.", "up_proj.", "down_proj."])
def test_model__one_matrix_that_is_plain_is_served_among_integers(tmp_path, part):
    folder = leave_plain(integers.quantise_gptq(integers.save_wide(tmp_path / "model")), 5, part)
    store, decoding = open_both(folder)
    for number in (0, 5):
        found, exact = read_expert(store, 1, number), read_expert(decoding, 1, number)
        for name, weight in exact.items():
            assert_near(found[name].float(), weight.float())
    assert torch.equal(*[serve_logits(folder, MANY, budget=budget) for budget in ("40%", "100%")])


DYNAMIC = [
    ({"-:.*mlp.gate.*": {}}, True),
    ({"-:.*experts.5.*": {}, r".*\.0\..*": {"group_size": 32, "bits": 4}}, True),
    ({r".*\.0\..*": {"bits": 8}}, False),
    ({r"+:.*\.0\..*": {"desc_act": True}}, False),
    ("x", False),
]


@pytest.mark.parametrize(("dynamic", "is_served"), DYNAMIC)
def test_load__options_of_modules_that_change_nothing_are_served(tmp_path, dynamic, is_served):
    folder = integers.quantise_gptq(integers.save_wide(tmp_path / "m"), dynamic=dynamic)
    leave_plain(folder, 5)
    with nullcontext() if is_served else pytest.raises(CheckpointError, match="GPTQ and dynamic"):
        assert load_stripped(folder, "auto").holds_integers


@pytest.mark.parametrize("order", ["static", "weight", "rows"])
def test_load__orders_that_leave_groups_consecutive_are_served(tmp_path, order):
    """The weights are those without the option, and an order in the file is refused."""
    folder = tmp_path / "m"
    if order == "rows":
        integers.quantise_gptq(integers.save_wide(folder), group=64, group_size=-1, desc_act=True)
    else:
        pytest.importorskip("compressed_tensors")
        integers.quantise_compressed_tensors(integers.save_wide(folder))
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
        set_fields(folder, **config)
    found = read_expert(load_stripped(folder, "auto").open_store(), 1, 5)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    wanted = read_weights(integers.save_wide(tmp_path / "plain"))[name].float()
    step = wanted.abs().max() / 7
    assert (found["down_proj"].float() - wanted).abs().max() <= 0.6 * step
    if order != "rows":
        order = {f"{name}_g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 32}
        change_tensor(folder, f"{name}_packed", lambda key, tensor: {key: tensor, **order})
        with pytest.raises(TransferError, match="its g_idx has groups"):
            read_expert(load_stripped(folder, "auto").open_store(), 1, 5)


PACKINGS = {
    "auto_round:auto_gptq": integers.quantise_gptq,
    "auto_round:gptqmodel": partial(integers.quantise_gptq, version="gptq_v2", symmetric=False),
    "auto_round": partial(integers.quantise_gptq, version="gptq_v2"),
    "auto_round:auto_awq": integers.quantise_awq,
}
EXTRA = {"model.layers.0.mlp.gate": {"bits": 16}, "model.layers.1.*": {"group_size": 32}}


@pytest.mark.parametrize("packing", PACKINGS)
def test_load__auto_round_is_read_in_the_layout_that_it_packs_in(tmp_path, packing):
    folder = PACKINGS[packing](integers.save_wide(tmp_path / "m"))
    expected = read_expert(load_stripped(folder, "auto").open_store(), 1, 5)
    is_symmetric = packing in ("auto_round", "auto_round:auto_gptq")
    options = {"bits": 4, "group_size": 32, "sym": is_symmetric, "data_type": "int"}
    options |= {"quant_method": "auto-round", "packing_format": packing, "extra_config": EXTRA}
    set_fields(folder, quantization_config=options)
    assert_same(read_expert(load_stripped(folder, "auto").open_store(), 1, 5), expected)


AUTO_ROUND_VARIANTS = [
    ({"packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compr"),
    ({"data_type": "mx_fp"}, "data_type='mx_fp'"),
    ({"spinquant_config": {"r1": True}}, "spinquant_config"),
    ({"extra_config": {"lm_head": {"bits": 8}}}, "extra_config lm_head bits=8"),
    ({"extra_config": {"lm_head": {"bits": "8"}}}, "extra_config lm_head bits='8'"),
    ({"extra_config": {"lm_head": 8}}, "extra_config lm_head=.*int"),
    ({"extra_config": ["lm_head"]}, "extra_config=.*list"),
    ({"bits": 2}, "bits=2"),
]


@pytest.mark.parametrize(("changes", "message"), AUTO_ROUND_VARIANTS)
def test_scheme__variants_of_auto_round_are_refused_by_name(changes, message):
    given = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "sym": True}
    assert find_scheme("m", given) == IntegerScheme("gptq", 4, is_symmetric=True)
    with pytest.raises(CheckpointError, match=message):
        find_scheme("m", given | changes)
