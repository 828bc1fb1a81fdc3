"""Entries of a base model that serve its quantisations: their routers are the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import runtime
from predictors.baselines import PopularityPredictor
from predictors.errors import MoecastError
from predictors.spec import SAMPLES, ModelSpec, encode_samples, find_router_difference
from runtime.config import ModelConfig
from runtime.hf.loading import load_stripped
from tests.builders.families.build import save_family
from tests.builders.gguf_files import gguf_file
from tests.builders.integers import quantise_gptq, save_wide
from tests.builders.quantised import rewrite
from zoo.catalog import WritableZoo
from zoo.entry import open_entry, write_entry
from zoo.errors import MismatchError
from zoo.storage import cache_storage


@pytest.fixture(params=["gguf", "gptq"], scope="module")
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    """A base model and its quantisation."""
    if request.param == "gguf":
        return gguf_file("qwen3moe-BF16"), gguf_file("qwen3moe-Q4_0")
    folder = tmp_path_factory.mktemp("models")
    return save_wide(folder / "base"), quantise_gptq(save_wide(folder / "gptq"))


def spec_of(path: Path, *, name: str, dtype: str = "auto") -> ModelSpec:
    return load_stripped(path, dtype).spec(path, ModelConfig(name=name, id=str(path), dtype=dtype))


def publish(folder: Path, spec: ModelSpec) -> None:
    """Put `base/popularity`, an entry for this model, into the user's zoo."""
    made = PopularityPredictor(spec, np.full((spec.num_layers, spec.num_experts), 0.25, np.float32))
    metrics = {"held_out": {"accuracy": 0.75}}
    write_entry(folder / "entry", made, name="base/popularity", metrics=metrics)
    WritableZoo(cache_storage()).add(open_entry(folder / "entry"))


def generate(path: Path, *, predictor: str, base: str | None = None) -> dict[str, object]:
    config = ModelConfig(name="quantised", id=str(path), base=base)
    model = runtime.load(config, device="cpu", budget="50%", system="promoe", predictor=predictor)
    with model.moecast:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
        return model.moecast.stats()


@pytest.mark.parametrize("predictor", ["popularity", "base/popularity"])
def test_entry__of_the_base_serves_its_quantisation(models, tmp_path, caplog, predictor):
    base, quantised = models
    assert spec_of(base, name="base").identity != spec_of(quantised, name="quantised").identity
    publish(tmp_path, spec_of(base, name="base"))
    with caplog.at_level("INFO"):
        stats = generate(quantised, predictor=predictor)
    assert isinstance(stats["recall"], float)
    assert "states of base, held-out accuracy 0.750; quantised, a quantisation of it" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_entry__without_samples_serves_what_the_user_names_its_quantisation(models, tmp_path):
    base, quantised = models
    publish(tmp_path, replace(spec_of(base, name="base"), routers=None))
    assert b"routers" not in (tmp_path / "entry" / "manifest.json").read_bytes()
    with pytest.raises(MismatchError, match=r"a quantisation of base, say so: model.base=base\."):
        generate(quantised, predictor="base/popularity")
    assert generate(quantised, predictor="popularity", base="base")["recall"] is not None
    with pytest.raises(MismatchError, match="model_id"):
        generate(quantised, predictor="base/popularity", base="another")


def test_entry__of_a_model_with_other_routers_is_refused(tmp_path: Path) -> None:
    quantised = quantise_gptq(save_wide(tmp_path / "gptq"))
    spec = spec_of(quantised, name="base")
    gate = "model.layers.1.mlp.gate.weight"
    rewrite(quantised, lambda name, tensor: {name: tensor * 1.01 if name == gate else tensor})
    publish(tmp_path, replace(spec, revision="another"))
    # The user's word does not stand against the routers.
    for base in (None, "base"):
        with pytest.raises(MismatchError, match=r"The routers differ from layer 1 on"):
            generate(quantised, predictor="base/popularity", base=base)


def test_entry__of_other_sizes_is_refused_whatever_the_user_says(models, tmp_path):
    base, quantised = models
    spec = spec_of(base, name="base")
    publish(tmp_path, replace(spec, routers=None, top_k=spec.top_k + 1))
    with pytest.raises(MismatchError, match="top_k") as caught:
        generate(quantised, predictor="base/popularity", base="base")
    assert "model.base" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_samples__agree_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    folder = save_family(tmp_path / "model", "qwen3_moe")
    own = spec_of(folder, name="base").routers
    other = spec_of(folder, name="base", dtype=dtype).routers
    assert own is not None
    assert find_router_difference(own, other) is None


def test_samples__differ_beyond_rounding() -> None:
    weights_S = np.linspace(-1, 1, SAMPLES, dtype=np.float32)
    own = encode_samples([weights_S.tolist(), weights_S.tolist()])
    for change, layer in ((1e-3, None), (0.01, 1), (np.nan, 1)):
        changed_S = weights_S.copy()
        changed_S[3] *= 1 + change
        other = encode_samples([weights_S.tolist(), changed_S.tolist()])
        assert find_router_difference(own, other) == layer


@pytest.mark.parametrize("base", ["", " "])
def test_base__that_is_empty_is_refused(base: str) -> None:
    with pytest.raises(MoecastError, match=r"model.base='.*such as Qwen/Qwen3-30B-A3B"):
        ModelConfig(base=base)
