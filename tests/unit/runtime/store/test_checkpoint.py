"""Experts read from the checkpoint: the right bytes, and clear errors when they are not there."""

import os
import struct

import pytest
import torch
from transformers import Qwen2MoeForCausalLM

import runtime
from runtime.config import ModelConfig
from runtime.errors import CheckpointError, TransferError
from runtime.store.tensor_index import read_tensor_index
from tests.builders.models import plain_eager, tiny_qwen2_moe


def serve(folder, **kwargs):
    return runtime.load(ModelConfig(name="tiny", id=str(folder)), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store__a_slot_holds_what_transformers_loads(tmp_path, dtype):
    folder = tiny_qwen2_moe(tmp_path / "model", num_experts=12, dtype=dtype)
    plain = plain_eager(folder)
    model = serve(folder)
    with model.moecast:
        store = model.moecast.engine.store
        slot = torch.empty(store.layouts[0].num_bytes, dtype=torch.uint8)
        for layer, expert in [(0, 0), (1, 2), (1, 10), (0, 11)]:
            store.read(layer, expert, range(3), slot)
            weights = store.layouts[layer].weights(slot)
            bank = plain.model.layers[layer].mlp.experts
            assert torch.equal(weights["gate_up_proj"], bank.gate_up_proj[expert])
            assert torch.equal(weights["down_proj"], bank.down_proj[expert])
        assert len(store.layouts[0].chunks) == 3


def test_store__memory_of_experts_is_the_budget(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    model = serve(folder, budget="50%")
    with model.moecast:
        total = sum(
            p.numel() * p.element_size()
            for name, p in plain_eager(folder).named_parameters()
            if ".experts." in name
        )
        assert model.moecast.budget_bytes <= total // 2
        assert not any(".experts." in name for name, _ in model.named_parameters())
        assert model.moecast.stats()["arena_slots"] == 8


def test_read_extents__truncated_file_is_named(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model")
    file = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        read_tensor_index([file])


@pytest.mark.parametrize("prefix", [b"", b"short", struct.pack("<Q", 2**60), b"\0" * 16])
def test_read_extents__no_header_is_refused(tmp_path, prefix):
    file = tmp_path / "model.safetensors"
    file.write_bytes(prefix)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_tensor_index([file])


@pytest.mark.faults
def test_load__a_truncated_file_fails_the_request_only(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=16)
    tokens = torch.arange(20).reshape(1, 20)
    expected = plain_eager(folder)(tokens).logits
    model = serve(folder, budget="20%")
    with model.moecast, torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)
        saved = {file: file.read_bytes() for file in folder.glob("*.safetensors")}
        for file in saved:
            os.truncate(file, 4096)
        with pytest.raises(TransferError, match="truncated"):
            model(tokens)
        for file, content in saved.items():
            file.write_bytes(content)
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.faults
def test_load__serves_on_after_an_io_error_that_names_the_file(tmp_path, monkeypatch):
    folder = tiny_qwen2_moe(tmp_path / "model")
    tokens = torch.arange(8).reshape(1, 8)
    expected = plain_eager(folder)(tokens).logits
    model = serve(folder, budget="30%")
    real = os.preadv

    def broken(*args):
        raise OSError(5, "Input/output error")

    with model.moecast, torch.no_grad():
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(TransferError, match=r"safetensors.*Input/output error"):
            model(tokens)
        monkeypatch.setattr(os, "preadv", real)
        assert torch.equal(model(tokens).logits, expected)


def test_load__save_pretrained_is_refused(tmp_path):
    model = serve(tiny_qwen2_moe(tmp_path / "model"))
    with model.moecast, pytest.raises(CheckpointError, match="copy the checkpoint"):
        model.save_pretrained(tmp_path / "copy")


def test_load__missing_model_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"not on this machine.*local_only=false .*or give a"):
        runtime.load("publisher/no-such-model")
    with pytest.raises(CheckpointError, match="no config.json"):
        runtime.load(tmp_path)


@pytest.mark.faults
def test_store__an_error_names_the_expert_of_a_fused_tensor(tmp_path):
    folder = tiny_qwen2_moe(tmp_path / "hub")
    model = Qwen2MoeForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    served = serve(tmp_path / "fused")
    with served.moecast:
        store = served.moecast.engine.store
        slot = torch.empty(store.layouts[1].num_bytes, dtype=torch.uint8)
        for file in (tmp_path / "fused").glob("*.safetensors"):
            os.truncate(file, 4096)
        with pytest.raises(TransferError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\[5\]"):
            store.read(1, 5, range(1), slot)
