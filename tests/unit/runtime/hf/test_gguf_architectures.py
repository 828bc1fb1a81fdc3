"""Every architecture of GGUF files, against llama.cpp (`tests/builders/gguf_files/written.py`)."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from runtime.errors import CheckpointError
from runtime.hf.dense_format import QuantisedEmbedding, QuantisedLinear
from runtime.hf.gguf_config import read_gguf_config
from runtime.hf.loading import load_stripped
from runtime.hf.tokens import eos_token_ids, load_tokenizer
from runtime.store.gguf.architectures import read_architectures
from tests.builders.gguf_files import gguf_file, written
from tests.builders.gguf_files.written import ARCHITECTURES, SPLITS, make_weights, write_gguf
from tests.builders.packed import pack_model
from tests.builders.served import serve_logits

TOKENS = torch.tensor([written.PROMPT])
TOLERANCE = 1e-5
"""Of logits, relative: everything is float32 here and in llama.cpp."""


def error_of(name: str, file, *, kind: str = "F32") -> float:
    options = {"dtype": "float32", "budget": "50%", "system": "on-demand"}
    logits = serve_logits(file, TOKENS, **options)[0, -1]
    expected = torch.tensor(ARCHITECTURES[name]["logits"][kind])
    return ((logits - expected).norm() / expected.norm()).item()


def test_table__has_a_file_of_every_architecture():
    assert {one["architecture"] for one in ARCHITECTURES.values()} == set(read_architectures())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_load__computes_what_llama_cpp_does(tmp_path, name):
    assert error_of(name, write_gguf(name, tmp_path / "model.gguf")) < TOLERANCE


def test_load__a_file_of_before_heads_were_split_has_the_same_logits(tmp_path):
    """llama.cpp computes the same of it, to 7e-7."""
    shapes, added = ARCHITECTURES["deepseek2"]["tensors"], {}
    for layer in range(3):
        names = [f"blk.{layer}.attn_{part}_b.weight" for part in "kv"]
        keys, values = (make_weights(name, shapes[name]) for name in names)
        joined = np.concatenate([keys.transpose(0, 2, 1), values], 1).reshape(-1, keys.shape[1])
        added[f"blk.{layer}.attn_kv_b.weight"] = joined

    def remove_split(tensors: dict[str, list[int]]) -> None:
        for key in [key for key in tensors if "attn_k_b" in key or "attn_v_b" in key]:
            del tensors[key]

    sizes = {"key_length": 24, "value_length": 12, "head_count_kv": 4}
    gone = dict.fromkeys(("key_length_mla", "value_length_mla"))
    metadata = {f"attention.{key}": size for key, size in {**sizes, **gone}.items()}
    file = tmp_path / "model.gguf"
    write_gguf("deepseek2", file, metadata=metadata, change=remove_split, added=added)
    assert error_of("deepseek2", file) < TOLERANCE


def test_load__layers_that_predict_further_tokens_are_left_out(tmp_path):
    more = {"block_count": 4, "nextn_predict_layers": 1}
    change = add("blk.3.nextn.eh_proj.weight", 32, 64)
    file = write_gguf("glm4moe", tmp_path / "model.gguf", metadata=more, change=change)
    assert error_of("glm4moe", file) < TOLERANCE


def test_load__mxfp4_experts_with_biases_are_multiplied_as_they_are(tmp_path):
    file = write_gguf("gpt-oss", tmp_path / "model.gguf", experts="MXFP4")
    # llama.cpp rounds activations to eight bits, too.
    assert error_of("gpt-oss", file, kind="MXFP4") < 0.01
    store = load_stripped(file, "float32").open_store()
    assert all(layout.row_matrices for layout in store.layouts)
    store.close()


@pytest.mark.parametrize(("name", "is_tied"), [("granitemoe", True), ("olmoe", False)])
def test_load__embeddings_stay_as_the_file_has_them(tmp_path, name, is_tied):
    file = write_gguf(name, tmp_path / "model.gguf", embeddings="Q8_0")
    model = load_stripped(file, "bfloat16").model
    table = model.get_input_embeddings()
    assert isinstance(table, QuantisedEmbedding)
    ids = torch.tensor([[[3, 1, 3], [0, 2, len(table.weight) - 1]]])
    for some in (ids, ids[0, 0, 0], ids[:, :0]):
        assert torch.equal(table(some), F.embedding(some, table.weight))
    for wrong in (ids + 1, ids - 1):
        with pytest.raises(IndexError):
            table(wrong)
    assert next(model.parameters()).dtype is torch.bfloat16
    weights = torch.from_numpy(make_weights("token_embd.weight", list(table.weight.shape)))
    assert (table.weight - weights).norm() < 0.01 * weights.norm()
    head = model.get_output_embeddings()
    assert isinstance(head, QuantisedLinear) == is_tied
    if is_tied:
        assert head.rows.data_ptr() == table.rows.data_ptr()
    plain = write_gguf(name, tmp_path / "plain.gguf")
    options = {"dtype": "bfloat16", "budget": "100%", "system": "on-demand"}
    found, expected = (serve_logits(one, TOKENS, **options) for one in (file, plain))
    assert (found - expected).norm() < 0.02 * expected.norm()


PACKED = ["gpt-oss", "llama4", "granitemoe", "qwen2moe-F16", "qwen3moe-wide-Q5_K_M"]


@pytest.mark.parametrize("name", PACKED)
def test_pack__of_a_file_serves_the_same_bits(tmp_path, name):
    """Also of plain weights, and where experts have several types."""
    file = gguf_file(name)
    if name in ARCHITECTURES:
        file = write_gguf(name, tmp_path / "model.gguf", experts="Q8_0")
    options, packed = {"budget": "60%", "system": "on-demand"}, pack_model(file, tmp_path / "store")
    outputs = [serve_logits(file, TOKENS, store=store, **options) for store in (None, packed)]
    assert torch.equal(*outputs)


UNKNOWN = [
    ("llama", "attention.clamp_kqv", 8.0),
    ("llama", "expert_gating_func", 2),
    ("deepseek2", "expert_weights_norm", True),
    ("olmoe", "expert_weights_scale", 2.5),
    ("olmoe", "expert_group_count", 2),
    ("llama", "attention.sliding_window", 8),
    ("olmoe", "rope.scaling.type", "longrope"),
    ("gpt-oss", "rope.scaling.yarn_ext_factor", 0.5),
]
"""Metadata that change the result in a way that is not computed."""
METADATA = [
    *((name, key, it, re.escape(f"{name}.{key} = {it}")) for name, key, it in UNKNOWN),
    ("llama", "attention.head_count_kv", [2, 4], r"llama.attention.head_count_kv = \(2, 4\)"),
    ("olmoe", "expert_used_count", None, "it has no olmoe.expert_used_count"),
    ("olmoe", "expert_used_count", 9, "a token cannot use 9"),
    ("glm4moe", "attention.head_count", 0, "is damaged: its metadata make no glm4_moe"),
    ("olmoe", "embedding_length", "wide", "is damaged: its metadata make no olmoe"),
    ("gpt-oss", "attention.sliding_window_pattern", [True], "is damaged"),
    ("olmoe", "block_count", 0, "its metadata say 0 layers"),
    ("afmoe", "block_count", 2**31, "its metadata say 2147483648 layers"),
    ("gpt-oss", "block_count", 3, "has no tensor for model.layers.2"),
    ("olmoe", "expert_count", 5, r"ffn_gate_inp.weight is \(4, 32\); by the"),
    ("gpt-oss", "expert_count", 3, r"blk.0.ffn_gate_inp.\w+ is \(4"),
    ("olmoe", "expert_count", 2**31, "ffn_gate_inp.weight is"),
]


@pytest.mark.parametrize(("name", "key", "it", "message"), METADATA, ids=str)
def test_load__refuses_metadata_that_it_would_compute_otherwise(tmp_path, name, key, it, message):
    file = write_gguf(name, tmp_path / "model.gguf", metadata={key: it})
    with pytest.raises(CheckpointError, match=message):
        load_stripped(file, "float32")


def remove(key: str):
    return lambda tensors: tensors.pop(key)


def add(key: str, *shape: int):
    return lambda tensors: tensors.update({key: list(shape)})


TENSORS = [
    ("llama", add("blk.0.attn_q.bias", 32), "has the tensor blk.0.attn_q.bias, which"),
    ("olmoe", add("blk.1.ffn_up_exps.scale", 4), "has the tensor blk.1.ffn_up_exps.scale"),
    ("olmoe", add("blk.1.ffn_up_exps.bias", 4, 64), "has the tensor blk.1.ffn_up_exps.bias"),
    ("gpt-oss", remove("blk.1.attn_sinks.weight"), "model.layers.1.self_attn.sinks"),
    ("olmoe", remove("blk.1.ffn_up_exps.weight"), "no tensors for gate_up_proj of layer 1"),
    ("gpt-oss", remove("blk.1.ffn_up_exps.bias"), "no tensors for gate_up_proj_bias of layer 1"),
    ("deepseek2", remove("blk.0.attn_v_b.weight"), "model.layers.0.self_attn.kv_b_proj"),
    ("deepseek2", add("blk.0.attn_v_b.weight", 4, 12, 16), "attn_v_b.weight is"),
    ("glm4moe", add("blk.0.attn_k.weight", 32, 16), r"attn_k.weight is \(32, 16\); by the"),
    ("glm4moe", add("blk.0.ffn_up.weight", 32, 64), r"ffn_up.weight is \(32, 64\); by"),
    ("llama", add("rope_freqs.weight", 7), "model has 4 frequencies"),
    ("llama4", add("blk.1.ffn_up_exps.weight", 4, 32, 64), "ffn_up_exps.weight is"),
]
"""Tensors of another kind, missing ones, and some of other shapes."""


@pytest.mark.parametrize(("name", "change", "message"), TENSORS, ids=[row[2] for row in TENSORS])
def test_load__refuses_tensors_that_are_not_the_models(tmp_path, name, change, message):
    file = write_gguf(name, tmp_path / "model.gguf", change=change)
    with pytest.raises(CheckpointError, match=message):
        load_stripped(file, "float32").open_store()


def test_config__takes_llama_cpps_defaults_and_not_one_models(tmp_path):
    """DeepSeek-V3's own are 2.5, eight groups and normalised weights."""
    keys = "expert_weights_scale", "expert_weights_norm", "expert_group_count", "rope.freq_base"
    given = dict.fromkeys(keys)
    config = read_gguf_config(write_gguf("deepseek2-v3", tmp_path / "model.gguf", metadata=given))
    assert (config.routed_scaling_factor, config.norm_topk_prob, config.n_group) == (1.0, False, 1)
    assert config.rope_parameters["rope_theta"] == 10000.0


