"""Caches within a budget hold the very tensors that Transformers' own hold."""

import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from runtime.errors import PlanError, TransferError
from runtime.generation.config import Offload
from runtime.generation.kv_caches import SinkCacheLayer, make_offload_factory
from runtime.generation.kv_offload import (
    WORKING_COPIES,
    DiskOffload,
    HostOffload,
    KVCacheManager,
    OffloadedCacheLayer,
)
from runtime.store import spill

ROWS, HEADS, WIDTH, MOST = 2, 3, 4, 13
LAYER_BYTES = ROWS * HEADS * 2 * WIDTH * MOST * 4
ONES = torch.ones(3, 2, 2, 2)


def states(tokens, generator, *, dtype=torch.float32, value_width=WIDTH):
    """Keys and values as attention gives them: views of `(B, T, H, D)`."""
    shapes = ((ROWS, tokens, HEADS, width) for width in (WIDTH, value_width))
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) and a.is_contiguous() == b.is_contiguous() for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=4), layers=st.integers(1, 3),
    batches=st.integers(1, 3), room_for=st.integers(0, 9), value_width=st.sampled_from([WIDTH, 2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    outside=st.sampled_from([lambda _: DiskOffload(), HostOffload]),
)  # fmt: skip
def test_stored__is_what_transformers_keeps_whatever_has_room(
    parts, layers, batches, room_for, dtype, value_width, outside
):
    drawn = {"dtype": dtype, "value_width": value_width}
    size = ROWS * HEADS * (WIDTH + value_width) * MOST * dtype.itemsize
    budget = (WORKING_COPIES + room_for) * size
    room = KVCacheManager(budget, outside)
    keys = [(b, layer) for layer in range(layers) for b in range(batches)]
    ours = {key: OffloadedCacheLayer(room, max_cache_length=MOST) for key in keys}
    theirs = {key: DynamicLayer() for key in keys}
    generator = torch.Generator().manual_seed(0)
    for tokens in parts:
        for key in keys:
            new = states(tokens, generator, **drawn)
            assert same(ours[key].update(*new), theirs[key].update(*new))
            assert ours[key].get_seq_length() == theirs[key].get_seq_length()
            assert ours[key].get_mask_sizes(1) == theirs[key].get_mask_sizes(1)
        assert room.admitted_bytes + WORKING_COPIES * size <= budget
        assert room.peak_bytes <= budget
    inside = min(room_for, len(keys))
    assert room.admitted_bytes == inside * size
    assert room.num_read == (len(parts) - 1) * (len(keys) - inside)
    # The first batch ends: what it leaves is taken by others when their turn comes.
    for key in [key for key in keys if key[0] == 0] * 2:
        ours[key].close()
    rest = [key for key in keys if key[0]]
    for key in rest:
        new = states(1, generator, **drawn)
        assert same(ours[key].update(*new), theirs[key].update(*new))
    assert room.admitted_bytes == min(room_for, len(rest)) * size
    for key in rest:
        ours[key].close()
    assert room.admitted_bytes == 0
    room.close()


def test_room__too_small_for_a_layer_names_the_minimum():
    room = KVCacheManager(WORKING_COPIES * LAYER_BYTES - 1, lambda _: DiskOffload())
    with pytest.raises(PlanError, match=rf"kv_budget={WORKING_COPIES * LAYER_BYTES},"):
        OffloadedCacheLayer(room, max_cache_length=MOST).update(*states(2, torch.Generator()))
    room.close()


def test_room__with_no_outside_refuses_what_has_no_room():
    room = KVCacheManager((WORKING_COPIES + 1) * LAYER_BYTES, None)
    new = states(2, torch.Generator())
    OffloadedCacheLayer(room, max_cache_length=MOST).update(*new)
    with pytest.raises(PlanError, match="kv_offload=none"):
        OffloadedCacheLayer(room, max_cache_length=MOST).update(*new)
    room.close()


def test_on_disk__leaves_no_name_and_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = DiskOffload()
    place.write(0, ONES)
    assert torch.equal(place.read(3), ONES)
    assert list(tmp_path.iterdir()) == []
    place.close()


def test_on_disk__is_on_a_disk_or_refused(tmp_path, monkeypatch):
    in_memory, on_disk = (Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))
    monkeypatch.setattr(tempfile, "tempdir", str(in_memory))
    monkeypatch.setattr(spill, "LARGE_FILES", str(on_disk))
    device, mounts = tmp_path.stat().st_dev, tmp_path / "mounts"
    monkeypatch.setattr(spill, "MOUNTS", mounts)
    line = f"20 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 - KIND none rw\n"
    for kind, is_memory in {"ext4": False, "tmpfs": True, "ramfs": True}.items():
        mounts.write_text("19 1 0:0 / / rw - tmpfs none rw\n" + line.replace("KIND", kind))
        assert spill.is_in_memory(in_memory) == is_memory
    place = DiskOffload()
    with pytest.raises(TransferError, match="its files are in memory; set TMPDIR to another fold"):
        place.write(0, ONES)
    place.close()
    monkeypatch.setattr(spill, "is_in_memory", lambda folder: folder == str(in_memory))
    place = DiskOffload()
    assert Path(f"/proc/self/fd/{place._file._handle}").readlink().is_relative_to(on_disk)
    place.write(0, ONES)
    place.close()


