"""Files of a checkpoint or a packed store, which are read before any weight is."""

from contextlib import suppress

from runtime.store.gguf import header
from runtime.store.model_check import CONFIG, WEIGHTS_INDEX, check_folder
from runtime.store.packed import manifest
from runtime.store.packed.store import PackedStore
from runtime.store.tensor_index import read_tensor_index
from tests.fuzz.mutation import change_fields
from tests.fuzz.named_file import write_input
from zoo.digest import hash_bytes


def open_header(data: bytes) -> None:
    """Reads the header of a safetensors file."""
    for stored in read_tensor_index([write_input(data, "model.safetensors")]).values():
        assert 8 <= stored.offset <= stored.offset + stored.num_bytes <= len(data)


def open_gguf(data: bytes) -> None:
    """Reads the header of a GGUF file."""
    # Files of one size that are written within a tick of the clock are the same one for its cache.
    header._read_header.cache_clear()
    path = write_input(data, "model.gguf")
    for tensor in header.read_header(path).tensors.values():
        assert 0 < tensor.offset <= tensor.offset + tensor.num_bytes <= len(data)
    header.check_gguf(path)


def open_config(data: bytes) -> None:
    """Checks a folder with this `config.json`."""
    write_input(b"", "config/model.safetensors")
    check_folder(write_input(data, f"config/{CONFIG}").parent)


def open_weights_index(data: bytes) -> None:
    """Checks a folder with this index of weights."""
    write_input(b"", "index/a.safetensors")
    write_input(b'{"model_type": "qwen2_moe"}', f"index/{CONFIG}")
    check_folder(write_input(data, f"index/{WEIGHTS_INDEX}").parent)


def open_packed(data: bytes) -> None:
    """Opens a packed store by its manifest, also after its digests were computed anew."""
    write_input(b"", f"packed/{manifest.CHECKSUMS}")
    folder = write_input(change_fields(data, with_digests), f"packed/{manifest.MANIFEST}").parent
    contents, checksums = manifest.read_manifest(folder)
    with suppress(ValueError, KeyError, OverflowError):
        for layer in contents.layers:
            manifest.restore_layout(layer)
    PackedStore(folder, contents, checksums)


def with_digests(fields: dict) -> dict:
    """Returns a manifest with digests of its values and of no checksums."""
    fields["checksums_sha256"] = hash_bytes(b"")
    body = {key: fields[key] for key in ("contents", "checksums_sha256")}
    return {**fields, "digest": hash_bytes(manifest.canonical_json(body))}
