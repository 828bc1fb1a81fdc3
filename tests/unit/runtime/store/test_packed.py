"""A packed store gives what was packed, bit for bit, or an error: never other bytes."""

import os
import random

import pytest
import torch

from predictors.spec import ModelSpec
from runtime.errors import StoreError, TransferError
from runtime.store.files import FileReader
from runtime.store.model_source import fingerprint
from runtime.store.packed.coding import HQQ, Coding, quantise_half_quadratic
from runtime.store.packed.store import open_store
from runtime.transfer.arena import Arena
from tests.builders.families.build import save_family
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.packed import altered, assert_same, flip_bit, packed, read_expert, source_of
from tests.builders.quantised import quantise_fp8
from tests.builders.served import serve

TOKENS = torch.arange(24).reshape(1, 24)


@pytest.fixture
def folder(tmp_path, tiny):
    """The packed store of a tiny model."""
    return packed(tiny, tmp_path / "store")


def assert_refused(folder, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        open_store(folder, None)


# Gate and up are 2 KiB each, no block: one chunk. With 64 hidden units they are a block each.
@pytest.mark.parametrize(("hidden_size", "chunk_bytes"), [(32, [4096] * 2), (64, [4096] * 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_store__every_expert_is_the_checkpoints(tmp_path, hidden_size, chunk_bytes, dtype):
    model = tiny_qwen2_moe(tmp_path / "model", hidden_size=hidden_size, dtype=dtype)
    store = open_store(packed(model, tmp_path / "store"), None)
    layout = store.layouts[0]
    if dtype is torch.float32:
        assert layout.chunk_bytes == chunk_bytes
    assert all(edge % 4096 == 0 for ranges in layout.chunk_ranges for edge in ranges[0])
    arena, starts = Arena(store.layouts, 3), [start for [(start, _)] in layout.chunk_ranges]
    for index in range(3):  # into which it reads directly
        assert all((arena.slot(index).data_ptr() + start) % 4096 == 0 for start in starts)
    plain = plain_eager(model)
    by_chunk = [range(i, i + 1) for i in reversed(range(len(layout.chunks)))]
    for layer in range(2):
        bank = plain.model.layers[layer].mlp.experts
        for expert in range(8):
            for chunks in (None, by_chunk):
                weights = read_expert(store, layer, expert, chunks=chunks)
                assert_same(weights, {name: t[expert] for name, t in bank.named_parameters()})
    store.close()


# fp8 with scales; transposed; transposed and without gates' halves apart; modules of their own.
@pytest.mark.parametrize("name", ["qwen3_moe", "dbrx", "gpt_oss", "llama4", "switch_transformers"])
def test_packed_store__holds_what_the_conversion_gives(tmp_path, name):
    """Checkpoints that are not the parameters' own bytes are converted once, when packed."""
    model = save_family(tmp_path / "model", name, dtype=torch.bfloat16)
    if name == "qwen3_moe":
        quantise_fp8(model)
    store, (source, _) = open_store(packed(model, tmp_path / "store"), None), source_of(model)
    assert store.scratch_bytes == 0
    assert store.experts_per_layer == source.experts_per_layer
    for layer, num_experts in enumerate(source.experts_per_layer):
        for expert in range(num_experts):
            found = read_expert(store, layer, expert)
            assert_same(found, read_expert(source, layer, expert))
            assert any(value.float().abs().sum() > 0 for value in found.values())


@pytest.mark.faults
def test_packed_store__every_flipped_bit_is_found(folder):
    rng, found = random.Random(0), dict.fromkeys(sorted(folder.iterdir()), 0)
    for _ in range(500):
        path = rng.choices(list(found), [file.stat().st_size for file in found])[0]
        if rng.random() < 0.2:
            path = folder / rng.choice(["manifest.json", "checksums.bin"])
        bit = rng.randrange(8 * path.stat().st_size)
        flip_bit(path, bit)
        if path.suffix == ".bin" and path.name.startswith("layer"):
            layer, size = int(path.stem[-3:]), path.stat().st_size // 8
            # Between the parts of the first record, opening the store finds it.
            expected = rf"{path.name}.*(layer {layer}, expert |belong to no parameter)"
            with pytest.raises((TransferError, StoreError), match=expected):
                read_expert(open_store(folder, None), layer, bit // 8 // size)
        else:
            assert_refused(folder, path.name)
        found[path] += 1
        flip_bit(path, bit)
    assert min(found.values()) > 20
    open_store(folder, None).close()


def test_packed_store__a_bit_that_flips_on_its_way_is_read_again(folder, monkeypatch):
    store = open_store(folder, None)
    expected = read_expert(store, 0, 3)
    real, calls = FileReader.read, []

    def bad_cable(self, file, offset, target, *, what):
        real(self, file, offset, target, what=what)
        calls.append(offset)
        if len(calls) == 1:
            target[100] ^= 4

    monkeypatch.setattr(FileReader, "read", bad_cable)
    assert_same(read_expert(store, 0, 3), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_open_store__a_file_of_another_length_is_refused(folder, change):
    file = folder / "layer-001.bin"
    os.truncate(file, file.stat().st_size + change)
    assert_refused(folder, r"layer-001.bin has \d+ bytes where \d+ belong")


def test_open_store__another_model_is_refused_with_both_sides(folder, tiny):
    _, spec = source_of(tiny)
    open_store(folder, spec, checkpoint=tiny).close()
    for name, value in {"revision": "f" * 40, "dtype": "float16", "top_k": 7}.items():
        other = ModelSpec(**{**spec.as_dict(), name: value})
        with pytest.raises(StoreError, match=f"{name}: this model has '?{value}") as refusal:
            open_store(folder, other)
        assert str(getattr(spec, name)) in str(refusal.value)


def test_open_store__rejects_other_weights_of_the_same_shapes(tmp_path, folder, tiny):
    trained_on = tiny_qwen2_moe(tmp_path / "other", seed=1)
    with pytest.raises(StoreError, match="packed from other weights"):
        open_store(folder, None, checkpoint=trained_on)
    with pytest.raises(StoreError, match="packed from other weights"):
        serve(trained_on, store=folder)
    assert fingerprint(tiny_qwen2_moe(tmp_path / "same")) == fingerprint(tiny)


HOSTILE = [
    ("", {"version": 1}, "format version 1, this moecast reads 2"),
    ("", {"extra": 1}, "extra: Extra inputs are not permitted"),
    ("layers 0", {"file": "../layer-000.bin"}, "should match"),
    ("layers 0", {"num_experts": 9}, "checksums"),
    ("layers 0 parameters down_proj", {"dtype": "int64"}, "contradicts itself: 'int64'"),
    ("layers 0 parameters down_proj", {"shape": [64, 64]}, r"512 weights for shape \(64, 64\)"),
    ("layers 0 chunks 0", {"end": 4000}, "chunks begin or end at other bytes"),
    ("layers 0 chunks 0 parts 0", {"offset": 1 << 40}, "chunks begin or end at other bytes"),
]


@pytest.mark.parametrize(("where", "fields", "message"), HOSTILE, ids=str)
def test_open_store__a_manifest_that_cannot_be_is_refused(folder, where, fields, message):
    def change(contents: dict) -> None:
        part = contents
        for key in where.split():
            part = part[int(key) if key.isdigit() else key]
        part.update(fields)

    altered(folder, change)
    assert_refused(folder, message)


CLAIMED = [
    *({"kind": kind} for kind in ("Q8_0", "Q4_K", "Q9_0")),
    *({"kind": "hqq", "group_size": size, "meta_group_size": 8} for size in (2, 64)),
    {"kind": "Q8_0", "group_size": 32},
]


@pytest.mark.parametrize("claimed", CLAIMED, ids=str)
def test_open_store__integers_that_are_claimed_over_weights_are_refused(tmp_path, claimed):
    wide = tiny_qwen2_moe(tmp_path / "wide", hidden_size=64, expert_width=64)
    folder = packed(wide, tmp_path / "store")

    def claim(contents: dict) -> None:
        chunks = [chunk for layer in contents["layers"] for chunk in layer["chunks"]]
        for part in (part for chunk in chunks for part in chunk["parts"]):
            part.update(claimed)

    altered(folder, claim)
    faults = "at other bytes|groups of|no whole blocks of 256|type 'Q9_0'"
    assert_refused(folder, rf"contradicts itself: .*({faults})")


def test_open_store__integers_that_are_claimed_over_weights_of_a_block_are_refused(tmp_path):
    """Of experts below a block, records with 8 and with 16 bits are equally long."""
    size = {"hidden_size": 32, "expert_width": 32, "dtype": torch.bfloat16}
    folder = packed(tiny_qwen2_moe(tmp_path / "small", **size), tmp_path / "store")
    open_store(folder, None)

    def claim(contents: dict) -> None:
        for layer in contents["layers"]:
            after = 0
            for chunk in layer["chunks"]:
                for part in chunk["parts"]:
                    part.update(kind="Q8_0", offset=after)
                    after += part["num_weights"] // 32 * 34
                    after += -after % 64
                after = chunk["end"]

    altered(folder, claim)
    assert_refused(folder, "belong to no parameter and are not zero")


@pytest.mark.parametrize("name", ["manifest.json", "checksums.bin", "layer-000.bin"])
def test_open_store__links_and_missing_files_are_refused(tmp_path, folder, name):
    outside = (folder / name).rename(tmp_path / "outside")
    assert_refused(folder, name)
    (folder / name).symlink_to(outside)
    assert_refused(folder, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_store__matches_transformers_with_its_weights(tmp_path, dtype):
    how = Coding(HQQ, 32, 8)
    model = tiny_qwen2_moe(tmp_path / "model", dtype=dtype, hidden_size=64)
    folder, plain = packed(model, tmp_path / "store", coding=how), plain_eager(model)
    original = plain(TOKENS).logits
    with torch.no_grad():
        for layer in plain.model.layers:
            gate_up, down = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
            for matrix in (*(half for expert in gate_up for half in expert.chunk(2)), *down):
                integers = quantise_half_quadratic(how, matrix.reshape(-1))
                scales, zeros = integers.group_values(how)
                values = integers.values.float().view(-1, 32) - zeros[:, None]
                matrix.copy_((values * scales[:, None]).view_as(matrix))
    expected = plain(TOKENS).logits
    assert not torch.equal(expected, original)
    served = serve(model, store=folder, budget="40%")
    with served.moecast as handle, torch.no_grad():
        assert torch.equal(served(TOKENS).logits, expected)
        layout = handle.engine.store.layouts[0]
        # What is made of the integers while an expert computes is taken from the budget.
        assert layout.decoded_bytes >= 3 * 16 * 64 * dtype.itemsize
        slots = handle.stats()["arena_slots"]
        assert handle.stats()["arena_bytes"] == slots * layout.num_bytes + layout.decoded_bytes
