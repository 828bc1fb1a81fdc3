"""Of several files with weights in a folder, the model's are those that Transformers loads."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.store.model_check import WEIGHTS, WEIGHTS_INDEX, list_weight_files
from runtime.store.model_source import find_revision, fingerprint, resolve
from runtime.tools.doctor import check_files
from runtime.tools.inflate import plan_inflation
from runtime.tools.verify.reference import plain_bytes
from tests.builders.models import changed, plain_eager, read_weights, set_fields
from tests.builders.packed import pack_model
from tests.builders.served import serve_logits

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def save(folder, name: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def add_zeros(name: str, folder) -> None:
    """Add a file that has every tensor, all zeros."""
    save(folder, name, {key: torch.zeros_like(it) for key, it in read_weights(folder).items()})


def make_index_stale(folder) -> None:
    """Merge the shards into one file; the index and the zeros in its first shard stay."""
    save(folder, WEIGHTS, read_weights(folder))
    listed = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"].values()
    first, *others = sorted(set(listed))
    save(folder, first, {"lm_head.weight": torch.zeros(64, 32)})
    for name in others:
        (folder / name).unlink()


def name_in_configuration(folder) -> None:
    """Let `config.json` name the index, next to a whole file of zeros of the usual name."""
    add_zeros(WEIGHTS, folder)
    (folder / WEIGHTS_INDEX).rename(folder / "own.safetensors.index.json")
    set_fields(folder, transformers_weights="own.safetensors.index.json")


STRAY = {
    "another copy": partial(add_zeros, "original.safetensors"),
    "a later name": partial(add_zeros, "zeros.safetensors"),
    "a variant": partial(add_zeros, "model.fp16.safetensors"),
    "its makers' format": partial(add_zeros, "consolidated.safetensors"),
    "an index that is stale": make_index_stale,
    "a name in config.json": name_in_configuration,
}


@pytest.mark.parametrize("stray", STRAY)
def test_stray_weights__are_in_no_answer_no_copy_and_no_count(tmp_path, tiny, stray):
    weights = read_weights(tiny)
    STRAY[stray](tiny)
    dense = tmp_path / "dense"
    store = pack_model(tiny, tmp_path / "store", dense_output=dense)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_weights(dense).items())
    plain = plain_eager(tiny)
    for model in (tiny, dense):
        found = serve_logits(model, TOKENS, store=store, budget="40%")
        assert torch.equal(found, plain(TOKENS).logits)

    files, facts = list_weight_files(tiny), check_files(tiny, digests=False)
    assert facts["tensors"] == len(weights)
    assert facts["bytes"] == sum(file.stat().st_size for file in files)
    bytes_of_weights = sum(tensor.nbytes for tensor in weights.values())
    assert plain_bytes(tiny, "auto") - plain_bytes(dense, "auto") < 1.2 * bytes_of_weights
    for name, tensor in plan_inflation(tiny, total_bytes=10**6).tensors.items():
        assert tensor.source.file in files, name


def test_fingerprint__is_of_the_weights_alone(tiny):
    before = fingerprint(tiny), find_revision(tiny)
    add_zeros("original.safetensors", tiny)
    assert (fingerprint(tiny), find_revision(tiny)) == before


def test_list_weight_files__says_what_there_is_in_place_of_an_index(tiny):
    (tiny / WEIGHTS_INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors and no .*index.* is needed"):
        list_weight_files(tiny)
    (tiny / "shard-00001-model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match="distributed training"):
        list_weight_files(tiny)


@pytest.mark.parametrize("name", ["../model.safetensors", "model.bin", 7, ["x"], ""])
def test_list_weight_files__takes_no_name_outside_the_folder(tmp_path, folder, name):
    target = changed(folder, tmp_path / "m", "config.json", transformers_weights=name)
    with pytest.raises(CheckpointError, match="transformers_weights is .* no file name"):
        list_weight_files(target)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_resolve__downloads_the_model_s_own_weights_alone(tmp_path, tiny, monkeypatch, is_sharded):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    shards = [file.name for file in list_weight_files(tiny)]
    kept = {"config.json", "generation_config.json", WEIGHTS_INDEX, *shards}
    add_zeros("consolidated.safetensors", tiny)
    if not is_sharded:
        add_zeros(WEIGHTS, tiny)
        kept = {*kept, WEIGHTS} - set(shards)
    shutil.copytree(tiny, tmp_path / "copy")
    (tmp_path / "copy").rename(tiny / "original")
    snapshot = tmp_path / "snapshots" / ("a" * 40)

    def download(_model: str, *, revision, **options) -> str:
        assert revision in (None, snapshot.name)
        files = [str(path.relative_to(tiny)) for path in tiny.rglob("*") if path.is_file()]
        patterns = {kind: options[kind] for kind in ("allow_patterns", "ignore_patterns")}
        for name in filter_repo_objects(files, **patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tiny / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: tiny / "config.json")
    assert resolve(ModelConfig(id="org/model", local_only=False)) == snapshot
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*")} == kept
