"""Experts read from the checkpoint: the right bytes, and clear errors when they are not there."""

import json
import os
import struct
from functools import partial

import pytest
from transformers import Qwen2MoeForCausalLM

from runtime.errors import CheckpointError, TransferError
from runtime.store.model_check import WEIGHTS_INDEX, check_folder, read_weights_index
from runtime.store.tensor_index import read_tensor_index
from runtime.tools.doctor import check_files
from tests.builders.models import changed
from tests.builders.packed import read_expert
from tests.builders.served import serving


@pytest.mark.parametrize("prefix", [b"", b"short", struct.pack("<Q", 2**60), b"\0" * 16])
def test_read_extents__no_header_is_refused(tmp_path, prefix):
    file = tmp_path / "model.safetensors"
    file.write_bytes(prefix)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_tensor_index([file])


@pytest.mark.faults
def test_store__an_error_names_the_expert_of_a_fused_tensor(tmp_path, folder):
    model = Qwen2MoeForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    with serving(tmp_path / "fused") as served:
        store = served.moecast.engine.store
        for file in (tmp_path / "fused").glob("*.safetensors"):
            os.truncate(file, 4096)
        with pytest.raises(TransferError, match=r"layers\.1\.mlp\.experts\.gate_up_proj\[5\]"):
            read_expert(store, 1, 5, chunks=[range(1)])


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write_header(file, header) -> None:
    raw = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(64))


FAULTS = {
    "dtype": [7, "F4"],
    "shape": ["2, 2", [2, -2], [2.0, 2], [True, 4], [2, 3], [2**62] * 30_000, [10**4000]],
    "data_offsets": [
        None, [0, 8, 16], [-8, 8], [16, 0], ["0", "16"], [0, float("nan")],
        [2**62, 2**62 + 16], [10**4299, 10**4299 + 16],
    ],
}  # fmt: skip
"""Values of an entry's fields."""
HEADERS = [
    *("[]", "{not json", "[" * 50_000, '{"w": ' + "1" * 5_000 + "}", {"w": None}, {"w": {}}),
    '{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "w": {}}',
    *({"w": {**ENTRY, field: value}} for field, values in FAULTS.items() for value in values),
]


@pytest.mark.parametrize("header", HEADERS)
def test_read_tensor_index__any_fault_names_the_file(tmp_path, header):
    file = tmp_path / "model-00003.safetensors"
    write_header(file, header)
    with pytest.raises(CheckpointError, match=r"model-00003\.safetensors: "):
        read_tensor_index([file])


def test_read_tensor_index__finds_a_repeated_name_among_many(tmp_path):
    """Counting each name took minutes."""
    entry = json.dumps(ENTRY)
    names = [*(f'"w{i}": {entry}' for i in range(50_000)), f'"w49999": {entry}']
    write_header(tmp_path / "model.safetensors", "{" + ",".join(names) + "}")
    with pytest.raises(CheckpointError, match="'w49999' occurs twice"):
        read_tensor_index([tmp_path / "model.safetensors"])


def test_read_tensor_index__a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_tensor_index([tmp_path / "model.safetensors"])
    (tmp_path / "config.json").write_text('{"num_experts": 4}')
    with pytest.raises(CheckpointError, match="not a plain file"):
        check_folder(tmp_path)


OUTSIDE = ["../x", "/etc/passwd", "a/b.safetensors", "", 7, None, ["x"], "..\\x", "x\0.safetensors"]


@pytest.mark.parametrize("weight_map", OUTSIDE)
def test_weights_index__names_no_file_outside_the_folder(tmp_path, folder, weight_map):
    listed = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"]
    listed |= {"lm_head.weight": weight_map}
    target = changed(folder, tmp_path / "m", WEIGHTS_INDEX, weight_map=listed)
    for check in (check_folder, read_weights_index, partial(check_files, digests=False)):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is in .* no file name"):
            check(target)


def test_weights_index__that_is_no_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / WEIGHTS_INDEX)
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_weights_index(tmp_path)