def test_on_disk__a_full_disk_is_an_error_that_says_what_to_do(monkeypatch):
    place = DiskOffload()
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TransferError, match=r"No space left.*set TMPDIR"):
        place.write(0, ONES)
    with pytest.raises(TransferError, match=r"^10 bytes cannot.*No space left.*set TMPDIR"):
        place._file.flush(10)
    monkeypatch.undo()
    place.write(0, ONES)
    place._file.flush(10)
    with pytest.raises(TransferError, match="truncated after 10 bytes"):
        place.read(3)
    place.close()


def test_outside_of__host_memory_is_no_place_outside_of_itself():
    cpu = torch.device("cpu")
    with pytest.raises(PlanError, match="use kv_offload=disk"):
        make_offload_factory(Offload.HOST, cpu)
    assert make_offload_factory(Offload.NONE, cpu) is None
    assert isinstance(make_offload_factory(Offload.AUTO, cpu)(3), DiskOffload)
    assert isinstance(make_offload_factory(Offload.AUTO, torch.device("cuda"))(3), HostOffload)


@settings(max_examples=60, deadline=None)
@given(
    padding=st.lists(st.integers(0, 6), min_size=1, max_size=3), prompt=st.integers(7, 12),
    steps=st.integers(0, 10), sinks=st.integers(0, 3), window=st.integers(1, 8),
)  # fmt: skip
def test_sinks__every_row_keeps_its_first_and_last_tokens(padding, prompt, steps, sinks, window):
    layer = SinkCacheLayer(torch.tensor(padding), sinks=sinks, window=window)
    keep, seen = sinks + window, 0
    for tokens in [prompt] + [1] * steps:
        # Each token is its column's number, so that what is kept says where it came from.
        column = torch.arange(seen, seen + tokens, dtype=torch.float32)
        new = column[None, None, :, None].expand(len(padding), 1, tokens, 1)
        before = [] if not seen else layer.keys[:, 0, :, 0].tolist()
        sizes = layer.get_mask_sizes(tokens)
        keys, values = layer.update(new, new)
        seen += tokens
        assert torch.equal(keys, values)
        assert sizes == (keys.shape[2], seen - keys.shape[2])
        if before:
            assert keys[:, 0, :-1, 0].tolist() == before
        for row, pad in enumerate(padding):
            real = list(range(pad, seen))
            expected = list(range(max(0, seen - keep), seen))
            if len(real) > keep:
                expected = real[:sinks] + real[len(real) - window :]
            assert layer.keys[row, 0, :, 0].tolist() == expected
    assert layer.get_seq_length() == seen
