"""Checkpoints that are not the parameters' own bytes are converted once, when they are packed."""

import pytest
import torch

from runtime.store.packed.store import open_store
from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import packed, read_expert, source_of
from tests.builders.quantised import quantise_fp8


# fp8 with scales; transposed; transposed and without gates' halves apart; modules of their own.
@pytest.mark.parametrize("name", ["qwen3_moe", "dbrx", "gpt_oss", "llama4", "switch_transformers"])
def test_packed_store__holds_what_the_conversion_gives(tmp_path, name):
    model = save_family(tmp_path / "model", FAMILIES[name], dtype=torch.bfloat16)
    if name == "qwen3_moe":
        quantise_fp8(model)
    store, (source, _) = open_store(packed(model, tmp_path / "store"), None), source_of(model)
    assert store.scratch_bytes == 0
    assert store.experts_per_layer == source.experts_per_layer
    for layer, num_experts in enumerate(source.experts_per_layer):
        for expert in range(num_experts):
            found = read_expert(store, layer, expert)
            expected = read_expert(source, layer, expert)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert any(value.float().abs().sum() > 0 for value in found.values())


def test_packed_store__reads_directly_into_arena_slots(tmp_path):
    from runtime.transfer.arena import Arena

    model = tiny_qwen2_moe(tmp_path / "model")
    store = open_store(packed(model, tmp_path / "store"), None)
    arena = Arena(store.layouts, 3)
    for index in range(3):
        for [(start, _)] in store.layouts[0].chunk_ranges:
            assert (arena.slot(index).data_ptr() + start) % 4096 == 0
