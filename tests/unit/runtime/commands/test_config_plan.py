"""`doctor` without weights: sizes of published models from their configuration alone."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, PreTrainedConfig

from predictors.units import GIB, MIB
from runtime.commands import config_plan, doctor
from runtime.commands.pack import choose_coding
from runtime.config import DoctorConfig, ModelConfig, Quantise
from runtime.engine.memory import peak_memory_bytes
from runtime.errors import CheckpointError
from runtime.hf.layers import find_top_k
from runtime.hf.loading import build_skeleton, count_weight_bytes, load_stripped
from runtime.store.base import max_slot_bytes
from runtime.store.layout import ExpertLayout
from runtime.store.model_source import check_examined_model
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import packed

SPEEDS = {"disk_bytes_per_second": GIB, "memory_bytes_per_second": 16 * GIB}
KIMI_K2 = DeepseekV3Config(
    architectures=["DeepseekV3ForCausalLM"], n_routed_experts=384, first_k_dense_replace=1,
    num_attention_heads=64, num_key_value_heads=64, n_group=1, topk_group=1, vocab_size=163840,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip
LIMITS = config_plan.MachineLimits(free_memory_bytes=64 * GIB, **SPEEDS)


def save(folder: Path, config: PreTrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


def doctor_of(folder: Path | str, **more) -> DoctorConfig:
    return DoctorConfig(model=ModelConfig(name="model", id=str(folder)), **more)


def plan(folder: Path) -> tuple:
    stripped = build_skeleton(folder, dtype="bfloat16")
    assert all(tensor.is_meta for tensor in stripped.model.parameters())
    top_k = find_top_k(stripped.model, stripped.layers)
    counts = config_plan.count_parameters(stripped, top_k=top_k, kv_bytes_per_token=1)
    formats = config_plan.lay_out_formats(stripped)
    plans = config_plan.plan_formats(counts, formats, LIMITS, kv_tokens=0)
    return counts, {one.format: one for one in plans}


PUBLISHED = {
    # As published; DeepSeek-V3 without its layer that predicts a second token.
    "deepseek-v3": (DeepseekV3Config(), 671, 37.0),
    "kimi-k2": (KIMI_K2, 1026, 32.0),
    "gpt-oss-120b": (GptOssConfig(num_hidden_layers=36, num_local_experts=128), 117, 5.1),
    "mixtral-8x7b": (MixtralConfig(), 46.7, 12.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan__counts_the_parameters_of_published_models(tmp_path, name):
    (config, billions, active), before = PUBLISHED[name], peak_memory_bytes()
    counts, plans = plan(save(tmp_path, config))
    assert peak_memory_bytes() - before < 300 * MIB
    assert counts.parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert counts.active_parameters / 1e9 == pytest.approx(active, rel=0.04)
    bits = 8 * plans["int4"].experts_bytes / counts.expert_parameters
    # Q4_K; Q4_1 where rows are no multiple of 256 weights; more where biases stay as they are.
    assert bits == pytest.approx(5 if name == "gpt-oss-120b" else 4.5, rel=0.01)
    assert plans["bfloat16"].experts_bytes == pytest.approx(2 * counts.expert_parameters, rel=1e-3)


def test_plan__has_the_sizes_of_packed_experts(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", hidden_size=64, expert_width=32)
    store = packed(folder, tmp_path / "store", coding=choose_coding(Quantise.INT4))
    size = sum(file.stat().st_size for file in store.glob("layer-*.bin"))
    assert plan(folder)[1]["int4"].experts_bytes == size


KINDS = ["qwen2_moe", "gpt_oss", "granitemoe", "llama4", "switch_transformers"]


@pytest.mark.parametrize("name", KINDS)
def test_plan__has_the_sizes_of_experts_of_every_kind(tmp_path, name):
    # Transposed with biases, fused in the checkpoint, stacked, and a module for each.
    folder = save_family(tmp_path / "model", FAMILIES[name], dtype=torch.bfloat16)
    counts, plans = plan(folder)
    stripped = load_stripped(folder, "bfloat16")
    store = stripped.open_store()
    assert counts.dense_bytes == count_weight_bytes(stripped.model)
    assert plans["bfloat16"].expert_bytes == max_slot_bytes(store)
    assert counts.num_experts == store.num_experts
    store.close()


def test_plan_formats__bounds_the_time_of_a_token_by_hand():
    layout = ExpertLayout(shapes={}, dtypes={}, chunks=(), ends=(GIB,))
    counts = config_plan.ModelCounts(
        parameters=0, expert_parameters=0, active_parameters=0, dense_bytes=8 * GIB,
        read_dense_bytes=6 * GIB, kv_bytes_per_token=0, num_layers=10, num_experts=10, top_k=2,
    )  # fmt: skip
    speeds = {"disk_bytes_per_second": GIB, "memory_bytes_per_second": 13 * GIB}

    def bound(free_gib: float) -> config_plan.FormatPlan:
        limits = config_plan.MachineLimits(free_memory_bytes=int(free_gib * GIB), **speeds)
        return config_plan.plan_formats(counts, {"x": [layout] * 10}, limits, kv_tokens=0)[0]

    # 90 % of 65 GiB, less 8 for weights and .29 for the process: 50 of 100 experts.
    half, whole, none = bound(65), bound(200), bound(8)
    assert (half.hit_rate, half.reads_per_token) == (0.5, 10)
    assert (half.disk_seconds, half.memory_seconds, half.tpot_seconds) == (10, 2, 10)
    # All experts in memory: the 6 GiB and 20 experts that a token uses.
    assert (whole.hit_rate, whole.disk_seconds, whole.tpot_seconds) == (1, 0, 2)
    assert none.budget_bytes is None
    assert "not enough free memory" in none.error
    assert none.reads_per_token == pytest.approx(20 * 0.98)


def test_doctor__plans_a_folder_with_only_a_configuration(tmp_path, capsys, monkeypatch):
    config = doctor_of(save(tmp_path / "k2", KIMI_K2), run_dir=tmp_path)
    check_examined_model(config)
    monkeypatch.setattr(config_plan, "is_in_memory", lambda _: False)
    report = json.loads(json.dumps(doctor.run(config), allow_nan=False))
    assert report["model"]["kv_bytes_per_token"] == 61 * 2 * (512 + 64)
    assert [row["format"] for row in report["formats"]] == ["bfloat16", "int8", "int4"]
    assert report["machine"]["disk_bytes_per_second"] > 0
    printed = capsys.readouterr().out
    assert "1,026.4 billion" in printed
    assert "60 layers of 384, 8 per token" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["k2"], "the scratch file is gone"


def test_doctor__plans_a_whole_checkpoint_on_request(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(config_plan, "is_in_memory", lambda where: where == tmp_path)
    report = doctor.run(doctor_of(tiny, config_only=True, run_dir=tmp_path))
    assert report["config_only"]
    assert report["machine"]["disk_bytes_per_second"] is None, "memory is no disk"
    # All in memory: nothing is read.
    assert {row["reads_per_token"] for row in report["formats"]} == {0}


def test_check_examined_model__finds_a_configuration_in_the_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub = tmp_path / "models--org--k2"
    save(hub / "snapshots" / ("a" * 40), KIMI_K2)
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("a" * 40)
    check_examined_model(doctor_of("org/k2"))
    with pytest.raises(CheckpointError, match="not on this machine"):
        check_examined_model(doctor_of("org/no", config_only=True))


UNPLANNABLE = [
    ("{", "is damaged"),
    ("[]", "not a JSON object"),
    ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "LlamaForCausalLM has"),
    ('{"model_type": "mixtral", "num_local_experts": "eight"}', "is damaged"),
    ('{"model_type": "unheard_of_moe"}', "no model of type 'unheard_of_moe'"),
]


@pytest.mark.parametrize(("text", "message"), UNPLANNABLE)
def test_doctor__refuses_a_configuration_that_it_cannot_plan(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        doctor.run(doctor_of(tmp_path, run_dir=tmp_path))


def test_doctor__without_configuration_says_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        check_examined_model(doctor_of(tmp_path, config_only=True))
