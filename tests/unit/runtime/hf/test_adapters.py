"""Models whose experts no interface of Transformers reaches, each by the adapter of its kind."""

import re
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from predictors.base import Signal
from predictors.baselines import DependencyPredictor, PopularityPredictor
from predictors.expert_map import ExpertMapPredictor
from runtime.config import SystemConfig
from runtime.errors import CheckpointError
from runtime.hf.adapters.base import LayerExperts
from runtime.hf.adapters.parallel import compute_dense_experts
from runtime.hf.layers import find_adapter, find_expert_banks, find_moe_layers
from runtime.hf.loading import load_plain
from runtime.hf.probes import Probes
from tests.builders.families.build import save_family, tiny_model
from tests.builders.families.table import FAMILIES
from tests.builders.listeners import ProbeLog
from tests.builders.packed import source_of
from tests.builders.quantised import rewrite
from tests.builders.served import count_pins, read_in_python, serve, serving

NAMES = [
    "dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"
]  # fmt: skip
"""Models without `use_experts_implementation`, of every kind of adapter."""

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def prompts(*, num_rows: int = 2, num_tokens: int = 9) -> torch.Tensor:
    return torch.randint(4, 90, (num_rows, num_tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens):
    decoder = {"decoder_input_ids": tokens[:, :4]} if model.config.is_encoder_decoder else {}
    return model(input_ids=tokens, **decoder).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save_family(root / name, name, dtype=torch.bfloat16) for name in NAMES}


ORDERS = [*((name, True) for name in NAMES), ("llama4", False), ("longcat_flash", False)]


@pytest.mark.parametrize(("name", "reordered"), ORDERS)
def test_adapter__few_slots_change_no_bit_and_leave_none_pinned(folders, name, reordered):
    """Three passes: the first finds the arena empty, the next full of experts computed last."""
    plain = load_plain(folders[name], dtype=torch.bfloat16)
    model = serve(folders[name], budget="20%", system=SystemConfig(reordered=reordered))
    assert list(find_expert_banks(plain)) == list(find_expert_banks(model))
    assert all(parameter.ndim != 3 for parameter in model.parameters()), "experts are in slots"
    with model.moecast:
        tokens = prompts()
        for _ in range(3):
            assert torch.equal(logits(model, tokens), logits(plain, tokens))
            assert count_pins(model.moecast.engine) == 0
        assert torch.equal(model.generate(tokens, **GREEDY), plain.generate(tokens, **GREEDY))
        assert model.moecast.stats()["misses"] > 0


@pytest.mark.parametrize("name", ["jetmoe", "llama4", "longcat_flash"])
def test_adapter__only_chosen_experts_are_read(folders, name):
    log, everything = ProbeLog(), {"budget": "100%", "system": "on-demand"}
    with serving(folders[name], **everything) as model, Probes(model, {Signal.ROUTED}, log):
        read_in_python(model.moecast.engine)
        store = model.moecast.engine.store
        store.read = Mock(wraps=store.read)
        logits(model, prompts(num_rows=1, num_tokens=1))
        chosen = log.chosen().items()
        wanted = {(n, e) for n, (experts_TK,) in chosen for e in experts_TK.ravel() if e < 8}
        assert {call.args[:2] for call in store.read.call_args_list} == wanted


def test_layers__jetmoes_attention_comes_before_its_mlp(folders):
    with serving(folders["jetmoe"], budget="100%") as model:
        layers, block = find_moe_layers(model), model.model.layers[0]
        parts = "self_attention.experts", "mlp"
        names = [f"model.layers.{number}.{part}" for number in range(2) for part in parts]
        assert [layer.name for layer in layers[:4]] == names
        assert layers[0].router is block.self_attention.experts.router
        assert layers[1].router is block.mlp.router
        attention, mlp, *_ = model.moecast.engine.store.layouts
        assert attention.shapes != mlp.shapes


@pytest.mark.parametrize("name", NAMES)
def test_routed__names_the_experts_that_the_model_computes(folders, name):
    """Against the modules themselves: whose weights does each token meet?"""
    plain, log = load_plain(folders[name], dtype=torch.bfloat16), ProbeLog()
    tokens = prompts(num_rows=1, num_tokens=6)
    with Probes(plain, {Signal.ROUTED, Signal.LOGITS, Signal.WEIGHTS}, log):
        before = logits(plain, tokens)
    for layer in find_moe_layers(plain):
        ((experts_TK, logits_TE, weights_TK),) = log.of("routed", layer.index)
        assert (logits_TE.shape, weights_TK.shape) == ((len(experts_TK), 8), experts_TK.shape)
        assert experts_TK.max() <= 8
        used = experts_TK[(experts_TK < 8) & (weights_TK != 0)].tolist()
        unused = sorted(set(range(8)) - set(used))
        assert unused
        spoil(layer, unused)
    assert torch.equal(logits(plain, tokens), before)