ENDS = [
    ("glm4moe", {"eos": 1, "eot": 3, "eom": 2}, (1, 3, 2)),
    ("glm4moe", {"eos": 3, "eot": 3}, (3,)),
    ("glm4moe", {}, ()),
    ("gpt-oss", {"eos": 9}, (9, 8, 40)),
]


@pytest.mark.parametrize(("name", "ends", "expected"), ENDS)
def test_config__names_every_token_that_ends_an_answer(tmp_path, name, ends, expected):
    texts = {8: "<|endoftext|>", 9: "<|return|>", 40: "<|call|>", 41: "<|end|>"}
    file = write_gguf(name, tmp_path / "model.gguf", ends=ends, texts=texts)
    assert eos_token_ids(load_stripped(file, "float32").model) == expected


@pytest.mark.parametrize("pre", SPLITS["tokens"])
def test_tokenizer__splits_text_as_llama_cpp_does(tmp_path, pre):
    tokenizer = load_tokenizer(write_gguf("olmoe", tmp_path / "model.gguf", pre=pre))
    tokens = tokenizer(SPLITS["text"], add_special_tokens=False)["input_ids"]
    assert tokens == SPLITS["tokens"][pre]
    assert tokenizer.decode(tokens) == SPLITS["text"]


def test_tokenizer__of_a_vocabulary_that_splits_text_in_an_unknown_way_is_refused(tmp_path):
    file = write_gguf("olmoe", tmp_path / "model.gguf", pre="viking")
    with pytest.raises(CheckpointError, match="tokenizer.ggml.pre = 'viking', and how that splits"):
        load_tokenizer(file)


SPOILT = [(b"ggml.merges", b"ggml.murges"), (b"t he", b"t~he")]


@pytest.mark.parametrize("change", SPOILT, ids=["no merges", "a merge"])
def test_tokenizer__that_is_damaged_is_named(tmp_path, change):
    file = write_gguf("olmoe", tmp_path / "model.gguf", pre="olmo")
    assert change[0] in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(*change))
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read .*; fetch the file"):
        load_tokenizer(file)
