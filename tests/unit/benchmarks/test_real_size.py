"""A model of real size is made without a checkpoint, and served as the log routes it; here tiny."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import reports, served
from benchmarks.real_size import run as real_size
from benchmarks.real_size.config import RealSizeConfig
from benchmarks.real_size.model import write_random_model
from benchmarks.tables.formats import real_size_table
from predictors.errors import MoecastError
from runtime.store.packed.store import open_store
from tests.builders.children import run_here
from tests.builders.packed import read_expert

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32,
    "hidden_size": 64, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = 16


def write_log(path: Path, *, experts: int = 8) -> Path:
    rng = np.random.default_rng(0)
    places = [(position, layer) for position in range(TOKENS) for layer in (0, 1)]
    drawn = {place: rng.permutation(experts)[:2].tolist() for place in places}
    lines = [{"layer": layer, "experts": own, "position": at} for (at, layer), own in drawn.items()]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def make_config(folder: Path, **options: object) -> RealSizeConfig:
    """A run that routes 4 + 4 tokens, then 4 + 4 more."""
    shape = folder / "config.json"
    shape.write_text(json.dumps(SHAPE))
    chosen = {"system": ["on-demand", "promoe"], "budget": ["50%"], **options}
    return RealSizeConfig(
        output=folder / "real_size.json", work=folder / "work", shape=shape, prompt_tokens=4,
        warm_up_tokens=5, max_new_tokens=5, **chosen,
    )  # fmt: skip


def read_all(store: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(store.iterdir())]


def test_run_real_size__serves_the_model_as_the_log_routes_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(served, "run_in_child", run_here)
    config = make_config(tmp_path, routing=write_log(tmp_path / "log.jsonl"))
    real_size.run_real_size(config)
    report = reports.read_document(config.output)
    assert (report.top_k, report.model_top_k, report.log_tokens) == (2, 4, TOKENS)
    assert report.experts_bytes == 2 * 8 * report.expert_bytes
    on_demand, promoe = report.rows
    assert promoe.predictor == "correlation"
    assert (on_demand.predictor, on_demand.experts_in_memory) == (None, 0.5)
    # Two layers of two experts a token, and what was not hit was read.
    read = (1 - on_demand.hit_rate) * 4 * report.expert_bytes
    assert on_demand.bytes_per_token == pytest.approx(read)
    assert 0 < on_demand.hit_rate < 1
    table = "\n".join(real_size_table(report))
    assert "2 of the model's 4 experts" in table
    assert table.count("| 50% (50 %) |") == 1


def test_run_real_size__refuses_a_log_that_would_repeat_or_does_not_fit(tmp_path) -> None:
    config = make_config(tmp_path, routing=write_log(tmp_path / "log.jsonl"), requests=2)
    with pytest.raises(MoecastError, match="the log has 16 tokens, a run routes 24"):
        real_size.run_real_size(config)
    wide = write_log(tmp_path / "wide.jsonl", experts=64)
    with pytest.raises(MoecastError, match="experts up to 6"):
        real_size.run_real_size(make_config(tmp_path, routing=wide))
    assert not config.work.exists(), "it says so before it writes gigabytes"


def test_write_random_model__continues_and_ends_the_same(tmp_path) -> None:
    shape = {**SHAPE, "num_experts": 4}
    whole = write_random_model(shape, tmp_path / "whole", seed=3)

    done: list[int] = []

    def kill(number: int) -> None:
        done.append(number)
        if sum(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_model(shape, tmp_path / "torn", seed=3, advance=kill)
    assert not (tmp_path / "torn/experts").exists()
    torn = write_random_model(shape, tmp_path / "torn", seed=3)
    assert read_all(torn.store) == read_all(whole.store)
    assert read_all(torn.folder) == read_all(whole.folder)
    other = write_random_model(shape, tmp_path / "other", seed=4)
    assert read_all(other.store) != read_all(whole.store)
    with pytest.raises(MoecastError, match="is another model"):
        write_random_model(shape, tmp_path / "torn", seed=4)


def test_write_random_model__keeps_the_variance_of_activations(tmp_path) -> None:
    store = open_store(write_random_model(SHAPE, tmp_path, seed=0).store, None)
    weights = read_expert(store, 1, 7)
    store.close()
    # Decoded: without kernels, as everywhere where there are none.
    for weight in weights.values():
        scaled = weight.float() * weight.shape[-1] ** 0.5
        assert abs(scaled.mean()) < 0.1
        assert scaled.std() == pytest.approx(1, abs=0.05)
        assert len(torch.unique(scaled)) == 16