def spoil(layer, unused):
    """Overwrites every weight of these experts, wherever the module has it."""
    if layer.adapter.name == "members":
        for expert in unused:
            for parameter in layer.experts.get_submodule(f"expert_{expert}").parameters():
                parameter.data.fill_(777.0)
        return
    router = set(map(id, layer.router.parameters()))
    for parameter in layer.experts.parameters():
        if parameter.shape[0] == 12:  # LongCat's: four more that have no weights
            parameter.data[unused] = 777.0
        elif id(parameter) not in router and parameter.ndim > 1 and parameter.shape[0] % 8 == 0:
            parameter.data.view(8, -1)[unused] = 777.0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_experts__are_bitwise_the_product_over_all_experts(dtype, threads):
    """A batch of one expert is not: with two threads it differs in float32 from five rows on."""
    torch.set_num_threads(threads)
    whole = next(iter(find_expert_banks(tiny_model("llama4").to(dtype)).values()))

    class Source:
        def ready(self, _layer, wanted):
            for e in reversed(wanted):
                yield {e: {name: value[e].clone() for name, value in whole.named_parameters()}}

    with torch.no_grad():
        for num_tokens in (1, 2, 3, 5, 7, 16, 33):
            hidden_ETD = torch.randn(8, num_tokens, 32).to(dtype)
            hidden_ETD *= torch.rand(8, num_tokens, 1) > 0.6
            hidden = hidden_ETD.view(-1, 32)
            found = compute_dense_experts(whole, LayerExperts(Source(), 0), hidden)
            assert torch.equal(found, whole(hidden))


def test_longcat__zero_experts_have_no_bytes(tmp_path):
    """gate_up_proj has 8 + 4 rows, down_proj 8; published checkpoints name the 8 only."""
    folder, tokens = save_family(tmp_path, "longcat_flash"), prompts(num_tokens=30)
    expected = logits(load_plain(folder, dtype=torch.float32), tokens)
    zero = re.compile(r"\.experts\.(8|9|10|11)\.")
    assert zero.search((folder / "model.safetensors.index.json").read_text())
    rewrite(folder, lambda name, tensor: {} if zero.search(name) else {name: tensor})
    log = ProbeLog()
    with serving(folder, budget="50%") as model, Probes(model, {Signal.ROUTED}, log):
        assert model.moecast.spec.num_experts == 8
        assert torch.equal(logits(model, tokens), expected)
        largest = max(experts_TK.max() for each in log.chosen().values() for experts_TK in each)
        assert largest == 8, "every zero expert has the first id that is no expert's"


TIED = ["switch_transformers", "nllb_moe", "jetmoe"]
LAYOUTS = ["qwen3_vl_moe", "step3p7", "dbrx", "inkling", "llama4"]
"""Transposed, joined along a middle dimension, stacked in two dimensions, interleaved."""


@pytest.mark.parametrize("name", [*TIED, *LAYOUTS])
def test_load__cast_and_ties_are_the_librarys(tmp_path, name):
    """Of models with tied embeddings and of other layouts: from float32 to bfloat16."""
    folder = save_family(tmp_path, name)
    with serving(folder, budget="30%", dtype="bfloat16") as model:
        model.config.dtype = torch.bfloat16
        plain = load_plain(folder, dtype=torch.bfloat16)
        assert torch.equal(logits(model, prompts()), logits(plain, prompts()))
        for one in (model, plain):
            entering, leaving = one.get_input_embeddings(), one.get_output_embeddings()
            assert (leaving.weight is entering.weight) == (name in TIED)


def test_switch__a_token_without_room_asks_for_no_expert(tmp_path):
    """Capacity 1: the rest of a row's tokens on the same expert are dropped by the router."""
    folder = save_family(tmp_path, FAMILIES["switch_transformers"].changed(expert_capacity=1))
    log, tokens = ProbeLog(), prompts(num_tokens=30)
    with serving(folder, budget="25%") as model, Probes(model, {Signal.ROUTED}, log):
        expected = logits(load_plain(folder, dtype=torch.float32), tokens)
        for _ in range(3):
            assert torch.equal(logits(model, tokens), expected)
        skipped = [(one == 8).sum() for each in log.chosen().values() for one in each]
        assert max(skipped) >= 22, "of thirty tokens at most eight find room"
        assert count_pins(model.moecast.engine) == 0


def test_members__experts_of_different_shape_are_refused():
    class OddExperts(nn.ModuleDict):
        pass

    bank = OddExperts({"expert_0": nn.Linear(2, 3), "expert_1": nn.Linear(2, 4)})
    with pytest.raises(CheckpointError, match="differ in shape"):
        find_adapter(bank).strip("odd", bank)


def make_popularity(spec):
    shares = np.random.default_rng(3).random((spec.num_layers, spec.num_experts), np.float32)
    return PopularityPredictor(spec, shares)


PREDICTORS = [
    ("jetmoe", DependencyPredictor),
    ("longcat_flash", make_popularity),
    ("nllb_moe", partial(ExpertMapPredictor.empty, distance=1)),
    ("switch_transformers", DependencyPredictor),
]


@pytest.mark.parametrize(("name", "make_predictor"), PREDICTORS)
def test_predictors__run_with_every_kind_and_change_no_bit(folders, name, make_predictor):
    """Steps of some layers only, ids that mean "skip", two layers in a block."""
    predictor = make_predictor(source_of(folders[name])[1])
    plain = load_plain(folders[name], dtype=torch.bfloat16)
    with serving(folders[name], budget="30%", predictor=predictor) as model:
        tokens = prompts()
        for _ in range(2):
            assert torch.equal(logits(model, tokens), logits(plain, tokens))
            assert torch.equal(model.generate(tokens, **GREEDY), plain.generate(tokens, **GREEDY))
        # A step through one layer is no map of an iteration.
        assert model.moecast.stats()["predicted"] > 0 or name == "nllb_moe"
