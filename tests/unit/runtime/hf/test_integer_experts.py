"""Experts that are multiplied as they are stored: the same bits whatever is cached or grouped."""

import pytest
import torch

from runtime.commands.pack import choose_coding
from runtime.config import DenseFormat, ModelConfig, Quantise, StoreConfig, VerifyModelConfig
from runtime.errors import StoreError
from runtime.hf import experts
from runtime.hf.loading import load_plain
from runtime.store.ggml import library
from runtime.store.ggml.library import find_products
from runtime.store.packed.store import open_store
from runtime.tools.verify.report import compare_budgets
from tests.builders.families.build import save_family
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import altered, pack_model, packed, read_expert, source_of
from tests.builders.quantised import quantised
from tests.builders.served import serve, serve_logits, serving

TOKENS = torch.tensor([[5, 9, 33, 7, 61, 12, 40, 3]])
STEPS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
STEPS |= {"output_logits": True, "return_dict_in_generate": True}
CODINGS = [choose_coding(how) for how in (Quantise.INT4, Quantise.INT8, Quantise.Q4_0)]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def model(request: pytest.FixtureRequest, tmp_path):
    return tiny_qwen2_moe(tmp_path / "model", dtype=request.param, hidden_size=64, expert_width=96)


@torch.no_grad()
def logits_of(model, store, budget: str):
    """Logits of the tokens in one pass, and of steps of one token."""
    with serving(model, store=store, budget=budget) as served:
        is_decoded = served.moecast.engine.store.layouts[0].decoded_bytes > 0
        assert is_decoded == (find_products() is None)
        return served(TOKENS).logits, torch.stack(served.generate(TOKENS, **STEPS).logits)


def relative_error(found, expected):
    return (found - expected).float().norm() / expected.float().norm()


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_served__budgets_change_no_bit(model, tmp_path, coding):
    """They are those of all experts resident, and near the model's before quantisation."""
    store = packed(model, tmp_path / "store", coding=coding)
    all_resident = logits_of(model, store, "100%")
    assert all(map(torch.equal, logits_of(model, store, "50%"), all_resident))
    resident, plain = all_resident[0], plain_eager(model)(TOKENS).logits
    assert not torch.equal(resident, plain)
    assert relative_error(resident, plain) < (0.05 if coding.kind == "Q8_0" else 0.25)


def test_served__without_the_library_they_are_decoded(model, tmp_path, caplog, monkeypatch):
    store = packed(model, tmp_path / "store", coding=CODINGS[1])
    near, _ = logits_of(model, store, "50%")
    monkeypatch.setattr(library, "_open", lambda: (None, "libggml is away"))
    library.multiplies.cache_clear()
    try:
        with caplog.at_level("INFO"):
            found, _ = logits_of(model, store, "50%")
        assert "before each use, which takes longer than the product; libggml" in caplog.text
    finally:
        library.multiplies.cache_clear()
    # Both round: activations to eight bits the one, each product to bfloat16 the other.
    assert relative_error(found, near) < 0.03


@pytest.mark.parametrize("dense_format", [DenseFormat.OWN, DenseFormat.INT4], ids=str)
def test_verify__compares_with_the_same_kernels(tmp_path, dense_format):
    """Those of packed experts, or of dense layers."""
    folder = tiny_qwen2_moe(tmp_path / "model", dtype=torch.bfloat16)
    source = {"model": ModelConfig(name="tiny", id=str(folder), dense_format=dense_format)}
    if dense_format is DenseFormat.OWN:
        source["store"] = StoreConfig(path=packed(folder, tmp_path / "store", coding=CODINGS[0]))
    config = VerifyModelConfig(**source, budget=["30%"], max_new_tokens=4, device="cpu")
    report = compare_budgets(config, advance=lambda _: None)
    assert report.is_equal
    assert "same kernels" in report.compared


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "dbrx", "jamba", "granitemoe"])
def test_pack__quantised_experts_of_other_families_are_served(name, tmp_path):
    """Transposed experts, those with biases and those with their own loop: by kernel or decoded."""
    folder = save_family(tmp_path / "model", name, dtype=torch.bfloat16)
    store = pack_model(folder, tmp_path / "store", quantise=Quantise.HQQ, group_size=8)
    logits = [serve_logits(folder, TOKENS, store=store, budget=it) for it in ("100%", "50%")]
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


@torch.no_grad()
@pytest.mark.parametrize("quantise", [Quantise.MXFP4, Quantise.INT8], ids=str)
def test_pack__transposed_matrices_are_multiplied_by_their_rows(tmp_path, quantise):
    """Those of gpt-oss: in `mxfp4` each number is the checkpoint's."""
    folder = quantised(tmp_path / "model", "gpt_oss")
    store = pack_model(folder, tmp_path / "store", quantise=quantise)
    opened, (source, _) = open_store(store, None), source_of(folder)
    for expert in range(8 if quantise is Quantise.MXFP4 else 0):
        found, expected = (read_expert(one, 1, expert) for one in (opened, source))
        for name, weight in expected.items():
            assert torch.equal(found[name].t() if weight.dim() > 1 else found[name], weight)
    plain = load_plain(folder, dtype=torch.bfloat16)(TOKENS).logits
    experts._ACCUMULATION.clear()  # as in another process than the one that packed
    resident = logits_of(folder, store, "100%")
    assert relative_error(resident[0], plain) < 0.06
    assert all(map(torch.equal, logits_of(folder, store, "50%"), resident))
    opened.close()


def test_serve__a_store_of_other_shapes_is_refused(tmp_path):
    """Kernels would read beyond the rows; the digest of a manifest proves nothing."""
    folder = quantised(tmp_path / "model", "gpt_oss")
    store = pack_model(folder, tmp_path / "store", quantise=Quantise.INT8)
    altered(store, lambda contents: contents["layers"][1].update(is_flipped=False))
    with pytest.raises(StoreError, match=r"8 experts of the shapes .* this model 3, of 8 of"):
        serve(folder, store=store, budget="50%")
